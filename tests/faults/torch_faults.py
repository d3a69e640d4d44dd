"""The faults of torch processes. A body runs as every rank; what it must end in is beside it."""

import contextlib
import os
import signal
import subprocess
import time
import warnings

import dualmesh as dm
from tests.faults.fault import Fault

SHORT_S = 2.0
FAULTS: dict[str, Fault] = {}


def fault(what, kind, *parts, **settings):
    """Register the decorated body as a fault."""

    def registered(body):
        FAULTS[body.__name__] = Fault(what, body, kind, parts, **settings)
        return body

    return registered


def grid(name="base", sizes=(2, 2), **settings):
    """Register a state of named axes whose groups wait as long as the fault says."""
    spec = dm.TopologySpec({"dp": sizes[0], "tp": sizes[1]}, roles={"sequence": ("tp",)})
    options = {"timeout_s": float(os.environ["DUALMESH_TIMEOUT_S"])}
    return dm.init_parallel_state(spec=spec, name=name, group_options=options, **settings)


def ones(*shape, dtype=None):
    """Return a tensor."""
    import torch

    return torch.ones(shape or (4,), dtype=dtype)


def quietly(call):
    """Call without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


@contextlib.contextmanager
def going_on(rank, rest):
    """After an error of the block, let the ranks that are left build and use a state of theirs."""
    try:
        yield
    except dm.DualmeshError:
        state = dm.init_parallel_state(spec=dm.TopologySpec({"a": len(rest)}), ranks=rest, name="rest")
        total = dm.ops.all_reduce(ones(1) * rank, "a", state=state).item()
        if total != sum(rest):
            raise RuntimeError(f"the rest computed {total}") from None
        raise


# -- states that are not the same ----------------------------------------------------------------------------------

SAID = ("ranks 0, 1, 3: 1 to build", "rank 2: 1 to build", "Nothing was built", "'base'")


@fault("rank 2 gives other sizes", "AgreementError", *SAID, "'tp': 4")
def other_sizes(rank):
    grid(sizes=(1, 4) if rank == 2 else (2, 2))


@fault("rank 2 gives another dp_mode", "AgreementError", *SAID, "dp_mode='ddp'")
def other_mode(rank):
    grid(dp_mode="ddp" if rank == 2 else "fsdp2")


@fault("rank 2 gives other group options", "AgreementError", *SAID, "'timeout_s': 7")
def other_options(rank):
    spec = dm.TopologySpec({"dp": 2, "tp": 2})
    dm.init_parallel_state(spec=spec, group_options={"timeout_s": 7.0 if rank == 2 else 9.0})


@fault("rank 2 wants groups of its own", "AgreementError", *SAID, "own_groups=True")
def other_owner(rank):
    grid(own_groups=rank == 2)


@fault("rank 2 gives the state another name", "AgreementError", "'base': ", "'bose': ", "ranks 0, 1, 3: ", "rank 2: ")
def other_name(rank):
    grid(name="bose" if rank == 2 else "base")


@fault("rank 2 has another version of dualmesh", "AgreementError", *SAID, "dualmesh 0.0.9")
def other_version(rank):
    from dualmesh.backend import state_plan

    if rank == 2:
        state_plan.__version__ = "0.0.9"
    grid()


@fault("rank 2 lists the ranks in another order", "AgreementError", *SAID, "ranks=(3, 2, 1, 0)")
def other_rank_order(rank):
    grid(ranks=(3, 2, 1, 0) if rank == 2 else (0, 1, 2, 3))


@fault(
    "rank 2 names other members",
    "GroupTimeoutError",
    "did not come within 2 s, of 2 ranks",
    "'base'",
    timeout_s=SHORT_S,
    at={0: ("", ()), 1: ("", ())},
)
def other_members(rank):
    grid(sizes=(1, 2), ranks=(rank // 2 * 2, rank // 2 * 2 + 1) if rank != 2 else (2, 0))


@fault("rank 3 gives other sizes while ranks 0 and 1 register a state of theirs", "AgreementError",
       "rank 2: 1 to build", "rank 3: 1 to build", "'right'", at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_sizes_of_a_part(rank):
    if rank < 2:
        state = grid("left", (1, 2), ranks=(0, 1))
        assert dm.ops.all_reduce(ones(1), "tp", state=state).item() == 2
    else:
        grid("right", (2, 1) if rank == 3 else (1, 2), ranks=(2, 3))


@fault("rank 1 registers two states in the other order", "AgreementError", "rank 1: ", "ranks 0, 2, 3: ", "'a'", "'b'")
def other_order(rank):
    for name in sorted(("a", "b"), reverse=rank == 1):
        grid(name, (2, 2) if name == "a" else (4, 1))


@fault("rank 3 registers a state of another backend", "GroupTimeoutError", "rank 3 did not come", "'base'",
       timeout_s=SHORT_S, at={3: ("", ())})  # fmt: skip
def other_backend(rank):
    if rank == 3:
        with dm.session("sim", world_size=4):
            grid(backend="sim")
    else:
        grid(backend="torch")


@fault("rank 3 never registers the state", "GroupTimeoutError", "rank 3 did not come within 2 s, of 4 ranks", "'base'",
       timeout_s=SHORT_S, at={3: ("", ())})  # fmt: skip
def never_registers(rank):
    if rank != 3:
        grid()
    else:
        time.sleep(SHORT_S + 1)


@fault(
    "rank 3 registers the state after the others gave up",
    "GroupTimeoutError",
    "rank 3 did not come within 2 s",
    "'base'",
    timeout_s=SHORT_S,
    at={3: ("GroupTimeoutError", ("ranks 0, 1, 2 did not come within 2 s",))},
)
def registers_late(rank):
    time.sleep(SHORT_S + 0.5 if rank == 3 else 0)
    grid()


@fault("rank 0 registers one state more", "", timeout_s=SHORT_S,
       at={0: ("GroupTimeoutError", ("ranks 1, 2, 3 did not come within 2 s", "'more'"))})  # fmt: skip
def registers_twice(rank):
    grid()
    if rank == 0:
        grid("more", (4, 1))
    else:
        time.sleep(SHORT_S + 1)


@fault("rank 1 clears alone and registers again", "", timeout_s=SHORT_S,
       at={1: ("GroupTimeoutError", ("ranks 0, 2, 3 did not come within 2 s", "'base'"))})  # fmt: skip
def clears_alone(rank):
    grid()
    if rank == 1:
        dm.clear_parallel_state()
    quietly(grid)
    if rank != 1:
        time.sleep(SHORT_S + 1)


@fault("rank 3 dies before it registers", "GroupTimeoutError", "rank 3 did not come within 2 s", "'base'",
       timeout_s=SHORT_S, at={3: ("dies", ())})  # fmt: skip
def dies_before(rank):
    if rank == 3:
        os._exit(7)
    with going_on(rank, (0, 1, 2)):
        grid()


@fault("rank 3 dies while groups are made", "GroupTimeoutError", "'base': the group of ranks 0, 1, 2, 3 could not be",
       timeout_s=SHORT_S, at={3: ("dies", ())})  # fmt: skip
def dies_in_building(rank):
    from dualmesh_torch.mesh.group_pool import GroupPool

    if rank == 3:
        GroupPool.acquire = lambda *_: os._exit(7)
    with going_on(rank, (0, 1, 2)):
        dm.init_parallel_state(spec=dm.TopologySpec({"tp": 4}, roles={"sequence": ("tp",)}))


@fault("rank 0, which holds the store, dies before it registers", "AgreementError", "usually that of rank 0, has",
       "'base'", timeout_s=SHORT_S, at={0: ("dies", ())})  # fmt: skip
def store_dies(rank):
    if rank == 0:
        os._exit(7)
    time.sleep(0.3)
    grid()


@fault("rank 3 alone uses two axes as one for the first time", "", timeout_s=SHORT_S,
       at={3: ("GroupTimeoutError", ("State 'base'", "ranks 0, 2, 1, 3", "did not come within 2 s"))})  # fmt: skip
def first_use_alone(rank):
    grid()
    if rank == 3:
        dm.ops.all_reduce(ones(), ("tp", "dp"))
    else:
        time.sleep(SHORT_S + 1)


# -- collectives that do not match, in debug mode ------------------------------------------------------------------

HERE = "torch_faults.py:"
BOTH = ("debug mode", "State 'base', axis 'tp'", HERE, "Nothing was sent")


@fault("debug mode: rank 2 reduces where the others gather", "AgreementError", *BOTH, "all_gather(dim=0)",
       "all_reduce(op='sum')", "rank 3", "in other_op", debug=True, at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_op(rank):
    grid()
    (dm.ops.all_reduce if rank == 2 else dm.ops.all_gather)(ones(), "tp")


@fault("debug mode: rank 2 has another shape", "AgreementError", *BOTH, "float32[4]", "float32[8]", "rank 2", "rank 3",
       debug=True, at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_shape(rank):
    grid()
    dm.ops.all_reduce(ones(8 if rank == 2 else 4), "tp")


@fault("debug mode: rank 2 has another dtype", "AgreementError", *BOTH, "float32[4]", "int64[4]", "rank 2", "rank 3",
       debug=True, at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_dtype(rank):
    import torch

    grid()
    dm.ops.all_reduce(ones(dtype=torch.int64 if rank == 2 else None), "tp")


@fault("debug mode: rank 2 takes the maximum", "AgreementError", *BOTH, "op='max'", "op='sum'", debug=True,
       at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_reduction(rank):
    grid()
    dm.ops.all_reduce(ones(), "tp", "max" if rank == 2 else "sum")


@fault("debug mode: rank 2 broadcasts from another index", "AgreementError", *BOTH, "src=0", "src=1", debug=True,
       at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_source(rank):
    grid()
    dm.ops.broadcast(ones(), "tp", src=int(rank == 2))


@fault("debug mode: rank 3 calls two collectives of one axis in the other order", "AgreementError", *BOTH,
       "all_gather", "all_reduce", debug=True, at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_order_of_ops(rank):
    grid()
    for verb in ("all_gather", "all_reduce")[:: -1 if rank == 3 else 1]:
        getattr(dm.ops, verb)(ones(), "tp")


@fault("debug mode: ranks 1 and 2 call the collectives of two axes in the other order", "GroupTimeoutError",
       "debug mode", HERE, "did not come within 2 s", "came last to debug mode", "Nothing was sent", debug=True,
       timeout_s=SHORT_S)  # fmt: skip
def other_order_of_axes(rank):
    grid()
    for axis in ("dp", "tp")[:: -1 if rank in (1, 2) else 1]:
        dm.ops.all_reduce(ones(), axis)


@fault("debug mode: rank 3 leaves a collective out", "GroupTimeoutError", "rank 3 did not come within 2 s", HERE,
       "State 'base', axis 'tp'", debug=True, timeout_s=SHORT_S,
       at={0: ("", ()), 1: ("", ()), 3: ("", ())})  # fmt: skip
def leaves_out(rank):
    grid()
    if rank != 3:
        dm.ops.all_reduce(ones(), "tp")
    else:
        time.sleep(SHORT_S + 1)


@fault("debug mode: rank 3 calls a collective twice", "AgreementError", *BOTH, "all_reduce", "all_gather", debug=True,
       at={0: ("", ()), 1: ("", ())})  # fmt: skip
def calls_twice(rank):
    grid()
    for _ in range(2 if rank == 3 else 1):
        dm.ops.all_reduce(ones(), "tp")
    dm.ops.all_gather(ones(), "tp")


@fault(
    "debug mode: rank 3 recomputes activations in another order",
    "AgreementError",
    "debug mode",
    "ops.all_reduce",
    "ops.shift",
    "other_recompute.<locals>.recomputed",
    "State 'base', axis 'tp'",
    debug=True,
    at={0: ("", ()), 1: ("", ())},
)
def other_recompute(rank):
    import torch
    from torch.utils.checkpoint import checkpoint

    grid()
    passes = []

    def recomputed(x):
        passes.append(1)
        verbs = ["all_reduce", "shift"]
        if rank == 3 and len(passes) > 1:
            verbs.reverse()
        for verb in verbs:
            x = getattr(dm.ops, verb)(x, "tp") * x
        return x

    x = ones().requires_grad_()
    checkpoint(recomputed, x, use_reentrant=False).sum().backward()
    return torch.linalg.norm(x.grad)


@fault("debug mode: rank 3 goes backward through another branch", "AgreementError", "debug mode",
       "the backward of", HERE, debug=True, at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_backward(rank):
    grid()
    x = ones().requires_grad_()
    first, second = dm.ops.all_reduce(x, "tp"), dm.ops.all_gather(x, "tp")
    (second if rank == 3 else first).sum().backward()


@fault("debug mode: rank 3 starts another collective without waiting", "AgreementError", *BOTH, "float32[4]",
       "float32[6]", debug=True, at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_async(rank):
    grid()
    dm.ops.all_reduce(ones(6 if rank == 3 else 4), "tp", async_=True).wait()


@fault("debug mode: rank 3 is in another scope", "AgreementError", "debug mode", "State 'base', axis 'tp'",
       "State 'other', axis 'tp'", "rank 3", debug=True, at={0: ("", ()), 1: ("", ())})  # fmt: skip
def other_scope(rank):
    grid()
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 2}, roles={"sequence": ("tp",)}), name="other",
                           dp_mode="ddp", group_options={"timeout_s": 30.0})  # fmt: skip
    with dm.use_parallel_state("other" if rank == 3 else "base"):
        dm.ops.all_reduce(ones(), "tp")


@fault("debug mode: rank 3 gathers objects where the others broadcast one", "AgreementError", "debug mode",
       "host.broadcast(src=0)", "host.all_gather()", "State 'base', axis 'world'", HERE, debug=True)  # fmt: skip
def other_object_exchange(rank):
    grid()
    if rank == 3:
        dm.host.all_gather(rank)
    else:
        dm.host.broadcast(rank)


@fault("debug mode is on on rank 2 only", "", debug=False, timeout_s=SHORT_S,
       at={2: ("GroupTimeoutError", ("rank 3 did not come within 2 s", "State 'base', axis 'tp'")),
           3: ("GroupTimeoutError", ("ops.all_reduce", "State 'base', axis 'tp'", "ranks 2, 3"))})  # fmt: skip
def debug_on_one(rank):
    grid()
    with dm.debug(rank == 2):
        dm.ops.all_reduce(ones(), "tp")


@fault("debug mode: two threads of rank 3 use one group at once", "AgreementError", "debug mode", "all_gather",
       "all_reduce", debug=True, at={0: ("", ()), 1: ("", ())})  # fmt: skip
def threads_on_one_group(rank):
    import threading

    state = grid()
    names = ["all_gather", "all_reduce"][:: -1 if rank == 3 else 1]
    failed = []

    def use(verb):
        try:
            getattr(dm.ops, verb)(ones(), "tp", state=state)
        except dm.DualmeshError as error:
            failed.append(error)

    for name in names:  # one after the other, as two threads may happen to be
        thread = threading.Thread(target=use, args=(name,))
        thread.start()
        thread.join()
    if failed:
        raise failed[0]


# -- ranks that die or do not come, without debug mode -------------------------------------------------------------

LOST = ("State 'base'", "ranks 2, 3", "No word from rank 3")


def lost(body_of):
    """Return a body in which rank 3 dies, or leaves, where the others call `use(state)`."""

    def body(rank, end):
        state = grid()
        dm.ops.all_reduce(ones(), "tp")
        use = body_of(state)
        if rank == 3:
            end()
        else:
            time.sleep(0.2)
            use()

    return body


def dying():
    os._exit(7)


def staying_away():
    time.sleep(SHORT_S + 1.5)


USES = {
    "all_reduce": lambda state: lambda: dm.ops.all_reduce(ones(), "tp"),
    "all_gather": lambda state: lambda: dm.ops.all_gather(ones(), "tp"),
    "all_to_all": lambda state: lambda: dm.ops.all_to_all(ones(4, 4), "tp", 0, 1),
    "shift": lambda state: lambda: dm.ops.shift(ones(), "tp"),
    "async_ all_reduce": lambda state: lambda: dm.ops.all_reduce(ones(), "tp", async_=True).wait(),
    "host.all_gather": lambda state: lambda: dm.host.all_gather(1, "tp"),
    "backward of all_reduce": lambda state: _backward_through(),
    "sync_gradients": lambda state: lambda: dm.sync_gradients([ones().requires_grad_()], "tp"),
}


def _backward_through():
    y = dm.ops.all_reduce(ones().requires_grad_(), "tp").sum()
    return y.backward


for _name, _use in USES.items():
    for _how, _end, _kind in (("dies", dying, "LostPeerError"), ("does not come", staying_away, "GroupTimeoutError")):
        _at = {0: ("", ()), 1: ("", ()), 3: ("dies" if _how == "dies" else "", ())}
        _words = LOST if _how == "dies" else ("State 'base'", "ranks 2, 3", "imed out")
        FAULTS[f"{_name}: {_how}"] = Fault(
            f"rank 3 {_how} where rank 2 waits in {_name}",
            lambda rank, _use=_use, _end=_end: lost(_use)(rank, _end),
            _kind,
            _words,
            _at,
            timeout_s=SHORT_S,
        )


@fault("rank 3 does not come to host.barrier", "GroupTimeoutError", "host.barrier", "State 'base'", "ranks 0, 1, 2, 3",
       timeout_s=SHORT_S, at={3: ("", ())})  # fmt: skip
def away_from_barrier(rank):
    grid()
    dm.host.barrier()
    if rank == 3:
        time.sleep(SHORT_S + 2)
    else:
        dm.host.barrier()


@fault("rank 3 does not come to warm_up", "GroupTimeoutError", "warm_up", "State 'base'", timeout_s=SHORT_S,
       at={3: ("", ())})  # fmt: skip
def away_from_warm_up(rank):
    state = grid()
    if rank == 3:
        time.sleep(SHORT_S + 2)
    else:
        state.warm_up()


@fault("rank 0, which holds the store, dies where the others wait", "LostPeerError|GroupTimeoutError", "State 'base'",
       "usually that of rank 0", timeout_s=SHORT_S, at={0: ("dies", ())})  # fmt: skip
def store_dies_in_use(rank):
    grid()
    dm.ops.all_reduce(ones(), "world")
    if rank == 0:
        os._exit(7)
    time.sleep(0.3)
    dm.ops.all_reduce(ones(), "world")


def frozen(seconds):
    """Stop this process as a debugger, a full disk or a suspended machine does; another one lets it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    os.wait()


