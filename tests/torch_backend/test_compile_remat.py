"""Compiled code in checkpointed blocks, threads, tasks and later lives, and in more states than torch compiles."""

import pytest

import dualmesh as dm
from tests.worlds import torch_world

# Along "a" rank r meets r ^ 2 in A (a is outermost) and r ^ 1 in B.
A = dm.TopologySpec({"a": 2, "b": 2})
B = dm.TopologySpec({"b": 2, "a": 2})
PARTNER = {"A": 2, "B": 1}


def wanted(rank, name):
    """Return d/dx of sum over ranks of sin(sum over the pair of cos(x)), at x = 0.1 + rank."""
    import math

    x, other = 0.1 + rank, 0.1 + (rank ^ PARTNER[name])
    return -math.sin(x) * 2 * math.cos(math.cos(x) + math.cos(other))


def gradient(fn, rank):
    import torch

    x = torch.tensor([0.1 + rank], requires_grad=True)
    fn(x).sum().backward()
    return x.grad.item()


def forms():
    """Return functions that recompute sin(all_reduce(cos(x))) in state B, wherever the scope is opened."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def block(x):
        return torch.sin(dm.ops.all_reduce(torch.cos(x), "a"))

    def opening(x):
        with dm.use_parallel_state("B"):
            return block(x)

    def around(x):
        with dm.use_parallel_state("B"):
            return dm.remat(block)(x)

    decorated = dm.use_parallel_state("B")(block)
    return {
        "opened inside": lambda x: checkpoint(opening, x, use_reentrant=False),
        "opened inside remat": lambda x: dm.remat(opening)(x),
        "decorated": lambda x: dm.remat(decorated)(x),
        "nested": lambda x: dm.remat(lambda y: dm.remat(opening)(y))(x),
        "around": around,
    }


def recomputed(backend, rounds, names):
    """Return gradients of some forms, compiled, in main and in a fresh thread, in each life of the states."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    torch._dynamo.reset()
    found = []
    all_forms = forms()
    compiled = {name: torch.compile(all_forms[name], fullgraph=True, backend=backend) for name in names}
    for _ in range(rounds):
        dm.init_parallel_states({"A": A, "B": B}, default="A")
        rank = dm.get_parallel_state().own_rank()
        for name, fn in compiled.items():
            found.append((name, gradient(fn, rank), dm.scope_name()))
            with ThreadPoolExecutor(1) as fresh:
                found.append((name, fresh.submit(gradient, fn, rank).result(), fresh.submit(dm.scope_name).result()))
        dm.clear_parallel_state()
    return found


FORMS = ("opened inside", "opened inside remat", "decorated", "nested", "around")


@pytest.mark.parametrize(
    ("backend", "rounds", "names"),
    [("eager", 1, FORMS), ("aot_eager", 2, FORMS[1:4]), ("inductor", 1, FORMS[1:2])],
)
def test_a_scope_around_or_inside_a_checkpointed_block_compiles(backend, rounds, names):
    for rank, found in enumerate(torch_world(recomputed, backend, rounds, names, world_size=4, timeout_s=300)):
        assert len(found) == rounds * 2 * len(names)
        for name, value, after in found:
            assert value == pytest.approx(wanted(rank, "B"), rel=1e-5), name
            assert after == "A"


def too_many():
    import torch

    dm.init_parallel_states({str(n): dm.TopologySpec({"a": 2}) for n in range(9)}, default="0")
    torch._dynamo.reset()

    def fn(x):
        return x + int(dm.scope_name())

    def answers(**settings):
        compiled = torch.compile(fn, backend="eager", **settings)
        found = []
        for name in map(str, range(9)):
            with dm.use_parallel_state(name):
                found.append(compiled(torch.zeros(1)).item())
        return found

    try:
        answers(fullgraph=True)
    except Exception as error:
        said = error.__notes__
    torch._dynamo.reset()
    uncompiled = answers()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=9):
        return said, uncompiled, answers(fullgraph=True)


def test_more_states_than_torch_compiles_are_told_the_cure():
    for said, uncompiled, raised in torch_world(too_many, world_size=2):
        assert len(said) == 1
        assert "stops at 8 compiles" in said[0]
        assert "Set torch._dynamo.config.recompile_limit above the number of states" in said[0]
        assert uncompiled == raised == list(range(9))


def tasks():
    import asyncio

    import torch

    dm.init_parallel_states({"A": A, "B": B}, default="A")
    torch._dynamo.reset()
    fn = torch.compile(lambda x: x + dm.ops.axis_index("a"), fullgraph=True, backend="eager")

    def stepping(name):
        @dm.use_parallel_state(name)
        async def steps():
            found = []
            for _ in range(3):
                found.append(fn(torch.zeros(1)).item())
                await asyncio.sleep(0)
            return found

        return steps()

    async def together():
        return await asyncio.gather(stepping("A"), stepping("B"))

    return asyncio.run(together())


def test_decorated_coroutines_that_take_turns_run_compiled_code_each_in_its_state():
    for rank, found in enumerate(torch_world(tasks, world_size=4)):
        assert found == [[rank // 2] * 3, [rank % 2] * 3]
