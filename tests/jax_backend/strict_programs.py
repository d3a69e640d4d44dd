"""Every public operation and array function as a small program of 4 ranks, for runs under JAX's strict settings."""

import numpy as np

import dualmesh as dm

ROWS = np.arange(32, dtype=np.float32).reshape(8, 4) / 7 - 2
COUNTS = np.array([3, 1, 0, 2], np.int32)
PROGRAMS = {}
A, ALL = dm.P("a"), dm.P("world")


def program(fn):
    """Keep a program, which makes its own functions, under its name."""
    PROGRAMS[fn.__name__] = fn
    return fn


def _gradient(fn, *arrays):
    """Return value and gradients, compiled: run eagerly JAX's own seed of 1.0 would be an implicit transfer.

    Nothing where leaks are checked: of a `jax.shard_map` by hand around a psum JAX says that its gradient leaks.
    """
    import jax

    if jax.config.jax_check_tracer_leaks:
        return None
    return jax.jit(dm.value_and_grad(fn, range(len(arrays))))(*arrays)


OPS = {
    "all_reduce": lambda x: dm.ops.all_reduce(x, "a"),
    "all_reduce mean": lambda x: dm.ops.all_reduce(x, ("b", "a"), "mean"),
    "all_gather": lambda x: dm.ops.all_gather(x, ("b", "a"), 1),
    "reduce_scatter": lambda x: dm.ops.reduce_scatter(x, "a", 0),
    "reduce_scatter mean": lambda x: dm.ops.reduce_scatter(x, "a", 1, "mean"),
    "all_to_all": lambda x: dm.ops.all_to_all(x, "b", 1, 0),
    "broadcast": lambda x: dm.ops.broadcast(x, "a", 1),
    "shift": lambda x: dm.ops.shift(x, "a", 1),
    "shift without wrap": lambda x: dm.ops.shift(x, "world", 1, wrap=False),
    "permute": lambda x: dm.ops.permute(x, ("b", "a"), [(0, 3), (1, 0)]),
    "enter and leave": lambda x: dm.ops.leave(dm.ops.enter(x, "a") * 2.0, "a"),
    "take_block": lambda x: dm.ops.take_block(x, "a", 1),
    "slice_sequence": lambda x: dm.sequence.slice_sequence(dm.sequence.gather_sequence(x, 0, "a"), 1, "b"),
    "pad and unpad": lambda x: dm.sequence.unpad_sequence(dm.sequence.pad_sequence(x[:, :3], 1, "a", value=2.0), 1, 3),
    "roll": lambda x: dm.sequence.roll(x, 3, 0, "world"),
    "balanced": lambda x: dm.sequence.balanced(x, 1, 2) + dm.sequence.balanced(x, 1, 2, inverse=True),
    "token_weighted_mean": lambda x: dm.sequence.token_weighted_mean(x.mean(), 3, "a") * x,
    "global_norm": lambda x: dm.global_norm([x, x[0].astype("float16")], axis="world") * x,
    "sync_gradients": lambda x: dm.sync_gradients({"w": x}, "a")["w"],
    "token_mean": lambda x: dm.token_mean(x.sum(), len(x), "world")[0] * x,
}
MOVES = ("all_gather", "all_to_all", "broadcast", "shift", "permute", "take_block")
SUMS = ("all_reduce", "reduce_scatter")


@program
def operations():
    """Every operation on floats, and the gradient of all of them."""
    import jax

    def fn(x):
        x = x * (1.0 + dm.ops.axis_index("world").astype(x.dtype))
        return {name: op(x) for name, op in OPS.items()}

    lifted, x = dm.shard_map(fn, ALL, ALL), dm.distribute(ROWS, ALL)
    forward = lifted(ROWS)
    return forward, _gradient(lambda x: sum((y * y).sum() for y in jax.tree.leaves(lifted(x))), x)


@program
def operations_on_other_dtypes():
    def fn(x):
        found = {}
        for dtype in ("int32", "bool", "complex64", "float16"):
            for name in MOVES + (() if dtype == "bool" else SUMS):
                found[f"{name} {dtype}"] = OPS[name](x.astype(dtype))
        found["max"] = dm.ops.all_reduce(x, "a", "max")
        found["largest"] = dm.global_norm({"x": x}, float("inf"), axis="a")[None]
        return found

    return dm.shard_map(fn, ALL, ALL)(ROWS)


@program
def all_reduce_max_of_integers():
    return dm.shard_map(lambda x: dm.ops.all_reduce(x, "a", "min"), ALL, ALL)(COUNTS)