@fault("rank 0, which holds the store, is frozen where the others wait", "GroupTimeoutError", "State 'base'",
       "The store in which the ranks met does not answer either", timeout_s=SHORT_S, at={0: ("", ())})  # fmt: skip
def store_is_frozen(rank):
    grid()
    dm.ops.all_reduce(ones(), "world")
    if rank == 0:
        frozen(SHORT_S + 6)
    else:
        time.sleep(0.3)
        dm.ops.all_reduce(ones(), "world")


@fault("rank 0, which holds the store, is frozen where the others build", "AgreementError", "'late'",
       "the store in which the ranks met does not answer", timeout_s=SHORT_S, at={0: ("", ())})  # fmt: skip
def store_is_frozen_in_building(rank):
    grid()
    dm.ops.all_reduce(ones(), "world")
    if rank == 0:
        frozen(SHORT_S + 6)
    else:
        time.sleep(0.3)
        grid("late", own_groups=True)


@fault(
    "rank 3 raises an error of the user's own inside a scope; its world ends at once",
    "",
    leaves=True,
    timeout_s=SHORT_S,
    at={3: ("ValueError", ("the user's own",)), 2: ("LostPeerError", ("State 'base'", "ranks 2, 3"))},
)
def raises_in_scope(rank):
    grid()
    dm.ops.all_reduce(ones(), "tp")
    with dm.use_parallel_state("base"):
        if rank == 3:
            raise ValueError("the user's own")
        dm.ops.all_reduce(ones(), "tp")


