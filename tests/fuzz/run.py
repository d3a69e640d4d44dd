"""Run targets on drawn inputs."""

import warnings

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import dualmesh as dm
from dualmesh.errors import DualmeshError
from dualmesh.runtime import scope
from dualmesh.runtime.registry import registry
from tests.fuzz.targets import TARGETS
from tests.fuzz.values import is_left_out, is_shown


def fuzzed(name: str, count: int, *, derandomize: bool) -> int:
    """Try a target on that many inputs, in a simulated world; return how many there were.

    Raises:
        AssertionError: An error that is none of dualmesh's, or one that does not show what it is about.
    """
    tried = 0

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=derandomize,
        report_multiple_bugs=False,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(data):
        nonlocal tried
        tried += 1
        call, shown = TARGETS[name](data.draw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _tried(call, shown)

    with dm.session(backend="sim", world_size=8):
        dm.init_parallel_state(dp_size=4, tp_size=2)
        one()
    return tried


def _tried(call, shown):
    try:
        call()
    except DualmeshError as error:
        message = str(error)
        wrong = [value for value in shown if not is_left_out(value)]
        if wrong and not any(is_shown(value, message) for value in shown):
            raise AssertionError(f"none of {shown!r} is in the message: {message}") from error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}; given {shown!r}") from error
    finally:
        _put_back()


def _put_back():
    while scope.read() is not None:
        scope.pop(scope.read())
    base = registry.named["base"]
    registry.drop([state for state in registry.states() if state is not base])
    for name in [name for name in registry.names() if name != "base"]:
        del registry.named[name]