@program
def index_and_size():
    def fn(x):
        return x + dm.ops.axis_index(("b", "a")) * dm.ops.axis_size("a")

    return dm.shard_map(fn, ALL, ALL)(COUNTS)


@program
def ragged_all_to_all():
    def fn(x, send, recv):
        return dm.ops.ragged_all_to_all(x, "a", send, recv, rows=4)

    sent = np.array([1, 1, 2, 0, 1, 1, 0, 2], np.int32)
    received = np.array([1, 2, 1, 1, 1, 0, 1, 2], np.int32)
    lifted = dm.shard_map(fn, (ALL, ALL, ALL), ALL)
    return lifted(ROWS, sent, received)


@program
def token_means():
    def fn(x, n):
        found = []
        for dtype in ("float32", "bfloat16"):
            for count in (n.sum(), n[0].astype("float32"), 3, np.int64(3)):
                objective, value = dm.token_mean(x.astype(dtype).sum(), count, "world")
                given, _ = dm.token_mean(x.astype(dtype).sum(), count, total=n.sum() + 5)
                found += [dm.ops.all_reduce(objective + given, "world"), value]
        return found

    return dm.shard_map(fn, (ALL, ALL), dm.P())(ROWS, COUNTS)


@program
def token_weighted_means():
    def fn(x, n):
        return dm.sequence.token_weighted_mean(x.mean(), n[0], "world")

    return dm.shard_map(fn, (ALL, ALL), dm.P())(ROWS, COUNTS)


@program
def ring_attention():

    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 8, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    split = dm.P(None, "world")

    def fn(*blocks):
        found = []
        for causal, dtype in ((True, "float32"), (False, "bfloat16")):
            typed = [block.astype(dtype) for block in blocks]
            found.append(dm.sequence.ring_attention(*typed, axis="world", causal=causal).astype("float32"))
        return found

    given = [dm.distribute(x, split) for x in (query, key, value)]
    lifted = dm.shard_map(fn, (split,) * 3, split)
    forward = lifted(*given)
    return forward, _gradient(lambda *a: sum(y.sum() for y in lifted(*a)), *given)


@program
def ulysses():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 4, 3)).astype(np.float32)

    def fn(x):
        heads = dm.sequence.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2, axis="world", unpadded_length=7)
        whole = dm.sequence.pad_sequence(heads, 1, "world")
        return dm.sequence.gather_heads_scatter_seq(whole * 2.0, seq_dim=1, head_dim=2, axis="world")

    split = dm.P(None, "world")
    lifted = dm.shard_map(fn, split, split)
    return lifted(x), _gradient(lambda x: lifted(x).sum(), dm.distribute(x, split))


@program
def ulysses_attention():
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 8, heads, 4)).astype(np.float32) for heads in (4, 2, 2))

    def attend(q, k, v):
        return q * k.sum(1, keepdims=True).repeat(q.shape[2] // k.shape[2], 2) + v.mean()

    def fn(q, k, v):
        return dm.sequence.ulysses_attention(q, k, v, attend, axis="world")

    split = dm.P(None, "world")
    return dm.shard_map(fn, (split,) * 3, split)(query, key, value)


@program
def packed_sequences():
    def fn(x):
        full, lengths, index = dm.sequence.sp_gather_seqs(x, 0, lengths=[2, 1, 2, 2])
        return dm.sequence.sp_take_own_seq(full, 0, lengths, index)

    with dm.use_parallel_state("sequence"):
        return dm.shard_map(fn, ALL, ALL)(ROWS)


@program
def positions():
    return dm.shard_map(lambda x: dm.sequence.sequence_positions(x, 2, "world"), ALL, ALL)(ROWS)


@program
def remat():
    lifted = dm.shard_map(dm.remat(lambda x: dm.ops.all_reduce(x * x, "a")), ALL, ALL)
    return lifted(ROWS), _gradient(lambda x: lifted(x).sum(), dm.distribute(ROWS, ALL))


@program
def norms_of_global_arrays():
    tree = {"w": dm.distribute(ROWS, A), "b": dm.distribute(ROWS[0].astype(np.float16), dm.P())}
    return dm.global_norm(tree), dm.global_norm(tree, 3.0), dm.global_norm(tree, float("inf"))


@program
def arrays():
    import jax

    found = []
    for dtype in ("float32", "bool", "bfloat16", "float64", "int64"):
        host = ROWS.astype(np.dtype(jax.numpy.bfloat16) if dtype == "bfloat16" else dtype)
        x = dm.distribute(host, dm.P("a", "b"))
        found += [dm.constrain(x, dm.P("b")), dm.reshard(x, dm.P(None, "a")), dm.distribute(x, ALL)]
        found += [jax.jit(lambda x: dm.constrain(x, dm.P("b")))(x), jax.jit(lambda x: dm.reshard(x, dm.P("a")))(x)]
        found += [dm.shard_local(host, dm.P("a"), check=True), dm.distribute(host[:7], dm.P("a"), pad=True)]
        found += [dm.distribute(host, dm.P("a"), check=True), dm.distribute(host, dm.P("a"), src=1)]
    ends = {"src": ("grid", dm.P("a")), "dst": ("sequence", dm.P("sp"))}
    found += [dm.reshard(dm.distribute(ROWS, A), **ends)]
    found += [jax.jit(lambda x: dm.reshard(x, **ends))(dm.distribute(ROWS, A))]
    found += [dm.transfer({"w": dm.distribute(ROWS, A)}, src="grid", dst="sequence", specs=(A, dm.P("sp")))]
    return [dm.to_numpy(leaf) for leaf in jax.tree.leaves(found)]


@program
def checked_results():
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "world"), ALL, dm.P(), check_replicated=True)
    partial = dm.shard_map(lambda x: x.sum(0), ALL, dm.P(partial="world"))
    return lifted(ROWS), partial(ROWS)


