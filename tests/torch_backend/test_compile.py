"""What compiled code sees of the scope, and that compiled collectives are the eager ones, forward and backward."""

import dualmesh as dm
from tests.worlds import torch_world

A = dm.TopologySpec({"a": 2, "b": 2})
B = dm.TopologySpec({"b": 2, "a": 2})


def compiled(fn, backend="eager"):
    import torch

    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend)


def changing_scopes():
    import threading

    import torch
    from torch._dynamo.testing import CompileCounter

    dm.init_parallel_states({"A": A, "B": B}, default="A")
    counter = CompileCounter()

    def where(x):
        # The index along "a" and the name both differ between the scopes.
        return x * 0 + dm.get_parallel_state().index("a") + (100 if dm.scope_name() == "B" else 0)

    fn = compiled(where, counter)
    x = torch.ones(1)

    def inside_b():
        with dm.use_parallel_state("B"):
            return fn(x).item()

    answers = [fn(x).item(), inside_b(), fn(x).item(), inside_b()]
    thread = threading.Thread(target=lambda: answers.append(fn(x).item()))
    with dm.use_parallel_state("B"):
        thread.start()
        thread.join()
    answers.append(fn(x).item())
    eager = [where(x).item()]
    with dm.use_parallel_state("B"):
        eager.append(where(x).item())
    return answers, eager, counter.frame_count


def test_compiled_code_follows_the_scope_in_every_thread_with_one_compile_per_state():
    for answers, (a, b), compiles in torch_world(changing_scopes, world_size=4):
        assert a != b
        assert answers == [a, b, a, b, a, a]
        assert compiles == 2


def opening_scopes():
    import torch

    dm.init_parallel_states({"A": A, "B": B}, default="A")
    rank = float(dm.get_parallel_state().own_rank())

    def block(x):
        outside = dm.ops.all_reduce(x, "a")
        with dm.use_parallel_state("B"):
            inside = dm.ops.all_reduce(x, "a")
        return outside, inside

    @dm.use_parallel_state("B")
    def decorated(x):
        return dm.ops.all_reduce(x, "a")

    x = torch.full((2,), rank)
    found = [[y[0].item() for y in fn(x)] for fn in (block, compiled(block), compiled(block, "aot_eager"))]
    return found, [decorated(x)[0].item(), compiled(decorated)(x)[0].item()], dm.scope_name()


