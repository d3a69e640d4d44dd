"""The same training on every split: each axis at 1, 2 and 4 and every pair of axes; all splits by `__main__`."""

import numpy as np
import pytest

import dualmesh as dm
from tests.invariance import model, reference
from tests.invariance.comparison import LIMITS, difference
from tests.invariance.splits import COVER, every, full, named, spec_of
from tests.invariance.training import FORMS, compared, job
from tests.worlds import sim_world

SETTINGS = [(2, "float64"), (1, "float64"), (2, "float32"), (1, "float32")]


@pytest.mark.parametrize("form", FORMS)
def test_loss_gradients_and_parameters_are_the_oracles_on_every_split(form):
    # Every split in two settings, turn by turn; in one where compiling (JAX) or planning DTensors (lifted) costs much.
    if form in ("jax", "lifted"):
        jobs = [job(form, split, *SETTINGS[max(0, i - 5)]) for i, split in enumerate(COVER)]
    else:
        jobs = [job(form, split, *SETTINGS[i % 4]) for i, split in enumerate(COVER + COVER)]
    far = {
        f"{named(dict(one.split))}, {one.micro_batches} micro-batches, {one.dtype}: {name}": by
        for one, (name, by) in compared(jobs, reference.trained()).items()
        if not by <= LIMITS[one.dtype]
    }
    assert far == {}


def simulated_losses():
    """Return the loss of the first batch on every split of `COVER`."""
    losses = []
    for split in COVER:
        state = dm.init_parallel_state(spec=spec_of(split), name=named(split))
        with dm.use_parallel_state(state):
            values = {name: dm.distribute(x, model.STORED[name]) for name, x in model.initial_parameters().items()}
            tokens, targets = model.batch(0)
            total = np.asarray((targets >= 0).sum())
            specs = (model.STORED, model.TOKENS, model.TOKENS, dm.P())
            placed = [dm.distribute(x, spec) for x, spec in zip((tokens, targets, total), specs[1:], strict=True)]
            losses.append(dm.to_numpy(dm.shard_map(model.global_loss, specs, dm.P())(values, *placed)))
    return losses


def test_simulated_ranks_give_the_oracles_loss_on_every_split():
    wanted = reference.value_and_grad(model.initial_parameters(), *model.batch(0))[0]
    (losses,) = sim_world(simulated_losses, world_size=8)
    assert max(difference(loss, wanted) for loss in losses) <= 1e-13


def test_the_oracles_gradient_is_the_slope_of_its_loss():
    weights, data = model.initial_parameters(), model.batch(0)
    _, gradients = reference.value_and_grad(weights, *data)
    draw, step = np.random.default_rng(0), 1e-6
    for name, value in weights.items():
        along = draw.normal(size=value.shape)
        ahead, behind = (
            reference.value_and_grad({**weights, name: value + side * step * along}, *data)[0] for side in (1, -1)
        )
        assert (ahead - behind) / (2 * step) == pytest.approx(np.sum(gradients[name] * along), rel=1e-6, abs=1e-9), name


def test_the_data_are_uneven():
    tokens, targets = model.batch(0)
    counts = (targets >= 0).sum(1)
    assert 0 in counts
    assert len(set(counts)) > 5
    assert tokens.shape == targets.shape == (16, model.LENGTH)


def test_the_cover_has_each_axis_at_1_2_and_4_and_every_pair():
    splits = [full(split) for split in COVER]
    axes = tuple(splits[0])
    for axis in axes:
        assert {1, 2, 4} <= {split[axis] for split in splits}, axis
    for one in axes:
        for other in axes:
            assert any(split[one] > 1 and split[other] > 1 for split in splits), (one, other)
    assert all(split in every() for split in splits)
    assert len(every()) == 98
