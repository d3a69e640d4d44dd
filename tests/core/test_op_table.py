"""The op table's transposes, proved by the inner product over all ranks: <d, A x> = <A' d, x>."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.backend.transpose_rules import call, transpose
from dualmesh.errors import NotDifferentiableError
from tests.contract.oracle import groups
from tests.contract.runs import opened
from tests.worlds import sim_world

AXES = [(8, "a"), (8, ("c", "a")), (8, "narrow"), (8, "world"), (6, ("b", "a")), (3, "a")]
VERBS = [
    ("all_reduce", {"op": "sum"}),
    ("all_reduce", {"op": "mean"}),
    ("all_gather", {"dim": 1}),
    ("reduce_scatter", {"dim": 1, "op": "sum"}),
    ("reduce_scatter", {"dim": 0, "op": "mean"}),
    ("all_to_all", {"split_dim": 0, "concat_dim": 1}),
    ("all_to_all", {"split_dim": 1, "concat_dim": 1}),
    ("broadcast", {"src": 1}),
    ("reduce", {"src": 1}),
    ("permute", {"pairs": ((0, 1),)}),
    ("permute", {"pairs": ((0, 1), (1, 2), (2, 0))}),
    ("shift", {"offset": 1, "wrap": True}),
    ("shift", {"offset": -3, "wrap": True}),
    ("shift", {"offset": 1, "wrap": False}),
    ("take_block", {"dim": 1}),
    ("place_block", {"dim": 1}),
]


def carried_out(one, x):
    collectives = dm.get_parallel_state().collectives
    size = {"size": one.size} if one.verb == "shift" else {}
    return one.scale * getattr(collectives, one.verb)(x, one.axis, **dict(one.settings), **size)


def inner_products(world, forward, adjoint):
    """Return (<d, A x>, <A' d, x>), each summed over ranks in float64."""
    opened(world)

    def each():
        random = np.random.default_rng(dm.ops.axis_index("world"))
        x = random.standard_normal((24, 24))
        y = carried_out(forward, x)
        d = random.standard_normal(y.shape)
        return tuple(np.array([np.sum(one)]) for one in (d * y, carried_out(adjoint, d) * x))

    there, back = dm.shard_map(each, (), dm.P("world"))()
    return dm.to_numpy(there).sum(), dm.to_numpy(back).sum()


def proof(world, forward, adjoint):
    ((there, back),) = sim_world(inner_products, world, forward, adjoint, world_size=world)
    return abs(there - back) <= 1e-10 * max(1.0, abs(there))


@pytest.mark.parametrize(("world", "axis"), AXES)
@pytest.mark.parametrize(("verb", "settings"), VERBS)
def test_transpose_is_the_adjoint_over_all_ranks(world, axis, verb, settings):
    size = groups(world, axis).shape[1]
    if any(index >= size for pair in settings.get("pairs", ()) for index in pair):
        settings = {"pairs": tuple((i, 1 - i) for i in range(2))}
    forward = call(verb, axis, size, scale=0.75, **settings)
    assert proof(world, forward, transpose(forward))


@pytest.mark.parametrize(("verb", "settings"), VERBS)
def test_transpose_of_the_transpose_is_the_collective(verb, settings):
    forward = call(verb, "a", 4, scale=0.5, **settings)
    back = transpose(transpose(forward))
    if verb == "reduce_scatter" and settings["op"] == "mean":
        forward = call(verb, "a", 4, scale=0.125, dim=0, op="sum")
    assert back == forward


@pytest.mark.parametrize(
    ("forward", "wrong"),
    [
        (call("all_gather", "a", 2, dim=0), call("take_block", "a", 2, dim=0)),
        (call("all_gather", "a", 2, dim=0), call("reduce_scatter", "a", 2, dim=0, op="mean")),
        (call("all_reduce", "a", 2, op="mean"), call("all_reduce", "a", 2, op="sum")),
        (call("broadcast", "a", 2, src=0), call("all_reduce", "a", 2, op="sum")),
        (call("broadcast", "a", 2, src=0), call("reduce", "a", 2, src=1)),
        (call("permute", "a", 2, pairs=((0, 1),)), call("permute", "a", 2, pairs=((0, 1),))),
        (call("shift", "a", 2, offset=1, wrap=False), call("shift", "a", 2, offset=1, wrap=False)),
        (call("take_block", "a", 2, dim=0), call("all_gather", "a", 2, dim=0)),
    ],
    ids=str,
)
def test_the_proof_refuses_what_is_no_transpose(forward, wrong):
    assert not proof(8, forward, wrong)


@pytest.mark.parametrize("op", ["max", "min"])
def test_max_and_min_have_no_transpose(op):
    with pytest.raises(NotDifferentiableError, match=rf"op='{op}'.*'tp' has no gradient.*stop_gradient"):
        transpose(call("all_reduce", "tp", 2, op=op))


def test_settings_of_a_call_are_read_by_name():
    assert call("all_gather", "dp", 2, dim=1)["dim"] == 1
