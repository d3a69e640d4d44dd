"""Accelerate, Lightning and the Hugging Face Trainer run on a state's meshes: the recipes of `docs/trainers.md`."""

import importlib.util

import numpy as np
import pytest

import dualmesh as dm
from tests.worlds import torch_world

STEPS, ROWS = 3, 8


def needs(*packages):
    """Skip where a package is missing: none of them is a dependency."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def batch(step):
    import torch

    draw = np.random.default_rng(step)
    return torch.from_numpy(draw.normal(size=(ROWS, 4))), torch.from_numpy(draw.normal(size=(ROWS, 2)))


def own_rows(step, state):
    return [part.chunk(state.data_size)[state.data_index] for part in batch(step)]


def network():
    import torch

    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()


def in_one_process():
    import torch

    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        ((net(x) - y).square().sum() / ROWS).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in net.parameters()]


def assert_trained(found):
    (expected,) = torch_world(in_one_process, world_size=1)
    for each in found:
        for one, other in zip(expected, each, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-14)


def launched(state):
    """Set what torchrun sets; the frameworks read their place in the world from it."""
    import os

    rank, size = str(state.global_rank), str(state.world_size)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    os.environ.update(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="recipe")
    return lambda: [os.environ.pop(name) for name in (*place, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]


def with_accelerate(world):
    import torch
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState
    from torch.distributed.fsdp import fully_shard

    state = dm.init_parallel_state(dp_replicate_size=2, dp_shard_size=world // 2)
    forget = launched(state)
    try:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=world // 2)
        config.device_mesh = state.submesh("dp_replicate", "dp_shard")
        adopted = config.get_device_mesh("cpu") is state.submesh("dp_replicate", "dp_shard")
        accelerator = Accelerator(cpu=True)
        net = network()
        fully_shard(net, mesh=state.fsdp_mesh)
        dm.sum_gradients(net)
        optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
        for step in range(STEPS):
            x, y = own_rows(step, state)
            optimizer.zero_grad()
            objective, _ = dm.token_mean((net(x) - y).square().sum(), len(x))
            accelerator.backward(objective)
            optimizer.step()
        place = (accelerator.process_index, accelerator.num_processes) == (state.global_rank, state.world_size)
        return adopted and place, [dm.to_numpy(parameter) for parameter in net.parameters()]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        forget()


@pytest.mark.parametrize("world", [4, 8])
@needs("accelerate", "huggingface_hub")
def test_accelerate_trains_what_a_state_shards(world):
    found = torch_world(with_accelerate, world, world_size=world)
    assert all(adopted for adopted, _ in found)
    assert_trained([parameters for _, parameters in found])


def with_lightning(world, path):
    import warnings

    import lightning
    import torch
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    state = dm.init_parallel_state(dp_shard_size=world)
    forget = launched(state)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def configure_model(self):
            fully_shard(self.net, mesh=state.fsdp_mesh)  # not self.device_mesh, which Lightning makes itself
            dm.sum_gradients(self.net)

        def training_step(self, rows, step):
            x, y = rows
            return dm.token_mean((self.net(x[0]) - y[0]).square().sum(), len(x[0]))[0]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    try:
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            **{"accelerator": "cpu", "devices": world, "max_epochs": 1, "logger": False, "default_root_dir": path},
            **{"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
            use_distributed_sampler=False,
            strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
            plugins=[TorchElasticEnvironment()],
        )
        module = Module()
        rows = torch.utils.data.DataLoader([own_rows(step, state) for step in range(STEPS)], batch_size=1)
        trainer.fit(module, rows)
        return [dm.to_numpy(parameter) for parameter in module.net.parameters()]
    finally:
        forget()


@pytest.mark.parametrize("world", [4, 8])
@needs("lightning")
def test_lightning_trains_what_a_state_shards(world, tmp_path):
    assert_trained(torch_world(with_lightning, world, str(tmp_path), world_size=world, timeout_s=300.0))


def with_transformers(world, path):
    import torch
    import transformers

    state = dm.init_parallel_state(tp_size=world)
    forget = launched(state)
    try:
        config = transformers.LlamaConfig(
            **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
            **{"num_attention_heads": 8, "num_key_value_heads": 8, "dtype": "float64"},
        )
        torch.manual_seed(4)
        whole = transformers.LlamaForCausalLM(config).double().eval()
        if state.is_writer():
            whole.save_pretrained(path)
        dm.host.barrier()
        split = transformers.LlamaForCausalLM.from_pretrained(
            path, tp_plan="auto", device_mesh=state.submesh("tp"), dtype=torch.float64
        ).eval()
        tokens = torch.arange(12).reshape(2, 6)
        found, wanted = split(tokens).logits, whole(tokens).logits
        weight = split.model.layers[0].mlp.up_proj.weight
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        return float((found - wanted).abs().max()), tuple(local.shape)
    finally:
        forget()


@pytest.mark.parametrize("world", [4, 8])
@needs("transformers", "tokenizers", "safetensors", "huggingface_hub")
def test_transformers_splits_a_model_over_a_states_mesh(world, tmp_path):
    found = torch_world(with_transformers, world, str(tmp_path), world_size=world, timeout_s=300.0)
    for difference, shape in found:
        assert difference < 1e-12
        assert shape == (32 // world, 16)


def with_trainer(world, path):
    import torch
    import transformers
    from accelerate.state import AcceleratorState
    from torch.distributed.fsdp import fully_shard

    state = dm.init_parallel_state(dp_shard_size=world)
    forget = launched(state)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader([own_rows(step, state) for step in range(STEPS)], batch_size=None)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            x, y = inputs
            return dm.token_mean((model(x) - y).square().sum(), len(x))[0]

        def training_step(self, model, inputs, num_items_in_batch=None):
            objective = self.compute_loss(model, inputs)
            self.accelerator.backward(objective)
            return objective.detach()

    try:
        net = network()
        fully_shard(net, mesh=state.fsdp_mesh)
        dm.sum_gradients(net)
        settings = transformers.TrainingArguments(
            **{"output_dir": path, "use_cpu": True, "max_steps": STEPS, "max_grad_norm": 0.0, "report_to": []},
            **{"save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"},
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        trainer = Trainer(net, settings, train_dataset=[0] * STEPS, optimizers=(optimizer, constant))
        trainer.accelerator.prepare_model = lambda model, *_, **__: model  # which would wrap it in DDP once more
        trainer.train()
        return [dm.to_numpy(parameter) for parameter in net.parameters()]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        forget()


@pytest.mark.parametrize("world", [4, 8])
@needs("accelerate", "transformers", "tokenizers", "safetensors", "huggingface_hub")
def test_the_hugging_face_trainer_trains_what_a_state_shards(world, tmp_path):
    assert_trained(torch_world(with_trainer, world, str(tmp_path), world_size=world, timeout_s=300.0))