def leaving(who):
    """Return a body in which a rank ends its session, without an error, where the others build a state."""

    def body(rank):
        grid()
        if rank != who:
            grid("late", own_groups=True)

    return body


for _who in (3, 0):
    FAULTS[f"rank {_who} leaves"] = Fault(
        f"rank {_who} ends its session, without an error, where the others build a state",
        leaving(_who),
        "LostPeerError",
        ("init_parallel_state", "'late'", f"rank {_who} left the session and will not come, of 4 ranks"),
        {_who: ("", ())},
        leaves=True,
    )


# -- states that are no more ---------------------------------------------------------------------------------------


@fault("a state is used after it was cleared", "StaleStateError", "State 'base'", "was cleared")
def after_clear(rank):
    state = grid()
    dm.clear_parallel_state()
    dm.ops.all_reduce(ones(), "tp", state=state)


@fault("a state's mesh is asked for after the world was destroyed", "StaleStateError", "State 'base'", "lost its world")
def mesh_after_destroy(rank):
    import torch.distributed as dist

    state = grid()
    dist.barrier()
    dist.destroy_process_group()
    assert state.size("tp") == 2
    state.mesh.size()


@fault("the ambient state is used after the world was destroyed", "StaleStateError", "State 'base'", "lost its world")
def ambient_after_destroy(rank):
    import torch.distributed as dist

    grid()
    dist.barrier()
    dist.destroy_process_group()
    dm.ops.all_reduce(ones(), "tp")