def test_compiled_code_opens_scopes_with_and_decorator():
    for rank, (found, decorated, name) in enumerate(torch_world(opening_scopes, world_size=4)):
        wanted = [float(2 * rank + 2 - 4 * (rank // 2)), float(2 * (rank // 2 * 2) + 1)]
        assert found == [wanted] * 3
        assert decorated == wanted[1:] * 2
        assert name == "A"


def after_init_again():
    import torch

    def read(x):
        return dm.ops.all_reduce(x, "a") + dm.get_parallel_state().size("a")

    fn = compiled(read, "aot_eager")
    found = []
    for spec in (A, dm.TopologySpec({"a": 4})):
        dm.init_parallel_state(spec=spec)
        found.append(fn(torch.ones(1)).item())
        old = dm.get_parallel_state()
        dm.clear_parallel_state()
    try:
        compiled(lambda x: dm.ops.all_reduce(x, "a", state=old))(torch.ones(1))
    except Exception as error:
        found.append("was cleared" in str(error))
    return found


def test_compiled_code_is_right_after_clear_and_init_again_and_refuses_old_states():
    assert torch_world(after_init_again, world_size=4) == [[4.0, 8.0, True]] * 4


OPS = {
    "all_reduce": {},
    "all_reduce mean": {"op": "mean"},
    "all_gather": {"dim": 1},
    "reduce_scatter": {"dim": -1},
    "reduce_scatter mean": {"dim": 0, "op": "mean"},
    "all_to_all": {"split_dim": 1, "concat_dim": 0},
    "broadcast": {"src": 1},
    "shift": {"offset": 1, "wrap": False},
    "permute": {"pairs": ((1, 0),)},
    "take_block": {"dim": 0},
}


def against_eager(backend):
    import torch

    state = dm.init_parallel_state(spec=A)
    rank = state.own_rank()
    differences = {}
    for name, settings in OPS.items():
        op = getattr(dm.ops, name.split()[0])

        def fn(x, op=op, settings=settings):
            return op(x, "a", **settings)

        found = []
        for run in (fn, compiled(fn, backend)):
            x = (torch.arange(16.0, dtype=torch.float64).reshape(4, 4).T * 1.3 + 7 * rank).requires_grad_()
            y = run(x)
            weight = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) + rank
            found.append((y.detach(), *torch.autograd.grad((y * weight).sum(), x)))
        differences[name] = [(one - two).abs().max().item() for one, two in zip(*found, strict=True)]
    return differences


def test_compiled_collectives_and_gradients_equal_eager_ones():
    for found in torch_world(against_eager, "aot_eager", world_size=4, timeout_s=240):
        assert found == {name: [0.0, 0.0] for name in OPS}


def unmade_group():
    import torch

    dm.init_parallel_state(spec=A)

    def fn(x):
        return dm.ops.all_reduce(x, ("b", "a"))

    try:
        compiled(fn)(torch.ones(2))
    except Exception as error:
        refused = "makes its group, which compiled code cannot" in str(error)
    fn(torch.ones(2))
    return refused, compiled(fn)(torch.ones(2))[0].item()


def test_a_group_is_never_made_inside_compiled_code():
    assert torch_world(unmade_group, world_size=4) == [(True, 4.0)] * 4


def remats():
    import torch
    from torch.utils.checkpoint import checkpoint

    from dualmesh_torch import checkpoint_context_fn

    dm.init_parallel_states({"A": A, "B": B}, default="A")
    rank = dm.get_parallel_state().own_rank()
    seen = []

    def block(x):
        if not torch.compiler.is_compiling():  # a side effect that compiled checkpoints refuse
            seen.append(dm.scope_name())
        return torch.sin(dm.ops.all_reduce(torch.cos(x), "a"))

    def gradient(run):
        x = torch.tensor([0.1 + rank], requires_grad=True)
        with dm.use_parallel_state("B"):
            y = run(x)
        y.sum().backward()
        return x.grad.item()

    forms = {
        "plain": block,
        "remat": lambda x: dm.remat(block)(x),
        "context_fn": lambda x: checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_context_fn),
        "context_fn, nested": lambda x: checkpoint(
            lambda y: checkpoint(block, y, use_reentrant=False, context_fn=checkpoint_context_fn),
            x,
            use_reentrant=False,
            context_fn=checkpoint_context_fn,
        ),
        "compiled": compiled(lambda x: dm.remat(block)(x), "aot_eager"),
    }
    return [gradient(run) for run in forms.values()], set(seen)


def test_a_recompute_runs_under_the_scope_of_its_forward():
    for gradients, seen in torch_world(remats, world_size=4):
        assert gradients == [gradients[0]] * 5
        assert seen == {"B"}


def late_backward():
    import threading

    import torch

    dm.init_parallel_states({"A": A, "B": B}, default="A")
    x = torch.tensor([float(dm.get_parallel_state().own_rank())], requires_grad=True)
    grads = []
    for place in ("same thread", "another scope", "fresh thread"):
        with dm.use_parallel_state("B"):
            y = dm.ops.all_reduce(x * x, "a") * (x + 1)
        if place == "fresh thread":
            thread = threading.Thread(target=y.sum().backward)
            thread.start()
            thread.join()
        elif place == "another scope":
            with dm.use_parallel_state("A"):
                y.sum().backward()
        else:
            y.sum().backward()
        grads.append(x.grad.item())
        x.grad = None
    return grads


def test_backward_uses_the_group_of_its_forward_wherever_it_runs():
    for rank, grads in enumerate(torch_world(late_backward, world_size=4)):
        group = (rank // 2 * 2, rank // 2 * 2 + 1)
        wanted = sum(r + 1 for r in group) * 2 * rank + sum(r * r for r in group)
        assert grads == [wanted] * 3
