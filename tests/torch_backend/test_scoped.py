"""`dm.scoped`: a module's forward runs in its state, whoever calls it, copies it, shards it or recomputes it."""

import pytest

import dualmesh as dm
from tests.worlds import torch_world

# Along "a" rank r meets r ^ 2 in A (a is outermost) and r ^ 1 in B.
A = dm.TopologySpec({"a": 2, "b": 2}, roles={"params": ("a", "b")})
B = dm.TopologySpec({"b": 2, "a": 2}, roles={"params": ("b", "a")})
PARTNER = {"A": 2, "B": 1}


def states():
    dm.init_parallel_states({"A": A, "B": B}, default="A")
    return dm.get_parallel_state().own_rank()


def layer(width=1, factor=1.0):
    import torch

    class Layer(torch.nn.Module):
        """Sums factor * x over the axis "a" of the ambient state."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((width,), factor))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x, *, power=1):
            return dm.ops.all_reduce((self.weight * x) ** power, "a")

    return Layer()


def total(rank, name, factor=1.0, power=1):
    return (factor * rank) ** power + (factor * (rank ^ PARTNER[name])) ** power


def whoever_calls():
    import inspect

    import torch

    rank = states()
    module = layer()
    keys, kind = list(module.state_dict()), type(module)
    x = torch.tensor([float(rank)])
    found = {"plain": module(x).item()}
    same = dm.scoped(module, "B")
    found["called"] = module(x).item()
    found["forward"] = module.forward(x, power=2).item()
    with dm.use_parallel_state("A"):
        found["inside another"] = module(x).item()
    found["functional"] = torch.func.functional_call(module, {"weight": torch.tensor([3.0])}, (x,)).item()
    found["in a container"] = torch.nn.Sequential(module)(x).item()
    dm.scoped(module, dm.get_parallel_state_by_name("A"))
    found["scoped again"] = module(x).item()
    facts = {
        "same object": same is module,
        "same keys": list(module.state_dict()) == keys,
        "still its class": isinstance(module, kind) and type(module).__name__ == "Layer",
        "signature": list(inspect.signature(module.forward).parameters) == ["x", "power"],
        "left": dm.scope_name() == "A",
    }
    return found, facts


def test_a_scoped_module_runs_in_its_state_whoever_calls_it_and_stays_the_same_object():
    for rank, (found, facts) in enumerate(torch_world(whoever_calls, world_size=4)):
        assert all(facts.values()), facts
        assert found == {
            "plain": total(rank, "A"),
            "called": total(rank, "B"),
            "forward": total(rank, "B", power=2),
            "inside another": total(rank, "B"),
            "functional": total(rank, "B", factor=3.0),
            "in a container": total(rank, "B"),
            "scoped again": total(rank, "A"),
        }


def copies():
    import copy
    import pickle

    import torch

    rank = states()
    x = torch.tensor([float(rank)])
    module = dm.scoped(torch.nn.Sequential(torch.nn.Flatten(0), torch.nn.Identity()), "B")
    module.append(dm.scoped(layer(), "B"))
    found = {}
    for name, copied in {"deep": copy.deepcopy(module), "shallow": copy.copy(module)}.items():
        found[name] = copied(x).item()
    twin = copy.deepcopy(module)
    twin[2].weight.data.fill_(5.0)
    found["own parameters"] = (twin(x).item(), module(x).item())
    found["slice"] = module[1:](x).item()
    linear = dm.scoped(torch.nn.Linear(2, 1), "B")
    back = pickle.loads(pickle.dumps(linear))
    found["pickled"] = torch.equal(back(torch.ones(2)), linear(torch.ones(2))) and type(back) is type(linear)
    module[2].forward = module[2].forward
    dm.scoped(module[2], "A")
    dm.scoped(module[2], "A")
    found["replaced forward"] = module(x).item()
    return found


def test_copies_of_a_scoped_module_are_scoped_and_have_parameters_of_their_own():
    for rank, found in enumerate(torch_world(copies, world_size=4)):
        assert found.pop("own parameters") == (total(rank, "B", factor=5.0), total(rank, "B"))
        assert found == {
            "deep": total(rank, "B"),
            "shallow": total(rank, "B"),
            "slice": total(rank, "B"),
            "pickled": True,
            "replaced forward": total(rank, "A"),
        }


def recomputes():
    import functools

    import torch
    from torch.utils.checkpoint import checkpoint

    from dualmesh_torch import checkpoint_context_fn

    rank = states()
    grads, seen = {}, set()
    recomputed = functools.partial(checkpoint, use_reentrant=False, context_fn=checkpoint_context_fn)
    forms = {
        "plain": lambda module, x: module(x, power=2),
        "not reentrant": lambda module, x: checkpoint(module, x, power=2, use_reentrant=False),
        "nested": lambda module, x: checkpoint(
            lambda y: checkpoint(module, y, power=2, use_reentrant=False), x, use_reentrant=False
        ),
        "reentrant": lambda module, x: checkpoint(lambda y: module(y, power=2), x, use_reentrant=True),
        "remat": lambda module, x: dm.remat(module)(x, power=2),
        "context_fn, nested": lambda module, x: recomputed(
            lambda y: recomputed(functools.partial(module, power=2), y), x
        ),
    }
    for name, form in forms.items():
        module = dm.scoped(layer(), "B")
        module.register_forward_pre_hook(lambda *_: None)
        module.weight.register_hook(lambda _: seen.add(dm.scope_name()))
        x = torch.tensor([1.0 + rank], requires_grad=True)
        (form(module, x) * (rank + 1)).sum().backward()
        grads[name] = x.grad.item()
    return grads, seen, dm.scope_name()


def test_a_recompute_of_a_scoped_module_runs_in_its_state():
    for rank, (grads, seen, name) in enumerate(torch_world(recomputes, world_size=4)):
        assert grads == dict.fromkeys(grads, 2.0 * (1 + rank) * (rank + 1 + (rank ^ 1) + 1))
        assert seen == {"A"}
        assert name == "A"


def shards(order):
    import torch
    from torch.distributed.fsdp import FSDPModule, fully_shard

    rank = states()
    module = layer(width=4, factor=2.0)
    keys = list(module.state_dict())
    if order == "before":
        dm.scoped(module, "B")
    fully_shard(module, mesh=dm.get_parallel_state_by_name("A").fsdp_mesh)
    if order == "after":
        dm.scoped(module, "B")
    y = module(torch.full((4,), float(rank)))
    y.sum().backward()
    facts = isinstance(module, FSDPModule), list(module.state_dict()) == keys
    box = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    fully_shard(dm.scoped(box, "B"), mesh=dm.get_parallel_state_by_name("A").fsdp_mesh)
    dm.scoped(box, "A")
    return y.tolist(), facts, module.weight.grad.full_tensor().tolist(), len(box[:1])


@pytest.mark.parametrize("order", ["before", "after"])
def test_fully_shard_and_scoped_go_together_in_either_order(order):
    for rank, (values, facts, gradient, length) in enumerate(torch_world(shards, order, world_size=4)):
        assert values == [total(rank, "B", factor=2.0)] * 4
        assert facts == (True, True)
        assert gradient == [3.0] * 4, "the mean over ranks of 2 * rank"
        assert length == 1


def compiles(backend):
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    rank = states()
    torch._dynamo.reset()
    module = dm.scoped(layer(), "B")
    counter = CompileCounterWithBackend(backend)

    def step(x):
        return module(x, power=2) + dm.ops.all_reduce(x, "a")

    fn = torch.compile(step, fullgraph=True, backend=counter)
    found = []
    for name in ("A", "B", "A"):
        x = torch.tensor([1.0 + rank], requires_grad=True)
        with dm.use_parallel_state(name):
            y = fn(x)
        y.sum().backward()
        found.append((y.item(), x.grad.item()))
    return found, counter.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_calls_a_scoped_module_in_its_state(backend):
    for rank, (found, count) in enumerate(torch_world(compiles, backend, world_size=4)):
        x, twos = 1.0 + rank, [1.0 + (rank ^ 1), 1.0 + (rank ^ 2)]
        wanted = {name: (x**2 + twos[0] ** 2 + x + other, 4 * x + 2) for name, other in zip("BA", twos, strict=True)}
        assert found == [wanted["A"], wanted["B"], wanted["A"]]
        assert count == 2


def test_functions_are_scoped_as_the_decorator_does_and_others_are_refused(world):
    dm.init_parallel_states({"base": dm.parallel_spec(dp_size=8), "talker": dm.parallel_spec(tp_size=8)})

    def steps():
        yield dm.scope_name()
        yield dm.scope_name()

    assert list(dm.scoped(steps, "talker")()) == ["talker", "talker"]
    assert dm.scoped(dm.scope_name, dm.get_parallel_state_by_name("talker"))() == "talker"
    with pytest.raises(dm.DualmeshError, match=r"scoped: found the class int"):
        dm.scoped(int, "talker")
    with pytest.raises(dm.DualmeshError, match=r"scoped: found 3\. Give a function, or an instance"):
        dm.scoped(3, "talker")
    with pytest.raises(dm.DualmeshError, match=r"scoped: 3 is no state"):
        dm.scoped(steps, 3)
