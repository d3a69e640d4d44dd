"""What torch's backward calls runs in the scope of its forward: rules, recomputes and hooks, wherever backward is."""

import pytest

import dualmesh as dm
from tests.worlds import torch_world

# Along "a" rank r meets r ^ 2 in A (a is outermost), r ^ 1 in B, and nobody in C.
A = dm.TopologySpec({"a": 2, "b": 2})
B = dm.TopologySpec({"b": 2, "a": 2})
C = dm.TopologySpec({"b": 4, "a": 1})


def states():
    dm.init_parallel_states({"A": A, "B": B, "C": C}, default="A")
    return dm.get_parallel_state().own_rank()


def met(name, rank):
    """Return the ranks that a sum over "a" of a state adds up on a rank."""
    return {"A": (rank, rank ^ 2), "B": (rank, rank ^ 1), "C": (rank,)}[name]


def copy_in():
    """Return Megatron's f: the identity, whose gradient is summed over "a" of the ambient state."""
    import torch

    class CopyIn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return dm.ops.all_reduce(gradient, "a")

    return CopyIn.apply


def cubed(x):
    """Return x**3 summed over "a", which saves activations on both sides of the collective."""
    return dm.ops.all_reduce(x**3, "a") ** 2


def scoped_module(forward):
    import torch

    class Module(torch.nn.Module):
        def forward(self, x):
            return forward(x)

    return dm.scoped(Module(), "B")


def opened(forward):
    def block(x):
        with dm.use_parallel_state("B"):
            return forward(x)

    return block