@program
def partly_manual():
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "a"), A, dm.P(), axes=("a",))
    return lifted(ROWS)


@program
def rank_groups():
    def fn(x):
        mean = dm.ops.all_reduce(x, "pair", "mean") + dm.ops.all_reduce(x, "uneven", "mean")
        index = dm.ops.axis_index("uneven")
        return dm.ops.broadcast(mean * index.astype(mean.dtype), "pair", 1) + dm.ops.all_gather(x, "pair")[:2]

    return dm.shard_map(fn, ALL, ALL, dm.get_parallel_state_by_name("groups"))(ROWS)


@program
def federated_mean():
    state = dm.get_parallel_state_by_name("federation")
    inside = dm.shard_map(lambda x: dm.federated_mean({"w": x}, state, (3, 1))["w"], ALL, ALL, state)
    half = dm.shard_map(lambda x: dm.federated_mean(x.astype("float16"), state), ALL, ALL, state)
    import jax

    devices = np.array(state.shared.devices).reshape(2, 2)
    trees = []
    for number in (0, 1):
        mesh = jax.sharding.Mesh(devices[number], ("shard",))
        layout = jax.sharding.NamedSharding(mesh, jax.P("shard"))
        trees.append({"w": jax.device_put(ROWS + number, layout)})
    return inside(ROWS), half(ROWS), [jax.device_get(t["w"]) for t in dm.federated_mean(trees, state, (3, 1))]


@program
def models():
    import jax.numpy as jnp

    plan = dm.ShardingPlan({"w": dm.P("a", "b"), "b": dm.P()})
    made = dm.init_sharded(
        lambda x: {"w": x[:, None] * jnp.arange(1.0, 5.0, dtype=x.dtype)[None], "b": jnp.zeros(4, x.dtype)},
        plan,
        dm.distribute(ROWS[:, 0], dm.P()),
    )
    return made, plan.apply({"w": ROWS, "b": ROWS[0]})


@program
def loss_of_a_layer():

    def loss(x, w):
        y = dm.ops.all_reduce(x @ w, "b")
        objective, _ = dm.token_mean((y * y).sum(), y.shape[0], "a")
        return dm.ops.all_reduce(objective, "a")

    lifted = dm.shard_map(loss, (dm.P("a", "b"), dm.P("b")), dm.P())
    given = dm.distribute(ROWS, dm.P("a", "b")), dm.distribute(ROWS[:4], dm.P("b"))
    return _gradient(lifted, *given)


def register_states():
    """Register the states of the programs; "grid" is the ambient one."""
    dm.init_parallel_states(
        {
            "grid": dm.TopologySpec({"a": 2, "b": 2}, roles={"loss": ("a", "b")}),
            "sequence": dm.parallel_spec(ulysses_size=4),
            "groups": dm.GroupSpec(
                {"pair": dm.RankGroups([[2, 0], [1, 3]]), "uneven": dm.RankGroups([[3, 1, 0], [2]])}
            ),
            "federation": dm.FederatedSpec((2, 2)),
        },
        default="grid",
    )


def outcomes(names=None):
    """Run programs; return what each gave on the host, or its error as text."""
    import jax

    found = {}
    for name in names or PROGRAMS:
        try:
            # Asked for by name: jax 0.12 takes np.asarray for an implicit transfer.
            found[name] = [np.asarray(jax.device_get(x)) for x in jax.tree.leaves(PROGRAMS[name]())]
        except Exception as error:  # JAX's own kinds too
            found[name] = f"{type(error).__name__}: {error}"
    return found