@fault("a function lifted by shard_map is called after the world was destroyed", "StaleStateError", "State 'base'")
def program_after_destroy(rank):
    import torch.distributed as dist

    grid()
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "tp"), dm.P("tp"), dm.P())
    lifted(ones())
    dist.barrier()
    dist.destroy_process_group()
    lifted(ones())


@fault("a compiled function is called after the world was destroyed", "StaleStateError", "State 'base' lost its world")
def compiled_after_destroy(rank):
    import torch
    import torch.distributed as dist

    state = grid()
    compiled = torch.compile(lambda x: dm.ops.all_reduce(x, "tp", state=state), backend="eager", fullgraph=True)
    compiled(ones())
    dist.barrier()
    dist.destroy_process_group()
    compiled(ones())


@fault("a state of an earlier world is used in the next one", "StaleStateError", "State 'base'")
def in_another_world(rank):
    import torch.distributed as dist

    state = grid()
    store = dist.PrefixStore("next", dist.distributed_c10d._get_default_store())
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    grid("fresh")
    dm.ops.all_reduce(ones(), "tp", state=state)


@fault("a state is used in a fork of its process", "StaleStateError", "State 'base'", "a fork")
def in_a_fork(rank):
    import json

    state = grid()
    read, write = os.pipe()
    child = quietly(os.fork)
    if not child:
        try:
            dm.ops.all_reduce(ones(), "tp", state=state)
        except dm.StaleStateError as error:
            os.write(write, json.dumps(str(error)).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    raise dm.StaleStateError(json.loads(os.read(read, 1 << 16)))


@fault("a state is used in a worker of a DataLoader", "StaleStateError", "State 'base'", "a fork", world=2)
def in_a_data_loader(rank):
    import multiprocessing

    from torch.utils.data import DataLoader

    multiprocessing.current_process()._config["daemon"] = False  # as forked from a worker of the tests

    class Items:
        def __len__(self):
            return 1

        def __getitem__(self, place):
            try:
                dm.ops.all_reduce(ones(), "a")
            except dm.StaleStateError as error:
                return str(error)

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    quietly(
        lambda: _raise(next(iter(DataLoader(Items(), batch_size=None, num_workers=1, multiprocessing_context="fork"))))
    )


def _raise(text):
    raise dm.StaleStateError(text)


@fault("a collective is called before any state is registered", "NoStateError", "no parallel state is registered",
       "torch runs 4 processes")  # fmt: skip
def before_any_state(rank):
    quietly(lambda: dm.ops.all_reduce(ones(), "tp"))


@fault(
    "rank 3 uses a state of which it is no member",
    "",
    at={3: ("MembershipError", ("State 'part'", "rank 3", "0, 1, 2"))},
)
def no_member(rank):
    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 3}), ranks=(0, 1, 2), name="part")
    if rank == 3:
        dm.ops.all_reduce(ones(), "a", state=state)


