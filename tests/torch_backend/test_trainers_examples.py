"""The trainers in `examples` compute on any number of ranks what they compute in one process."""

from pathlib import Path

import numpy as np
import pytest

from tests.worlds import torch_world

EXAMPLES = Path(__file__).parents[2] / "examples"


def _loaded(name):
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _train(name, steps):
    done = _loaded(name).train(steps)
    return done if isinstance(done, tuple) else (done.losses, done.reports)


@pytest.fixture(scope="module")
def one_process():
    """Return what each example does in a single process."""
    return {
        name: torch_world(_train, name, steps, world_size=1)[0]
        for name, steps in (("composite_torch", 20), ("rl_torch", 10))
    }


@pytest.mark.parametrize("world", [4, 8])
def test_the_composite_trainers_curve_is_the_one_process_runs(world, one_process):
    expected, reports = one_process["composite_torch"]
    assert len(expected) == 20
    assert expected[-1] < 0.5 * expected[0]
    assert reports[0].startswith("talker step 1: ")
    for losses, said in torch_world(_train, "composite_torch", 20, world_size=world):
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        assert said == reports


@pytest.mark.parametrize("world", [4, 8])
def test_reinforcement_learning_over_three_states_is_the_one_process_runs(world, one_process):
    rewards, weights = one_process["rl_torch"]
    assert len(set(rewards)) > 4
    for found, held in torch_world(_train, "rl_torch", 10, world_size=world):
        np.testing.assert_allclose(found, rewards, rtol=1e-14)
        for name, value in weights.items():
            np.testing.assert_allclose(held[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def _torn_down(phase):
    """Return what is left of the composite trainer after an error in a phase, or after a whole run."""
    import dualmesh as dm
    from dualmesh.runtime.registry import registry

    module, kept, said = _loaded("composite_torch"), [], None

    class Trainer(module.Trainer):
        def build(self):
            kept.append(self)
            super().build()
            if phase == "build":
                raise RuntimeError("building fails")

        def step(self, number):
            if phase == "step":
                raise RuntimeError("a step fails")
            super().step(number)

    module.Trainer = Trainer
    try:
        module.train(1)
    except RuntimeError as error:
        said = str(error)
    left = sorted(name for name, value in vars(kept[0]).items() if name not in ("losses", "reports") and value)
    return said, left, registry.names(), dm.scope_name()


@pytest.mark.parametrize("phase", ["build", "step", "none"])
def test_tearing_down_leaves_nothing_however_far_the_trainer_came(phase):
    said = {"build": "building fails", "step": "a step fails", "none": None}[phase]
    assert torch_world(_torn_down, phase, world_size=4) == [(said, [], [], None)] * 4