def checkpointed(form):
    """Return the gradient of a checkpointed block, for each place of its forward and of backward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    rank = states()
    block = {
        "not reentrant": lambda x: checkpoint(cubed, x, use_reentrant=False),
        "reentrant": lambda x: checkpoint(cubed, x, use_reentrant=True),
        "nested": lambda x: checkpoint(
            lambda y: checkpoint(cubed, y, use_reentrant=False), x * 1.0, use_reentrant=False
        ),
        "nested in reentrant": lambda x: checkpoint(
            lambda y: checkpoint(cubed, y, use_reentrant=False), x * 1.0, use_reentrant=True
        ),
        "reentrant twice": lambda x: checkpoint(
            lambda y: checkpoint(cubed, y, use_reentrant=True), x * 1.0, use_reentrant=True
        ),
        "compiled": lambda x: checkpoint(torch.compile(cubed, backend="eager"), x, use_reentrant=False),
    }[form]
    found = []
    for around in (scoped_module, opened):
        for where in ("A", "B", "C"):
            x = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
            y = around(block)(x)
            with dm.use_parallel_state(where):
                (y * (rank + 1)).sum().backward()
            found.append(x.grad.item())
    return found, dm.scope_name()


@pytest.mark.parametrize(
    "form", ["not reentrant", "reentrant", "nested", "nested in reentrant", "reentrant twice", "compiled"]
)
def test_a_block_checkpointed_in_a_scope_is_recomputed_in_it_wherever_backward_is_called(form):
    for rank, (found, name) in enumerate(torch_world(checkpointed, form, world_size=4)):
        total = sum((1.0 + other) ** 3 for other in met("B", rank))
        scale = sum(1.0 + other for other in met("B", rank))
        assert found == pytest.approx([scale * 2 * total * 3 * (1.0 + rank) ** 2] * 6)
        assert name == "A"


def opening_inside():
    """Return gradients of a checkpointed block that is in A, then in B, then in A."""
    import torch
    from torch.utils.checkpoint import checkpoint

    rank = states()

    def block(x):
        with dm.use_parallel_state("B"):
            y = cubed(x)
        return cubed(y)

    found = []
    for form in (False, True):
        for where in ("A", "B", "C"):
            x = torch.tensor([0.1 + 0.1 * rank], dtype=torch.float64, requires_grad=True)
            y = checkpoint(block, x, use_reentrant=form)
            with dm.use_parallel_state(where):
                y.sum().backward()
            found.append(x.grad.item())
    return found


def test_scopes_opened_in_a_checkpointed_block_leave_the_rest_of_it_where_it_was():
    xs = [0.1 + 0.1 * rank for rank in range(4)]
    ys = [sum(xs[other] ** 3 for other in met("B", rank)) ** 2 for rank in range(4)]
    totals = [sum(ys[other] ** 3 for other in met("A", rank)) for rank in range(4)]
    dys = [sum(2 * totals[other] for other in met("A", rank)) * 3 * ys[rank] ** 2 for rank in range(4)]
    for rank, found in enumerate(torch_world(opening_inside, world_size=4)):
        pair = sum(xs[other] ** 3 for other in met("B", rank))
        wanted = sum(dys[other] * 2 * pair for other in met("B", rank)) * 3 * xs[rank] ** 2
        assert found == pytest.approx([wanted] * 6)


def rules():
    """Return gradients through a rule that asks for the ambient state, by form and place of backward."""
    import torch

    rank = states()
    copied = copy_in()
    state = dm.get_parallel_state_by_name("B")
    lifted = dm.shard_map(copied, dm.P(("b", "a")), dm.P(("b", "a")), state=state)
    compiled = torch.compile(lambda x: dm.ops.all_reduce(x, "a"), backend="eager", fullgraph=True)

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return compiled(gradient)

    def on_blocks(x):
        with dm.use_parallel_state("B"):
            whole = dm.shard_local(x.detach(), dm.P(("b", "a"))).requires_grad_()
        y = lifted(whole)
        return y.to_local(), lambda: whole.grad.to_local()

    forms = {
        "scope": opened(copied),
        "module": scoped_module(copied),
        "state": dm.scoped(copied, state),
        "in a compiled function": opened(torch.compile(copied, backend="eager", fullgraph=True)),
        "scope in a compiled function": torch.compile(opened(copied), backend="eager", fullgraph=True),
        "compiled by aot": opened(torch.compile(copied, backend="aot_eager", fullgraph=True)),
        "calls compiled code": opened(Compiled.apply),
    }
    found = {}
    for name, form in {**forms, "lifted": on_blocks}.items():
        for where in ("A", "B", "C"):
            x = torch.tensor([1.0 + rank], requires_grad=True)
            y, gradient = form(x) if name == "lifted" else (form(x), lambda x=x: x.grad)
            with dm.use_parallel_state(where):
                (y * (rank + 1)).sum().backward()
            found[name, where] = gradient().item()
    return found


def test_a_rule_of_an_autograd_function_sums_over_the_axis_of_its_forward():
    for rank, found in enumerate(torch_world(rules, world_size=4)):
        wanted = sum(1.0 + other for other in met("B", rank))
        assert found == dict.fromkeys(found, wanted)


def outside_scopes():
    """Return the gradient of a rule whose forward ran in no scope, with backward inside one."""
    import torch

    rank = states()
    x = torch.tensor([1.0], requires_grad=True)
    y = copy_in()(x)
    with dm.use_parallel_state("C"):
        (y * (rank + 1)).sum().backward()
    return x.grad.item()


def test_a_rule_whose_forward_ran_in_no_scope_sees_the_default():
    assert torch_world(outside_scopes, world_size=4) == [4.0, 6.0, 4.0, 6.0]


def hooks():
    """Return the scope names that hooks see, those of a backward that A or C calls for a forward in B."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    states()
    seen = {}
    for where in ("A", "C"):

        def note(kind, where=where):
            seen.setdefault((kind, where), set()).add((dm.scope_name(), dm.get_parallel_state().ranks("a")[-1]))

        class Inner(torch.nn.Linear):
            def forward(self, x):
                y = torch.sin(super().forward(x))
                y.register_hook(lambda _: note("tensor"))
                y.grad_fn.register_hook(lambda *_: note("node"))
                y.grad_fn.register_prehook(lambda *_: note("node before"))
                with saved_tensors_hooks(lambda t: t, lambda t: (note("unpack"), t)[1]):
                    y = torch.exp(y)
                with dm.use_parallel_state("C"):
                    z = y * 2
                    z.register_hook(lambda _: note("inside another"))
                return z + dm.ops.all_reduce(y, "a")

        model = torch.nn.Sequential(Inner(1, 1))
        model[0].register_full_backward_hook(lambda *_: note("module"))
        model[0].weight.register_hook(lambda _: note("leaf"))
        model[0].weight.register_post_accumulate_grad_hook(lambda _: note("leaf after"))
        loss = dm.scoped(model, "B")(torch.ones(1, 1)).sum()
        loss.register_hook(lambda _: note("outside"))
        with dm.use_parallel_state(where):
            loss.backward()
            note("after")
    return seen


def test_hooks_see_the_scope_in_which_their_tensor_was_made_and_those_of_leaves_that_of_the_backward():
    for rank, seen in enumerate(torch_world(hooks, world_size=4)):
        wanted = {}
        for where in ("A", "C"):
            names = dict.fromkeys(("tensor", "node", "node before", "unpack", "module"), "B")
            names.update(dict.fromkeys(("leaf", "leaf after", "after"), where))
            names.update({"inside another": "C", "outside": "A"})
            wanted.update({(kind, where): {(name, max(met(name, rank)))} for kind, name in names.items()})
        assert seen == wanted


def scopes_in_hooks():
    import torch

    states()
    seen = []

    def note(_):
        seen.append(dm.scope_name())
        with dm.use_parallel_state("C"):
            seen.append(dm.scope_name())
        seen.append(dm.bind(dm.scope_name)())
        seen.append(dm.get_parallel_state_by_name("C").size("a"))

    with dm.use_parallel_state("B"):
        y = torch.ones(1, requires_grad=True) * 2
        y.register_hook(note)
        y.sum().backward()
        seen.append(dm.scope_name())
    return seen


