"""Vision -> thinker -> talker over three states on other ranks and grids: values and gradients of one process."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import assert_same
from tests.worlds import wide_worlds

SLOW_S = 400.0  # eight processes on a busy machine
STATES = {
    "vision": ({"dp": 2, "sp": 2}, (6, 7, 4, 5)),
    "thinker": ({"dp": 2, "sp": 4}, None),
    "talker": ({"dp": 4, "sp": 1}, (1, 0, 2, 3)),
}
BATCH, LENGTH, WIDTH = 8, 8, 6
TOKENS, ROWS, WHOLE = dm.P("dp", "sp"), dm.P("dp"), dm.P()


def numbers():
    """Return pixels, targets and the weights of the three parts, different in every element."""
    draw = np.random.default_rng(5)
    data = {name: draw.normal(size=(BATCH, LENGTH, WIDTH)) for name in ("pixels", "targets")}
    return data, {name: draw.normal(size=(WIDTH, WIDTH)) / 2 for name in STATES}


def in_one_process(data, weights):
    """Return the loss and its gradient by every weight, by hand in numpy."""
    seen = np.tanh(data["pixels"] @ weights["vision"])
    mixed = seen + seen.mean(1, keepdims=True)
    thought = np.tanh(mixed @ weights["thinker"])
    missed = thought @ weights["talker"] - data["targets"]
    back = 2 * missed / BATCH
    gradients = {"talker": np.einsum("bli,blj->ij", thought, back)}
    back = (back @ weights["talker"].T) * (1 - thought**2)
    gradients["thinker"] = np.einsum("bli,blj->ij", mixed, back)
    back = back @ weights["thinker"].T
    back = (back + back.mean(1, keepdims=True)) * (1 - seen**2)
    gradients["vision"] = np.einsum("bli,blj->ij", data["pixels"], back)
    return (missed**2).sum() / BATCH, gradients


def tanh(x):
    from array_api_compat import array_namespace

    return array_namespace(x).tanh(x)


def see(pixels, weight):
    return tanh(pixels @ weight)


def think(seen, weight):
    with dm.use_parallel_state("thinker"):
        mean = dm.ops.all_reduce(seen.sum(1)[:, None, :], "sp") / LENGTH
    return tanh((seen + mean) @ weight)


def talk(thought, weight, targets):
    with dm.use_parallel_state("talker"):
        return dm.ops.all_reduce(((thought @ weight - targets) ** 2).sum() / BATCH, "dp")


def opened():
    return {
        name: dm.init_parallel_state(spec=dm.TopologySpec(sizes), ranks=ranks, name=name)
        for name, (sizes, ranks) in STATES.items()
    }


def run(programs, data, weights):
    """Run programs over the same states, one after the other."""
    states = opened()
    return [program(states, data, weights) for program in programs]


def with_global_arrays(states, data, weights):
    """Run the chain on DTensors or jax Arrays; return what this process knows of the loss and the gradients."""
    parts = {
        "vision": dm.shard_map(see, (TOKENS, WHOLE), TOKENS, state=states["vision"]),
        "thinker": dm.shard_map(think, (TOKENS, WHOLE), TOKENS, state=states["thinker"]),
        "talker": dm.shard_map(talk, (ROWS, WHOLE, ROWS), WHOLE, state=states["talker"]),
    }
    mine = {name: state for name, state in states.items() if state.is_member}
    laid = {name: dm.distribute(weights[name], WHOLE, state=state) for name, state in mine.items()}
    pixels, targets = (
        dm.distribute(data[what], spec, state=states[name]) if name in mine else None
        for what, spec, name in (("pixels", TOKENS, "vision"), ("targets", ROWS, "talker"))
    )

    def loss(laid):
        seen = parts["vision"](pixels, laid["vision"]) if "vision" in mine else None
        seen = dm.reshard(seen, src=("vision", TOKENS), dst=("thinker", TOKENS))
        thought = parts["thinker"](seen, laid["thinker"])
        thought = dm.reshard(thought, src=("thinker", TOKENS), dst=("talker", ROWS))
        return parts["talker"](thought, laid["talker"], targets) if "talker" in mine else thought.sum()

    if states["thinker"].backend == "jax":
        import jax

        value, gradients = jax.value_and_grad(loss)(laid)
    else:
        for weight in laid.values():
            weight.requires_grad_()
        value = loss(laid)
        value.backward()
        gradients = {name: weight.grad for name, weight in laid.items()}
    found = {name: dm.to_numpy(gradients[name], state=state) for name, state in mine.items()}
    return float(dm.to_numpy(value, state=states["talker"])) if "talker" in mine else None, found


def with_blocks(states, data, weights):
    """Run the chain as per-rank code of torch."""
    import torch

    mine = {name: state for name, state in states.items() if state.is_member}
    laid = {name: torch.nn.Parameter(torch.from_numpy(weights[name].copy())) for name in mine}

    def block(what, spec, name):
        return torch.from_numpy(data[what][dm.local_slices(spec, data[what].shape, state=states[name])].copy())

    seen = see(block("pixels", TOKENS, "vision"), laid["vision"]) if "vision" in mine else None
    seen = dm.reshard(seen, src=("vision", TOKENS), dst=("thinker", TOKENS))
    thought = think(seen, laid["thinker"])
    thought = dm.reshard(thought, src=("thinker", TOKENS), dst=("talker", ROWS))
    value = thought.sum()  # on ranks that talk to nobody: the zero that keeps them in the backward pass
    if "talker" in mine:
        value = ((thought @ laid["talker"] - block("targets", ROWS, "talker")) ** 2).sum() / BATCH
    value.backward()
    for name, state in mine.items():
        dm.sync_gradients([laid[name]], "world", state=state)
    total = dm.ops.all_reduce(value.detach(), "world", state=states["thinker"])
    return float(total), {name: weight.grad.numpy() for name, weight in laid.items()}


@pytest.mark.parametrize(
    ("backend", "programs"), [("torch", [with_global_arrays, with_blocks]), ("jax", [with_global_arrays])]
)
def test_the_chain_computes_what_one_process_does(backend, programs):
    wanted, gradients = in_one_process(*numbers())
    answers = wide_worlds()[backend](run, programs, *numbers(), world_size=8, timeout_s=SLOW_S)
    for program, found in zip(programs, zip(*answers, strict=True), strict=True):
        what = f"{program.__name__} on {backend}:"
        losses = [loss for loss, _ in found if loss is not None]
        assert_same(f"{what} loss", [wanted] * len(losses), losses, rtol=1e-13)
        assert {name for _, own in found for name in own} == set(STATES)
        for _, own in found:
            assert_same(f"{what} gradient of", {name: gradients[name] for name in own}, own, rtol=7e-14)


def test_the_hand_written_gradient_is_that_of_the_loss():
    data, weights = numbers()
    _, gradients = in_one_process(data, weights)
    slopes = {}
    for name in STATES:
        nearby = {one: weight.copy() for one, weight in weights.items()}
        nearby[name][2, 3] += 1e-6
        slopes[name] = (in_one_process(data, nearby)[0] - in_one_process(data, weights)[0]) / 1e-6
    assert_same("slope", slopes, {name: gradient[2, 3] for name, gradient in gradients.items()}, rtol=1e-4)
