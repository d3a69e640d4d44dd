"""What a lifted function may hold, change and return, and what is differentiated: where it cannot be, it is refused."""

import functools

import numpy as np

import dualmesh as dm
from tests.worlds import torch_world

held = None


def scale(x):
    return x * held


class Holder:
    def __init__(self, w):
        self.w = w
        self.unused = w

    def method(self, x):
        return x * self.w

    def innocent(self, x):
        return x * 2

    def __call__(self, x):
        return x * self.w


def through_global_helper(w):
    global held
    held = w
    return lambda x: scale(x)


def through_inner_function(w):
    def fn(x):
        def inner(y):
            return y * w

        return inner(x)

    return fn


def through_closed_function(w):
    def inner(y):
        return y * w

    return lambda x: inner(x)


def through_closed_object(w):
    holder = Holder(w)
    return lambda x: x * holder.w


def through_module(w):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Module()
            self.inner.w = torch.nn.Parameter(w)

        def forward(self, x):
            return x * self.inner.w

    return Net()


CAPTURES = {
    "bound method": (lambda w: Holder(w).method, "self.w"),
    "callable object": (Holder, "self.w"),
    "object in a closure": (through_closed_object, "holder.w"),
    "global of a helper": (through_global_helper, "held"),
    "inner function": (through_inner_function, "w"),
    "function in a closure": (through_closed_function, "w"),
    "partial": (lambda w: functools.partial(lambda u, x: x * u, w), "argument 0"),
    "keyword default": (lambda w: lambda x, *, u=w: x * u, "default u"),
    "module": (through_module, "inner.w"),
    "module's forward": (lambda w: through_module(w).forward, "inner.w"),
    "module in a closure": (lambda w: (lambda net: lambda x: net(x))(through_module(w)), "net.inner.w"),
}


def captured():
    import torch

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    w = torch.nn.Parameter(dm.distribute(np.ones(4), dm.P("a")))
    said = {}
    for name, (make, _) in CAPTURES.items():
        try:
            dm.shard_map(make(w), dm.P("a"), dm.P("a"))(np.ones(4))
        except dm.DualmeshError as error:
            said[name] = str(error)
    fine = dm.shard_map(Holder(w).innocent, dm.P("a"), dm.P("a"))(np.ones(4))
    return said, dm.to_numpy(fine).tolist()


def test_a_captured_dtensor_is_refused_however_it_is_reached():
    for said, fine in torch_world(captured, world_size=2):
        for name, (_, word) in CAPTURES.items():
            assert f"captures {word!r}, a DTensor of shape (4,)" in said.get(name, "not refused"), name
        assert fine == [2.0] * 4


def written():
    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    x = dm.distribute(np.arange(4.0), dm.P("a"))

    def changing(pair):
        pair[1].mul_(2)
        return pair[0]

    try:
        dm.shard_map(changing, ((dm.P("a"), dm.P("a")),), dm.P("a"))((x, x + 1))
    except dm.DualmeshError as error:
        said = type(error).__name__, str(error)
    copied = dm.shard_map(lambda y: y.clone().mul_(3), dm.P("a"), dm.P("a"))(x)
    same = dm.shard_map(lambda y: (y, y.reshape(1, -1)[0], y[:1]), dm.P("a"), dm.P("a"))(x)
    for result in same:
        result.to_local().fill_(9.0)
    return said, dm.to_numpy(copied).tolist(), dm.to_numpy(x).tolist()


def test_arguments_are_read_only_and_results_share_no_memory_with_them():
    for said, copied, x in torch_world(written, world_size=2):
        assert said[0] == "ArgumentError"
        assert "changed its argument in place (block 1, shape (2,))" in said[1]
        assert copied == [0.0, 3.0, 6.0, 9.0]
        assert x == [0.0, 1.0, 2.0, 3.0]


def differentiated():
    import torch

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    x = dm.distribute(np.arange(4.0), dm.P("a"))
    cube = dm.shard_map(lambda y: dm.ops.all_reduce((y**3).sum(), "a"), dm.P("a"), dm.P())
    inner = dm.value_and_grad(cube)

    def refusal(fn):
        try:
            fn()
        except dm.DualmeshError as error:
            return type(error).__name__, str(error)[:60]
        return None

    whole = torch.arange(4.0, requires_grad=True)
    said = [
        refusal(lambda: dm.value_and_grad(lambda y: inner(y)[0])(x)),
        refusal(lambda: dm.value_and_grad(lambda y: cube(dm.distribute(y, dm.P("a"))))(whole)),
        refusal(lambda: dm.value_and_grad(lambda y: cube(dm.shard_local(y.to_local(), dm.P("a"))))(x)),
        refusal(lambda: dm.distribute(whole * 2, dm.P("a"))),
    ]
    factor = dm.value_and_grad(lambda y: cube(y) * inner(x)[0].item())(x)
    parameter = dm.distribute(torch.nn.Parameter(torch.arange(4.0)), dm.P("a"))
    with torch.no_grad():
        cut = dm.distribute(whole * 2, dm.P("a"))
    return said, dm.to_numpy(factor[1]).tolist(), dm.to_numpy(parameter).tolist(), dm.to_numpy(cut).tolist()


def test_what_would_be_cut_off_from_its_gradient_in_silence_is_refused():
    for said, factor, parameter, cut in torch_world(differentiated, world_size=2):
        assert [one and one[0] for one in said] == ["NotDifferentiableError"] * 4
        assert said[0][1].startswith("value_and_grad: called inside a function that value_and_grad")
        assert said[1][1].startswith("distribute: found a tensor of shape (4,) that needs a")
        assert said[2][1].startswith("shard_local: found a tensor of shape (2,) that needs a")
        assert factor == [36.0 * 3 * y**2 for y in range(4)], "36 is the sum of cubes"
        assert parameter == [0.0, 1.0, 2.0, 3.0]
        assert cut == [0.0, 2.0, 4.0, 6.0]
