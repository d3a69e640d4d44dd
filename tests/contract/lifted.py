"""Functions of global arrays that workers lift with `dm.shard_map`; their dense twins are in `dense`."""

import array_api_compat
import numpy as np

import dualmesh as dm
from tests.contract.runs import opened

P = dm.P


def numpy_tree(tree):
    """Read back every array of a nested result."""
    if isinstance(tree, dict):
        return {key: numpy_tree(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(numpy_tree(item) for item in tree)
    return np.asarray(dm.to_numpy(tree))


def mixed(x, w, b):
    """Take x split over a, w and b replicated; compute the rest redundantly."""
    xp = array_api_compat.array_namespace(x)
    total = dm.ops.all_reduce(xp.sum(xp.tanh(x @ w), axis=0), "a")
    z = total * b
    return xp.sum(z * z)


def reduced_twice(x, w, b):
    """As `mixed`, with a second all-reduce of what is replicated over a and split over b."""
    xp = array_api_compat.array_namespace(x)
    total = dm.ops.all_reduce(xp.sum(xp.tanh(x @ w), axis=0), "a")
    mine = dm.ops.take_block(total * b, "b", 0)
    return dm.ops.all_reduce(xp.sum(mine * mine), "b")


def perceptron(params, x):
    """Take x split over a, `up` by columns and `down` by rows over b."""
    xp = array_api_compat.array_namespace(x)
    hidden = xp.tanh(x @ params["up"])
    return dm.ops.all_reduce(hidden @ params["down"][0], "b") + params["down"][1]


def squared_error(y, target):
    """Take both split over a."""
    xp = array_api_compat.array_namespace(y)
    return dm.ops.all_reduce(xp.sum((y - target) * (y - target)), "a")


PERCEPTRON_SPECS = {"up": P(None, "b"), "down": (P("b"), P())}


def run_scalar(fn_name, arrays):
    """Return (value, gradients) of `mixed` or `reduced_twice`."""
    opened(4)
    specs = (P("a"), P(), P())
    lifted = dm.shard_map(globals()[fn_name], specs, P())
    xs = [dm.distribute(array, spec) for array, spec in zip(arrays, specs, strict=True)]
    value, grads = dm.value_and_grad(lifted, (0, 1, 2))(*xs)
    return float(dm.to_numpy(value)), numpy_tree(grads)


def run_scalar_value(fn_name, arrays):
    """Return the value of `mixed` or `reduced_twice`, the result checked for being replicated."""
    opened(4)
    specs = (P("a"), P(), P())
    lifted = dm.shard_map(globals()[fn_name], specs, P(), check_replicated=True)
    xs = [dm.distribute(array, spec) for array, spec in zip(arrays, specs, strict=True)]
    return float(dm.to_numpy(lifted(*xs)))


def _perceptron_parts(params, x, target):
    up = dm.distribute(params["up"], PERCEPTRON_SPECS["up"])
    down = tuple(map(dm.distribute, params["down"], PERCEPTRON_SPECS["down"]))
    return {"up": up, "down": down}, dm.distribute(x, P("a")), dm.distribute(target, P("a"))


def run_perceptron(params, x, target):
    """Return (y, loss, gradients of params and x) of two lifted functions behind each other."""
    opened(4)
    net = dm.shard_map(perceptron, (PERCEPTRON_SPECS, P("a")), P("a"))
    error = dm.shard_map(squared_error, (P("a"), P("a")), P())
    parts, xs, targets = _perceptron_parts(params, x, target)
    loss, grads = dm.value_and_grad(lambda parts, xs, targets: error(net(parts, xs), targets), (0, 1))(
        parts, xs, targets
    )
    return numpy_tree(net(parts, xs)), float(dm.to_numpy(loss)), numpy_tree(grads)


def run_perceptron_value(params, x, target):
    """Return (y, loss) of the same."""
    opened(4)
    net = dm.shard_map(perceptron, (PERCEPTRON_SPECS, P("a")), P("a"))
    error = dm.shard_map(squared_error, (P("a"), P("a")), P())
    parts, xs, targets = _perceptron_parts(params, x, target)
    y = net(parts, xs)
    return numpy_tree(y), float(dm.to_numpy(error(y, targets)))


def run_nested(x):
    """Return nested results of one replicated, one split and one partial output."""
    opened(4)

    def each(tree):
        block, whole = tree["pair"]
        return {"out": (block * 2, [whole + 1]), "sum": block}

    specs = {"pair": (P("a"), P())}
    lifted = dm.shard_map(each, (specs,), {"out": (P("a"), P()), "sum": P(None, partial="a")})
    return numpy_tree(lifted({"pair": (dm.distribute(x, P("a")), dm.distribute(x, P()))}))


def run_partial(x, w):
    """Return (value, gradients) of sum over a of sum(x * x * w), left to `out_specs` to sum; w is replicated."""
    opened(4)

    def each(x, w):
        xp = array_api_compat.array_namespace(x)
        return xp.sum(x * x * w)

    lifted = dm.shard_map(each, (P("a"), P()), P(partial="a"))
    arrays = (dm.distribute(x, P("a")), dm.distribute(w, P()))
    value, grads = dm.value_and_grad(lifted, (0, 1))(*arrays)
    return float(dm.to_numpy(value)), numpy_tree(grads)


def run_through_specs(world, whole, weight, specs):
    """Return the gradient of sum(w * x) for each spec that x and w are split by; it is w."""
    opened(world)
    found = []
    for spec in specs:

        def each(x, w):
            xp = array_api_compat.array_namespace(x)
            return xp.sum(x * w)

        lifted = dm.shard_map(each, (spec, spec), P(partial=spec.axes))
        grad = dm.value_and_grad(lifted)(dm.distribute(whole, spec), dm.distribute(weight, spec))[1]
        found.append(np.asarray(dm.to_numpy(grad)))
    return found


def run_remat(arrays):
    """Return (value, gradients) of `mixed` with its activations recomputed under the scope that the forward had."""
    state = opened(4)
    dm.init_parallel_state(spec=dm.TopologySpec({"b": 2, "a": 2}), name="other")
    specs = (P("a"), P(), P())
    xs = [dm.distribute(array, spec) for array, spec in zip(arrays, specs, strict=True)]
    lifted = dm.shard_map(dm.remat(mixed), specs, P(), state=state)
    value, grads = dm.value_and_grad(lifted, (0, 1, 2))(*xs)
    return float(dm.to_numpy(value)), numpy_tree(grads)


def run_token_mean(losses, mask, weight):
    """Return (objective's sum, value, gradient) of the mean of the losses that the mask keeps, times a weight."""
    opened(4)

    def each(weight, losses, mask):
        xp = array_api_compat.array_namespace(losses)
        return dm.token_mean(xp.sum(losses * mask) * weight[0], xp.sum(mask), "a")

    specs = (P(), P("a"), P("a"))
    arrays = [dm.distribute(array, spec) for array, spec in zip((weight, losses, mask), specs, strict=True)]
    objective = dm.shard_map(lambda *blocks: each(*blocks)[0], specs, P(partial="a"))
    value = dm.shard_map(lambda *blocks: each(*blocks)[1], specs, P(), check_replicated=True)
    total, grad = dm.value_and_grad(objective)(*arrays)
    return float(dm.to_numpy(total)), float(dm.to_numpy(value(*arrays))), np.asarray(dm.to_numpy(grad))


def run_token_mean_value(losses, mask):
    """Return the value alone, of a function of the masks that leaves ranks without a token."""
    opened(4)

    def each(losses, mask):
        xp = array_api_compat.array_namespace(losses)
        return dm.token_mean(xp.sum(losses * mask), xp.sum(mask), "a")[1]

    arrays = [dm.distribute(array, P("a")) for array in (losses, mask)]
    lifted = dm.shard_map(each, (P("a"), P("a")), P(), check_replicated=True)
    return float(dm.to_numpy(lifted(*arrays)))


def run_two_states(x):
    """Return what collectives of two states over the same ranks give inside one lifted function."""
    specs = {"base": dm.TopologySpec({"a": 2, "b": 2}), "other": dm.TopologySpec({"p": 4})}
    states = dm.init_parallel_states(specs, default="base")

    def each(x):
        here = dm.ops.all_gather(x, "b")
        with dm.use_parallel_state("other"):
            there = dm.ops.shift(x, "p", 1)
            name = dm.scope_name()
        return here, there, dm.ops.broadcast(x, "p", 2, state=states["other"]), x * 0 + len(name) + len(dm.scope_name())

    out = dm.shard_map(each, P(("a", "b")), P(("a", "b")))(dm.distribute(x, P(("a", "b"))))
    return numpy_tree(out)


def run_forgotten():
    """Return what is warned of when specs leave out axes of their arguments, and the value."""
    import warnings

    from dualmesh.errors import StateWarning

    opened(4)
    x = dm.distribute(np.arange(16.0).reshape(4, 4), P("a", "b"))
    found = []
    for spec in (P("a", "b"), P("b", "a"), P(None, "b"), P(), P(("b", "a"))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            total = dm.shard_map(lambda x: x + 0, spec, spec)(x)
        files = {warning.filename == __file__ for warning in caught if warning.category is StateWarning}
        messages = [str(warning.message) for warning in caught if warning.category is StateWarning]
        found.append((repr(spec), messages, files, dm.to_numpy(total)))
    return found


def in_a_given_state(value):
    """Return, in a state given while another is ambient, (values and gradients, sizes seen while made, scope)."""
    dm.init_parallel_state(dp_size=2, ulysses_size=2, name="thinker")
    talker = dm.init_parallel_state(dp_size=4, name="talker")
    x = dm.distribute(value, P("dp"), state=talker)
    squares = dm.shard_map(lambda x: dm.ops.all_reduce((x * x).sum(), "dp"), P("dp"), P(), state=talker)
    found = [dm.to_numpy(squares(x), state=talker)]
    if talker.backend != "sim":
        ambient = dm.shard_map(lambda x: dm.ops.all_reduce((x * x).sum(), "dp"), P("dp"), P())
        for objective in (squares, ambient):
            result, gradient = dm.value_and_grad(objective, state=talker)(x)
            found += [dm.to_numpy(result, state=talker), dm.to_numpy(gradient, state=talker)]
    seen = set()
    dm.init_sharded(lambda: _model_made_in(seen, talker.backend), dm.ShardingPlan({"weight": P("dp")}), state=talker)
    return found, seen, dm.scope_name()


def _model_made_in(seen, backend):
    """Return a model, and keep the size of the ambient state's "dp" where it is made."""
    seen.add(dm.get_parallel_state().size("dp"))
    if backend == "torch":
        import torch

        return torch.nn.Linear(4, 4, bias=False)
    return {"weight": np.ones((4, 4), "float32")}
