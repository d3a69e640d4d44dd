"""What dualmesh refuses in compiled code arrives as its own error, as it does uncompiled."""

import dualmesh as dm
from tests.worlds import torch_world

A = dm.TopologySpec({"a": 2})
B = dm.TopologySpec({"a": 2, "b": 1})


def in_scope(target, fn):
    def run(x):
        with dm.use_parallel_state(target):
            return fn(x)

    return run


def refused(old):
    import torch

    ops = dm.ops
    return {
        "unknown axis": lambda x: ops.all_reduce(x, "aa"),
        "unknown axis of several": lambda x: ops.all_reduce(x, ("a", "zz")),
        "axes that share ranks": lambda x: ops.all_reduce(x, ("a", "world")),
        "in a scope": in_scope("B", lambda x: ops.all_gather(x, "bb")),
        "rank": lambda x: x * dm.get_parallel_state().index("a", 7),
        "unknown name": lambda x: x * dm.get_parallel_state_by_name("C").size("a"),
        "scope of an unknown name": in_scope("C", lambda x: x),
        "stale": lambda x: ops.all_reduce(x, "c", state=old),
        "stale group": lambda x: (old.group("c"), x)[1],
        "stale mesh": lambda x: (old.mesh, x)[1],
        "sum of bool": lambda x: ops.all_reduce(x > 0, "a"),
        "mean of integers": lambda x: ops.reduce_scatter(x.to(torch.int32), "a", op="mean"),
        "dtype": lambda x: ops.all_reduce(x.to(torch.float8_e4m3fn), "a"),
        "size of a dim": lambda x: ops.all_to_all(x[:3], "a", 0, 1),
        "index": lambda x: ops.broadcast(x, "a", src=7),
        "heads": lambda x: dm.sequence.gather_seq_scatter_heads(x, seq_dim=0, head_dim=1, axis="a"),
        "after a collective": lambda x: ops.all_reduce(ops.all_reduce(x, "a"), "zz"),
    }


UNREGISTERED = {
    "none: size": lambda x: x + dm.get_parallel_state().size("dp"),
    "none: collective": lambda x: dm.ops.all_reduce(x, "dp"),
    "none: group": lambda x: (dm.get_parallel_state().group("dp"), x)[1],
    "none: mesh": lambda x: (dm.get_parallel_state().mesh, x)[1],
    "none: scope": in_scope("A", lambda x: x),
}


def answers(fn):
    """Return what a function gives or raises: uncompiled, and compiled as one graph."""
    import torch

    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        run = torch.compile(fn, backend="eager", fullgraph=True) if compiled else fn
        try:
            found.append(run(torch.ones(4, 3)).tolist())
        except Exception as error:
            found.append((type(error).__module__, type(error).__name__, str(error)))
    return found


def everything():
    import warnings

    dm.init_parallel_state(spec=dm.TopologySpec({"c": 2}), name="old")
    old = dm.get_parallel_state()
    dm.clear_parallel_state()
    dm.init_parallel_states({"A": A, "B": B}, default="A")
    found = {name: answers(fn) for name, fn in refused(old).items()}
    dm.clear_parallel_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a state before any init
        return found, {name: answers(fn) for name, fn in UNREGISTERED.items()}


def test_errors_arrive_from_compiled_code_as_they_are():
    for found, unregistered in torch_world(everything, world_size=2, timeout_s=300):
        for name, (eager, compiled) in {**found, **unregistered}.items():
            assert compiled == eager, name
        assert all(eager[0] == "dualmesh.errors" for eager, _ in found.values())
        kinds = {name: eager[1] for name, (eager, _) in unregistered.items() if name != "none: size"}
        assert kinds == {
            "none: collective": "NoStateError",
            "none: group": "NoStateError",
            "none: mesh": "NoStateError",
            "none: scope": "UnknownStateError",
        }
        assert unregistered["none: size"][0] == [[2.0] * 3] * 4


def undifferentiable():
    """Return what max gives in compiled code: where a gradient is needed, where not, and to code that catches."""
    import torch

    dm.init_parallel_state(spec=A)
    rank = dm.get_parallel_state().own_rank()

    def greatest(x):
        return dm.ops.all_reduce(x, "a", op="max")

    def catching(x):
        try:
            return dm.ops.all_reduce(x, "zz")
        except dm.DualmeshError:
            return x

    found = []
    for fn, needs in ((greatest, False), (greatest, True), (catching, False)):
        torch._dynamo.reset()
        x = torch.tensor([float(rank)], requires_grad=needs)
        try:
            found.append(torch.compile(fn, backend="eager", fullgraph=True)(x).tolist())
        except dm.DualmeshError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_compiled_code_refuses_a_max_that_needs_a_gradient_and_to_catch_errors():
    for value, gradient, catching in torch_world(undifferentiable, world_size=2):
        assert value == [1.0]
        assert gradient.startswith("NotDifferentiableError: ops.all_reduce(op='max') over 'a' has no gradient.")
        assert catching.startswith("OutsideCompileError: torch.compile: the compiled code catches an error")


def renamed():
    """Return what compiled code that opens a name gives: registered, cleared, registered with other sizes."""
    import torch

    torch._dynamo.reset()

    def opening(x):
        with dm.use_parallel_state("B") as state:
            return dm.ops.all_reduce(x, "a") * 10 + state.size("a")

    fns = [opening, dm.scoped(lambda x: x * 0 + dm.ops.axis_size("a"), "B")]
    fns = [torch.compile(fn, backend="eager", fullgraph=True) for fn in fns]
    found = []
    for sizes in ({"a": 2}, None, {"a": 1, "c": 2}):
        if sizes is not None:
            dm.init_parallel_states({"A": A, "B": dm.TopologySpec(sizes)}, default="A")
        for fn in fns:
            try:
                found.append(fn(torch.ones(1)).item())
            except dm.errors.UnknownStateError as error:
                found.append(error.name)
        if sizes is not None:
            dm.clear_parallel_state("B")
    return found


def test_compiled_code_follows_the_name_that_it_opens():
    assert torch_world(renamed, world_size=2) == [[22.0, 2.0, "B", "B", 11.0, 1.0]] * 2
