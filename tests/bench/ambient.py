"""The cost of being scoped: ambient look-up and scope entry against their floors. `python -m tests.bench.ambient`.

Each backend runs in a process of its own, so that none pays for another's mirrors.
"""

import contextlib
import subprocess
import sys
import threading
from contextvars import ContextVar

import dualmesh as dm
from tests.bench.timing import interleaved, repeated, table

_variable: ContextVar[object] = ContextVar("bench", default=None)


def read_variable() -> object:
    """Read a ContextVar: the floor of every ambient look-up."""
    return _variable.get()


class _Local(threading.local):
    def __init__(self) -> None:
        self.value = None


_local = _Local()


def hand_written(backend: str, state: dm.ParallelState) -> type:
    """Return a slots class that sets the same storages as a scope on this backend: the floor of a scope."""
    if backend == "jax":
        return _jax_floor(state)

    class Floor:
        __slots__ = ("_saved", "_token", "_value")

        def __init__(self, value: object) -> None:
            self._value = value

        def __enter__(self) -> None:
            self._token = _variable.set(self._value)
            self._saved = _local.value
            _local.value = self._value

        def __exit__(self, *exc: object) -> None:
            _local.value = self._saved
            _variable.reset(self._token)

    return Floor


def _jax_floor(state: dm.ParallelState) -> type:
    import jax

    context = jax.make_user_context(default_value=None)
    mesh = state.mesh

    class Floor:
        __slots__ = ("_mesh", "_saved", "_token", "_user", "_value")

        def __init__(self, value: object) -> None:
            self._value = value

        def __enter__(self) -> None:
            self._user = context(self._value)
            self._user.__enter__()
            self._mesh = jax.set_mesh(mesh)
            self._mesh.__enter__()
            self._token = _variable.set(self._value)
            self._saved = _local.value
            _local.value = self._value

        def __exit__(self, *exc: object) -> None:
            _local.value = self._saved
            _variable.reset(self._token)
            self._mesh.__exit__(*exc)
            self._user.__exit__(*exc)

    return Floor


def measure(backend: str) -> None:
    """Print the table of one backend."""
    own_rank = backend != "jax"
    with dm.session(backend=backend, world_size=1 if own_rank else 4):
        state = dm.init_parallel_state(dp_size=1 if own_rank else 2, ulysses_size=1 if own_rank else 2)
        names = {
            "get": dm.get_parallel_state,
            "use": dm.use_parallel_state,
            "read": read_variable,
            "floor": hand_written(backend, state),
            "state": state,
        }
        index = "get().index('sp')" if own_rank else "get().index('sp', 0)"
        rows = {
            "read a ContextVar in a function": "read()",
            "get_parallel_state()": "get()",
            "get_parallel_state().group('sp')": "get().group('sp')",
            "get_parallel_state().size('sp')": "get().size('sp')",
            "get_parallel_state().index('sp')": index,
            "scope by hand, same storages": "with floor('base'): pass",
            "use_parallel_state('base')": "with use('base'): pass",
        }
        with dm.use_parallel_state("base"):
            seconds = interleaved({row: repeated(code, names) for row, code in rows.items()}, number=5_000, repeats=60)
        floors = {row: "read a ContextVar in a function" for row in list(rows)[1:5]}
        floors["use_parallel_state('base')"] = "scope by hand, same storages"
        table(f"{backend}, Python {sys.version.split()[0]}", seconds, floors)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        for name in ("sim", "torch", "jax"):
            with contextlib.suppress(KeyboardInterrupt):
                subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.bench.ambient", name], check=True)
