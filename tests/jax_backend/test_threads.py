"""Threads, executors and asyncio tasks: which state jitted code sees there, and what JAX's contexts are afterwards."""

import numpy as np

import dualmesh as dm
from dualmesh.errors import ScopeError
from tests.jax_backend.worker import in_jax, two_grids, two_meshes

X = np.arange(8.0)
SUMS = {"a": [4.0, 6.0, 8.0, 10.0], "b": [12.0, 16.0]}


def summed():
    """Return the sum over sp, lifted."""
    return dm.shard_map(lambda x: dm.ops.all_reduce(x, "sp"), dm.P("sp"), dm.P())


def total(x):
    """Return the sum over sp in the ambient state, as a list."""
    return np.asarray(summed()(x)).tolist()


@in_jax()
def test_threads_see_the_default_or_what_is_bound():
    import threading

    import jax

    two_meshes()
    size = jax.jit(lambda x: x * dm.get_parallel_state().size("sp"))
    found = {}

    def ask(key):
        found[key] = (float(size(1.0)), total(X))

    with dm.use_parallel_state("b"):
        ask("here")
        threads = [threading.Thread(target=ask, args=("free",)), threading.Thread(target=dm.bind(ask), args=("bound",))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    b, a = (4.0, SUMS["b"]), (2.0, SUMS["a"])
    assert found == {"here": b, "bound": b, "free": a}


@in_jax()
def test_decorated_coroutines_keep_their_scopes_apart():
    import asyncio

    import jax

    two_meshes()
    size = jax.jit(lambda x: x * dm.get_parallel_state().size("sp"))

    def task(name, expected):
        @dm.use_parallel_state(name)
        async def run():
            for _ in range(3):
                assert float(size(1.0)) == expected
                assert total(X) == SUMS[name]
                await asyncio.sleep(0)

        return run()

    async def main():
        await asyncio.gather(task("a", 2.0), task("b", 4.0))

    asyncio.run(main())
    assert jax.sharding.get_mesh().empty


@in_jax()
def test_a_context_apart_from_its_thread_is_refused_and_spoils_no_cache():
    import asyncio
    import contextvars
    import threading

    import jax

    two_meshes()
    read = jax.jit(lambda x: x * dm.get_parallel_state().size("sp"))
    lifted = summed()

    def in_thread(fn, *args):
        found = []

        def run():
            try:
                found.append(fn(*args))
            except ScopeError as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        return found[0]

    async def awaited(fn, *args):
        with dm.use_parallel_state("b"):
            await asyncio.sleep(0)
            return await asyncio.to_thread(fn, *args)

    async def task_after_the_block(fn, *args):
        async def call():
            return fn(*args)

        with dm.use_parallel_state("b"):
            task = asyncio.create_task(call())
        return await task

    with dm.use_parallel_state("b"):
        context = contextvars.copy_context()
    attempts = {
        "to_thread": lambda *call: asyncio.run(awaited(*call)),
        "task after the block": lambda *call: asyncio.run(task_after_the_block(*call)),
        "copied context": context.run,
        "copied context in a thread": lambda *call: in_thread(context.run, *call),
    }
    for attempt in attempts.values():
        for call in ((read, 1.0), (lifted, X), (dm.get_parallel_state,), (dm.scope_name,)):
            try:
                found = attempt(*call)
            except ScopeError as error:
                found = error
            assert isinstance(found, ScopeError)
            assert "ambient state here is 'b'" in str(found)
            assert "dm.bind" in str(found)
    assert float(read(1.0)) == 2.0
    assert total(X) == SUMS["a"]
    with dm.use_parallel_state("b"):
        assert float(read(1.0)) == 4.0
        bound = dm.bind(read)
    assert float(context.run(bound, 1.0)) == 4.0
    assert float(in_thread(context.run, bound, 1.0)) == 4.0


@in_jax()
def test_blocks_held_across_awaits_leave_jax_as_it_was():
    import asyncio

    import jax

    two_meshes()
    read = jax.jit(lambda x: x * dm.get_parallel_state().size("sp"))

    async def held(name, steps):
        with dm.use_parallel_state(name):
            for _ in range(steps):
                await asyncio.sleep(0)

    async def main():
        await asyncio.gather(held("a", 1), held("b", 4), held("a", 2))
        return float(read(1.0))

    assert asyncio.run(main()) == 2.0
    assert jax.sharding.get_mesh().empty
    with dm.use_parallel_state("b"):
        assert float(read(1.0)) == 4.0
    assert float(read(1.0)) == 2.0


@in_jax()
def test_a_prefetch_thread_puts_batches_where_its_bound_scope_says():
    import queue
    import threading

    import jax

    states = two_grids()
    batches = [np.arange(16.0, dtype=np.float32).reshape(8, 2) + step for step in range(4)]

    def prefetched(load):
        """Return what a thread loads while the consumer computes, as input pipelines do it."""
        ready = queue.Queue(maxsize=1)

        def fill():
            for batch in batches:
                ready.put(load(batch))
            ready.put(None)

        thread = threading.Thread(target=fill)
        thread.start()
        while (batch := ready.get(timeout=60)) is not None:
            yield batch
        thread.join(60)
        assert not thread.is_alive()

    @jax.jit
    def step(x):
        return dm.shard_map(lambda x: dm.ops.all_reduce(x.sum(), "dp"), dm.P("dp"), dm.P())(x)

    def load(batch):
        return dm.scope_name(), dm.distribute(batch, dm.P("dp"))

    with dm.use_parallel_state("talker"):
        for name, given in (("talker", dm.bind(load)), ("dense", load)):
            for batch, (scope, x) in zip(batches, prefetched(given), strict=True):
                assert scope == name
                assert x.sharding.is_equivalent_to(states[name].sharding(dm.P("dp")), 2)
                assert float(step(x)) == batch.sum()
    assert jax.sharding.get_mesh().empty


@in_jax()
def test_executors_run_what_is_bound_in_its_scope_and_the_rest_in_the_default():
    from concurrent.futures import ThreadPoolExecutor

    import jax

    two_meshes()
    size = jax.jit(lambda x: x * dm.get_parallel_state().size("sp"))

    def ask(x):
        return float(size(x)), total(X), jax.sharding.get_mesh().empty

    b, a = (4.0, SUMS["b"], False), (2.0, SUMS["a"], True)
    with ThreadPoolExecutor(2) as executor, dm.use_parallel_state("b"):
        bound = dm.bind(ask)
        assert list(executor.map(bound, [1.0] * 4)) == [b] * 4
        assert list(executor.map(ask, [1.0] * 4)) == [a] * 4
        mixed = [executor.submit(fn, 1.0) for fn in (bound, ask) * 4]
        assert [call.result(60) for call in mixed] == [b, a] * 4
        assert ask(1.0) == b


@in_jax()
def test_a_callback_out_of_jitted_code_sees_what_is_bound():
    import jax

    two_meshes()
    seen = []

    def tell(x):
        seen.append((dm.scope_name(), float(x)))

    with dm.use_parallel_state("b"):
        bound = dm.bind(tell)

        @jax.jit
        def step(x):
            jax.debug.callback(bound, x)
            return x + 1

        step(1.0)
    jax.effects_barrier()
    assert seen == [("b", 1.0)]