# -- worlds that cannot start --------------------------------------------------------------------------------------


def launched(rank, **changed):
    """Start a world as torchrun says it, with some variables changed or (None) left out."""
    host, _, port = os.environ["FAULT_ADDRESS"].removeprefix("tcp://").rpartition(":")
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port}
    for name, value in (variables | changed).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    dm.init_distributed("torch", timeout_s=SHORT_S)


@fault("RANK is set, WORLD_SIZE is not", "LaunchError", "WORLD_SIZE missing", "RANK", world=2, has_world=False)
def half_set(rank):
    launched(rank, WORLD_SIZE=None)


@fault("RANK is not below WORLD_SIZE", "LaunchError", "is not in a world of 2", world=2, has_world=False)
def contradictory(rank):
    launched(rank, RANK=str(rank + 2))


@fault("MASTER_PORT is no number", "LaunchError", "MASTER_PORT='http'", world=2, has_world=False)
def malformed(rank):
    launched(rank, MASTER_PORT="http")


@fault("DUALMESH_TIMEOUT_S is no time", "LaunchError", "DUALMESH_TIMEOUT_S='soon'")
def malformed_timeout(rank):
    options = {"spec": dm.TopologySpec({"a": 4})}
    os.environ["DUALMESH_TIMEOUT_S"] = "soon"
    dm.init_parallel_state(**options)