def test_a_hook_may_open_scopes_of_its_own():
    assert torch_world(scopes_in_hooks, world_size=4) == [["B", "C", "B", 1, "B"]] * 4


def twice():
    """Return the second derivative through a rule in B, its first backward in A and the second in C."""
    import torch

    rank = states()

    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * copied(3 * x**2)

    copied = copy_in()
    x = torch.tensor([1.0 + rank], requires_grad=True)
    with dm.use_parallel_state("B"):
        y = Cubed.apply(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with dm.use_parallel_state("C"):
        (first * (rank + 1)).sum().backward()
    return x.grad.item()


def test_what_a_rule_records_for_a_second_backward_belongs_to_its_scope():
    for rank, found in enumerate(torch_world(twice, world_size=4)):
        assert found == sum(1.0 + other for other in met("B", rank)) * 6 * (1.0 + rank)


def threads():
    """Return the gradient of a rule whose forward ran in another thread, and what hooks of such nodes see."""
    import threading

    import torch

    from dualmesh_torch import private

    states()
    copied, said, made, x = copy_in(), [], {}, torch.ones(1, requires_grad=True)
    counted = private.nodes_made()()

    def forward(name):
        with dm.use_parallel_state(name):
            made[name] = x = torch.ones(1, requires_grad=True)
            while private.nodes_made()() < counted:  # up to numbers that main gave in this life of the states
                x * 1.0
            made[name, "rule"] = copied(x).sum()
            made[name, "hook"] = x * 2
        made[name, "hook"].register_hook(lambda _: said.append(dm.scope_name()))

    def run(target, *names):
        threads = [threading.Thread(target=target, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
            thread.join()

    with dm.use_parallel_state("C"):
        [x * 1.0 for _ in range(10)]
    run(forward, "B")
    made["B", "rule"].backward()
    found = made["B"].grad.item()
    for name in ("B", "C"):
        if name not in made:
            run(forward, name)
        try:
            made[name, "hook"].backward()
        except dm.errors.ScopeError as error:
            said.append(str(error))
    return found, said


def test_rules_know_their_scope_across_threads_and_hooks_of_which_it_is_not_known_are_refused():
    for found, said in torch_world(threads, world_size=4):
        assert found == 2.0
        assert len(said) == 2
        assert "the autograd node MulBackward0, which sees the scope of its forward" in said[0]
        assert "several threads may have made it, in different scopes (" in said[0]
        assert "`with dm.use_parallel_state(...)` inside the hook or rule" in said[1]


def cleared():
    """Return what is said in a backward whose states were cleared since the forward, one and all."""
    import torch

    states()
    x = torch.ones(1, requires_grad=True)
    losses = []
    for name in ("B", "C"):
        with dm.use_parallel_state(name):
            losses.append(copy_in()(x).sum())
            losses.append(x * 2)
            losses[-1].register_hook(lambda _: dm.get_parallel_state().require_live("hook"))
    said = []
    dm.clear_parallel_state("B")
    for place, loss in enumerate(losses):
        if place == 2:
            dm.clear_parallel_state()
            states()
        try:
            loss.backward()
        except dm.DualmeshError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_backward_after_its_state_was_cleared_is_refused():
    for said in torch_world(cleared, world_size=4):
        assert said[0].startswith("StaleStateError: ops.all_reduce: State 'B' was cleared")
        assert said[1].startswith("StaleStateError: hook: State 'B' was cleared")
        assert said[2].startswith("StaleStateError: ops.all_reduce: State 'C' was cleared")
        assert said[3].startswith("ScopeError: get_parallel_state: asked in a backward")
        assert "the states of then were cleared" in said[3]


def remembered():
    """Return how many scopes are kept of many that made nodes, and of many that made none."""
    import torch

    from dualmesh_torch import regions

    states()
    journal = regions.own_journal()
    x = torch.ones(1, requires_grad=True)
    first = None
    before = len(journal.ends)
    for _ in range(100):
        with dm.use_parallel_state("B"):
            dm.get_parallel_state()
    idle = len(journal.ends) - before
    for n in range(regions._KEPT + 10):
        with dm.use_parallel_state("B"):
            y = x * 2
        if n == 0:
            first = y
    y.register_hook(lambda _: seen.append(dm.scope_name()))
    seen = []
    y.backward()
    first.register_hook(lambda _: dm.scope_name())
    try:
        first.backward()
    except dm.errors.ScopeError as error:
        return idle, len(journal.ends) <= regions._KEPT, seen, "too long ago" in str(error)


def test_scopes_are_remembered_up_to_a_bound():
    assert torch_world(remembered, world_size=4) == [(0, True, ["B"], True)] * 4
