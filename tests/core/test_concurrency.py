"""Many threads and tasks at once: registering, looking up, scoping; and threads that forgot the scope."""

import asyncio
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ScopeError, StateWarning
from dualmesh.runtime.registry import registry

SIZES = {"a": 2, "b": 4, "c": 8, "d": 1}


def states():
    """Register a state per name, tp as SIZES say."""
    return dm.init_parallel_states({name: dm.parallel_spec(dp_size=8 // tp, tp_size=tp) for name, tp in SIZES.items()})


def together(count, work):
    """Call `work(number)` in threads that start at the same moment; return what they return."""
    gate = threading.Barrier(count)

    def started(number):
        gate.wait(20)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(60) for future in [pool.submit(started, number) for number in range(count)]]


def test_eight_threads_register_look_up_and_scope_at_once(world):
    """Equal specs become one state whoever comes first, and nobody sees another thread's scope."""

    def work(number):
        names = list(SIZES)[number % 4 :] + list(SIZES)[: number % 4]
        seen = []
        for turn in range(25):
            for name in names:
                own = dm.init_parallel_state(
                    dp_size=8 // SIZES[name], tp_size=SIZES[name], name=f"{name}{number}{turn}"
                )
                with dm.use_parallel_state(f"{name}{number}{turn}"):
                    assert dm.get_parallel_state() is own
                    with dm.use_parallel_state(f"{names[0]}{number}{turn}"):
                        assert dm.get_parallel_state().size("tp") == SIZES[names[0]]
                    assert dm.ops.axis_size("tp") == SIZES[name]
                assert dm.get_parallel_state_by_name(f"{name}{number}{turn}") is own
                seen.append((name, id(own)))
        return set(seen)

    found = together(8, work)
    assert all(seen == found[0] for seen in found), "one state per spec"
    assert len(registry.states()) == 4
    assert len(registry.names()) == 8 * 25 * 4


def test_one_of_eight_threads_builds_a_name_and_all_get_that_state(world):
    """A name that is taken meanwhile is a warning, never a second state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        found = together(8, lambda number: dm.init_parallel_state(dp_size=8, name="one"))
    assert len(set(map(id, found))) == 1


def test_states_are_cleared_and_registered_anew_while_others_read(world):
    """Readers get a state that is registered or an error of dualmesh, never something half made."""
    stop = threading.Event()

    def work(number):
        if number:
            while not stop.is_set():
                try:
                    with dm.use_parallel_state("b"):
                        assert dm.ops.axis_size("tp") == 4
                except dm.DualmeshError:
                    pass
            return
        for _ in range(40):
            states()
            dm.clear_parallel_state()
        stop.set()

    together(8, work)


@pytest.mark.usefixtures("no_framework")
def test_tasks_with_interleaved_scopes_keep_their_own(world):
    """Tasks that take turns inside scopes, and leave them in another order than they entered."""
    states()

    @dm.use_parallel_state("a")
    async def decorated(steps):
        seen = []
        for _ in range(steps):
            seen.append(dm.scope_name())
            await asyncio.sleep(0)
        return seen

    async def block(name, steps):
        seen = []
        with dm.use_parallel_state(name):
            for _ in range(steps):
                seen.append(dm.scope_name())
                await asyncio.sleep(0)
        return seen

    async def all_of_them():
        return await asyncio.gather(block("b", 5), decorated(7), block("c", 3), block("d", 9), decorated(2))

    found = asyncio.run(all_of_them())
    assert found == [["b"] * 5, ["a"] * 7, ["c"] * 3, ["d"] * 9, ["a"] * 2]
    assert dm.scope_name() == "a", "the default again"


def test_an_unscoped_read_in_a_thread_warns_once_where_topologies_differ(world):
    """It names the thread, the default and the cure."""
    states()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        together(4, lambda number: [dm.get_parallel_state() for _ in range(10)])
    assert [warning.category for warning in caught] == [StateWarning]
    message = str(caught[0].message)
    for part in ("ThreadPoolExecutor", "entered no scope, and 4 topologies", "the default, 'a'", "dm.bind(fn)"):
        assert part in message
    assert caught[0].filename == __file__


def test_an_unscoped_read_in_a_thread_is_an_error_in_strict_mode(world):
    """Every one of them, and never in the main thread."""
    states()
    dm.strict(True)
    try:
        for _ in range(2):
            with pytest.raises(ScopeError, match="entered no scope, and 4 topologies"):
                together(1, lambda number: dm.get_parallel_state())
        assert dm.get_parallel_state().size("tp") == 2
    finally:
        dm.strict(False)


def test_a_thread_that_is_bound_or_alone_with_one_topology_is_not_warned(world):
    """`dm.bind` carries the default too; one topology under several names leaves nothing to mix up."""
    dm.init_parallel_states({"a": dm.parallel_spec(dp_size=8), "b": dm.parallel_spec(dp_size=8)})
    assert together(1, lambda number: dm.get_parallel_state().size("dp")) == [8]
    dm.init_parallel_state(tp_size=8, name="c")
    bound = dm.bind(lambda: dm.get_parallel_state().size("dp"))
    assert together(1, lambda number: bound()) == [8]
    lifted = dm.shard_map(lambda x: x * dm.ops.axis_size("dp"), dm.P("dp"), dm.P("dp"))
    assert dm.to_numpy(lifted(np.ones(8))).tolist() == [8.0] * 8