@fault(
    "rank 1 never starts",
    "GroupTimeoutError",
    "init_distributed: rank 1 did not come",
    world=1,
    has_world=False,
    timeout_s=SHORT_S,
)
def never_starts(rank):
    launched(rank)


@fault("rank 0 never starts", "SessionError", "rank 1 of 2", world=1, has_world=False, timeout_s=SHORT_S)
def first_never_starts(rank):
    launched(1)


@fault("the port is in use", "SessionError", "rank 0 of 2", world=1, has_world=False, timeout_s=SHORT_S)
def port_in_use(rank):
    import socket

    host, _, port = os.environ["FAULT_ADDRESS"].removeprefix("tcp://").rpartition(":")
    with socket.create_server((host, int(port))):
        launched(rank)


@fault("the ranks say other world sizes", "GroupTimeoutError", "ranks 1, 2 did not come", "rank 1 came last to",
       "2 processes", world=2, has_world=False, timeout_s=SHORT_S,
       at={1: ("GroupTimeoutError", ("rank 0 did not come", "rank 0 came last to", "3 processes"))})  # fmt: skip
def other_world_sizes(rank):
    launched(rank, WORLD_SIZE="2" if rank else "3")


@fault("two processes say that they are rank 1", "SessionError", "rank 1 of 3", world=2, has_world=False,
       timeout_s=SHORT_S)  # fmt: skip
def same_rank_twice(rank):
    launched(1, WORLD_SIZE="3")


@fault(
    "a world of another size runs already", "SessionError", "a torch world of 4 processes runs already", "asked for 2"
)
def another_world_runs(rank):
    dm.init_distributed("torch", rank=0, world_size=2, init_method="tcp://127.0.0.1:1")
