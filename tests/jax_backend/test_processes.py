"""Several processes: every operation on arrays that no process holds alone, against numpy."""

import re

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArrayTypeError, MembershipError, RankError, ShapeError, ShardingError
from dualmesh.testing.contract import agreed, cases, runs
from dualmesh.testing.contract.checks import expected, transposed
from tests.cross.test_federated_mean import DIMS, mean_of, models
from tests.jax_backend.processes import in_processes, processes
from tests.workers import free_port

WHOLE = np.arange(96.0).reshape(8, 12)
LAYOUTS = {3: (2, 1), 4: (2, 2), 8: (2, 2, 2, 2)}


def ranks_of_processes():
    import jax

    with dm.session("jax") as session:
        state = dm.init_parallel_state(dp_size=session.world_size)
        ids = [device.id for device in state.mesh.devices.flat]
        return session.world_size, state.local_ranks, ids == sorted(ids), ids[-1], jax.process_index()


@pytest.mark.parametrize("devices", [(2, 2), (2, 1), (2, 2, 2, 2)])
def test_ranks_are_ordered_by_process_and_position_whatever_the_ids(devices):
    first = 0
    for process, (size, mine, _, last, index) in enumerate(processes(ranks_of_processes, devices=devices)):
        assert (size, index) == (sum(devices), process)
        assert mine == tuple(range(first, first + devices[process]))
        assert last >= 2048, "ids of several processes are not contiguous, so they are no ranks"
        first += devices[process]


def check(wanted, found, *, rtol):
    """Compare every case with its definition, dtype and shape included; a case that failed is its error's text."""
    for case, value in wanted.items():
        assert not isinstance(found[case], str), f"{case}: {found[case]}"
        assert (found[case].dtype, found[case].shape) == (value.dtype, value.shape), str(case)
        np.testing.assert_allclose(found[case], value, rtol=rtol, atol=rtol, err_msg=str(case))


def some_cases(world):
    """Verbs over one axis, two axes against grid order, and all ranks: a sample, since these runs share the machine."""
    axes = ["a", "world", *([("b", "a")] if world != 3 else [])]
    found = [case for case in cases.grid(world) if case.axis in axes and case.memory == "contiguous"]
    return found[:: 2 if world < 8 else 5]


@pytest.mark.parametrize("world", [3, 4, 8])
def test_every_collective_gives_what_its_definition_gives(world):
    some = some_cases(world)
    found = agreed(processes(runs.collectives, world, some, devices=LAYOUTS[world], timeout_s=240))
    check({case: expected(world, case) for case in some}, found, rtol=1e-13)


@pytest.mark.parametrize("world", [3, 4])
def test_every_gradient_is_the_exact_transpose(world):
    some = [case for case in some_cases(world) if case.has_gradient][::4]
    shapes = {case: expected(world, case).shape for case in some}
    found = agreed(processes(runs.gradients, world, some, shapes, devices=LAYOUTS[world], timeout_s=240))
    check({case: transposed(world, case, shapes[case]) for case in some}, found, rtol=1e-12)


def program_text(fn, *args):
    """Return what XLA is given of a function, and of its gradient with respect to all of it."""
    import jax

    def loss(*args):
        return (fn(*args) ** 2).sum()

    every = tuple(range(len(args)))
    return jax.jit(fn).lower(*args).as_text() + jax.jit(jax.grad(loss, every)).lower(*args).as_text()


@in_processes(2, 2)
def test_no_program_scatters_sums_by_gloo_whose_results_are_wrong_now_and_then():
    """https://github.com/jax-ml/jax/issues/40830: the end of index 0's block, from about 1 MiB on."""
    groups = dm.RankGroups([[2, 0], [1, 3]])
    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}), name="grid")
    pairs = dm.init_parallel_state(spec=dm.GroupSpec({"pair": groups}), name="pairs")
    x = np.random.default_rng(0).normal(size=(8, 4))
    for state, axis in (("grid", "a"), ("grid", ("b", "a")), (pairs, "pair")):
        with dm.use_parallel_state(state):
            whole = dm.P("world")
            for dim in (0, 1):
                gathered = dm.shard_map(lambda x, dim=dim, axis=axis: dm.ops.all_gather(x, axis, dim), whole, whole)
                assert "scatter" not in program_text(gathered, x)
            for op in ("sum", "mean"):
                given = np.tile(x, (2, 1))
                scattered = dm.shard_map(
                    lambda x, op=op, axis=axis: dm.ops.reduce_scatter(x, axis, 0, op), whole, whole
                )
                assert "scatter" not in program_text(scattered, given)


@in_processes(1, 1)
def test_large_sums_are_scattered_exactly():
    """With gloo's own reduce-scatter, blocks of 16 MiB came out wrong now and then."""
    width = 1 << 22
    dm.init_parallel_state(dp_size=2)
    whole = (np.arange(4 * width, dtype=np.int32).reshape(2, 2 * width) % 100_003).astype(np.float32)
    x = dm.distribute(whole, dm.P("dp"))
    scattered = dm.shard_map(lambda x: dm.ops.reduce_scatter(x, "dp", 1), dm.P("dp"), dm.P(None, "dp"))
    gathered = dm.shard_map(lambda x: dm.ops.all_gather(x, "dp", 1), dm.P(None, "dp"), dm.P())
    weighted = dm.value_and_grad(lambda w, x: (dm.shard_map(lambda w, x: dm.ops.all_reduce(
        (dm.ops.all_gather(w, "dp", 1) * x).sum(), "dp"), (dm.P(None, "dp"), dm.P("dp")), dm.P())(w, x)))  # fmt: skip
    for _ in range(4):
        y = scattered(x)
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole.sum(0)[None][shard.index])
        _, gradient = weighted(y, x)
        for shard in gradient.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole.sum(0)[None][shard.index])
    for shard in gathered(y).addressable_shards:
        np.testing.assert_array_equal(shard.data, whole.sum(0)[None])


@in_processes(2, 2)
def test_gathering_and_scattering_are_linear_in_every_transformation():
    """Forward mode, second derivatives, vmap and narrow dtypes, where both are written as exchanges."""
    import jax
    import jax.numpy as jnp

    dm.init_parallel_state(dp_size=4)
    rng = np.random.default_rng(1)
    x, dx = rng.normal(size=(2, 8, 5)), rng.normal(size=(2, 8, 5))

    def both(x):
        return dm.ops.reduce_scatter(jnp.sin(dm.ops.all_gather(x, "dp")) * (1 + dm.ops.axis_index("dp")), "dp")

    lifted = dm.shard_map(both, dm.P("dp"), dm.P("dp"))
    rows = jax.vmap(lifted)
    value, tangent = jax.jit(lambda x, dx: jax.jvp(rows, (x,), (dx,)))(x, dx)
    np.testing.assert_allclose(dm.to_numpy(value), 10 * np.sin(x), rtol=1e-12)
    np.testing.assert_allclose(dm.to_numpy(tangent), 10 * np.cos(x) * dx, rtol=1e-12)
    second = jax.jit(jax.grad(lambda x: (jax.grad(lambda x: lifted(x).sum())(x) ** 2).sum()))(x[0])
    np.testing.assert_allclose(dm.to_numpy(second), -200 * np.cos(x[0]) * np.sin(x[0]), rtol=1e-12)
    for dtype in ("int8", "uint16", "bfloat16", "float16", "complex64"):
        small = jnp.arange(16).astype(dtype).reshape(4, 4)
        scattered = dm.shard_map(lambda x: dm.ops.reduce_scatter(x, "dp", 1), dm.P("dp"), dm.P(None, "dp"))(small)
        assert scattered.dtype == dtype
        np.testing.assert_array_equal(
            dm.to_numpy(scattered).astype("complex64"), np.arange(16).reshape(4, 4).sum(0)[None]
        )


@in_processes(2, 2)
def test_arrays_are_laid_out_moved_and_read_back():
    import jax

    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
    for spec in (dm.P("a", "b"), dm.P(("b", "a")), dm.P(None, "b"), dm.P()):
        for given in (WHOLE, WHOLE.astype(np.int64), dm.distribute(WHOLE, dm.P("b"))):
            x = dm.distribute(given, spec)
            assert x.sharding.is_equivalent_to(state.sharding(spec), 2)
            np.testing.assert_array_equal(dm.to_numpy(x), WHOLE)
            for shard in x.addressable_shards:
                rank = state.shared.devices.index(shard.device)
                mine = WHOLE[dm.local_slices(spec, WHOLE.shape, rank)]
                np.testing.assert_array_equal(np.asarray(shard.data), mine)
    moved = dm.constrain(x, dm.P("b", "a"))
    doubled = jax.jit(lambda x: dm.constrain(2 * x, dm.P("a")))(moved)
    assert doubled.sharding.is_equivalent_to(state.sharding(dm.P("a")), 2)
    np.testing.assert_array_equal(dm.to_numpy(doubled), 2 * WHOLE)


@in_processes(2, 2)
def test_lifted_functions_and_gradients_are_those_of_one_process():
    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 2}, roles={"loss": ("dp",)}))
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 6)), rng.normal(size=(6, 4))

    def loss(x, w):
        y = dm.ops.all_reduce(x @ w, "tp")
        objective, _ = dm.token_mean((y**2).sum(), len(y))
        return dm.ops.all_reduce(objective, "dp")

    lifted = dm.shard_map(loss, (dm.P("dp", "tp"), dm.P("tp")), dm.P(), check_replicated=True)
    assert float(lifted(x, w)) == pytest.approx(((x @ w) ** 2).sum() / 8)
    unchecked = dm.shard_map(loss, (dm.P("dp", "tp"), dm.P("tp")), dm.P())
    given = dm.distribute(x, dm.P("dp", "tp")), dm.distribute(w, dm.P("tp"))
    for run in (dm.value_and_grad(unchecked, (0, 1)), jax.jit(jax.value_and_grad(unchecked, (0, 1)))):
        value, gradients = run(*given)
        assert float(value) == pytest.approx(((x @ w) ** 2).sum() / 8)
        for got, wanted, source in zip(gradients, (x @ w @ w.T / 4, x.T @ x @ w / 4), given, strict=True):
            np.testing.assert_allclose(dm.to_numpy(got), wanted, rtol=1e-10)
            assert got.sharding.is_equivalent_to(source.sharding, 2)


@in_processes(2, 2)
def test_a_result_declared_replicated_is_compared_across_processes():
    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
    right = dm.shard_map(lambda x: dm.ops.all_reduce(x, "a"), dm.P("a"), dm.P(), check_replicated=True)
    np.testing.assert_array_equal(dm.to_numpy(right(WHOLE)), WHOLE[:4] + WHOLE[4:])
    wrong = dm.shard_map(lambda x: x, dm.P("a"), dm.P(), check_replicated=True)
    with pytest.raises(ShardingError, match="equal on ranks 0 and 2, but it differs"):
        wrong(WHOLE)


@in_processes(2, 2)
def test_each_process_loads_its_slice_and_ranks_of_one_data_index_the_same():
    import jax

    dm.init_parallel_states(
        {
            "rows": dm.TopologySpec({"dp": 2, "tp": 2}),
            "columns": dm.TopologySpec({"tp": 2, "dp": 2}),
            "all": dm.TopologySpec({"dp": 4}),
        }
    )
    process = jax.process_index()
    expected = {
        "rows": slice(4 * process, 4 * process + 4),
        "columns": slice(0, 8),
        "all": slice(4 * process, 4 * process + 4),
    }
    for name, rows in expected.items():
        with dm.use_parallel_state(name):
            mine = dm.local_slices(dm.P("dp"), WHOLE.shape)
            assert mine == (rows, slice(0, 12))
            made = dm.shard_local(WHOLE[mine], dm.P("dp"), check=True)
            np.testing.assert_array_equal(dm.to_numpy(made), WHOLE)
    with dm.use_parallel_state("columns"):
        with pytest.raises(ShardingError, match=r"ranks 0 and 2 both hold the slice \[\(0, 4\), \(0, 12\)\]"):
            dm.shard_local(WHOLE + process, dm.P("dp"), check=True)
        with pytest.raises(ShapeError, match=r"block of shape \(7, 12\): dim 0 has size 7.*2 blocks"):
            dm.shard_local(WHOLE[:7], dm.P("dp"))


@in_processes(2, 1)
def test_processes_of_two_ranks_and_of_one_build_one_array():
    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 3}))
    whole = np.arange(9 * 2.0).reshape(9, 2)
    mine = dm.local_slices(dm.P("dp"), whole.shape)
    assert mine[0] == (slice(0, 6), slice(6, 9))[jax.process_index()]
    made = dm.shard_local(whole[mine], dm.P("dp"), check=True)
    np.testing.assert_array_equal(dm.to_numpy(made), whole)
    dm.host.barrier()
    assert dm.host.all_gather(jax.process_index()) == [0, 0, 1]


@in_processes(2, 2)
def test_objects_travel_between_processes_in_index_order():
    import jax

    process = jax.process_index()
    states = {"rows": dm.TopologySpec({"dp": 2, "tp": 2}), "columns": dm.TopologySpec({"tp": 2, "dp": 2})}
    dm.init_parallel_states(states, default="rows")
    big = {"process": process, "bytes": bytes([process]) * 3_000_000}
    for _ in range(4):
        assert dm.host.all_gather(big, "dp")[1] == {"process": 1, "bytes": bytes([1]) * 3_000_000}
        assert [found["process"] for found in dm.host.all_gather(big)] == [0, 0, 1, 1]
        assert dm.host.broadcast(process, "dp", src=1) == 1
        assert dm.host.broadcast(process, "world", src=1) == 0
        assert dm.host.all_gather(process, "tp") == [process, process]
        dm.host.barrier()
    spec = dm.GroupSpec({"pair": dm.RankGroups([[0, 2], [3, 1]])})
    crossed = dm.init_parallel_state(spec=spec, name="crossed")
    with pytest.raises(
        RankError, match=r"ranks \d, \d of this process lie in groups of different processes \(0, 1; 1, 0\)"
    ):
        dm.host.all_gather(process, "pair", state=crossed)


def refusal_of(call):
    """Return what kind of error a call raises, and its text."""
    try:
        found = call()
    except dm.DualmeshError as error:
        return type(error).__name__, str(error)
    return "returned", repr(found)


def handed_between(source, target):
    """Return how this process' reshard and transfer between states over some ranks ended."""
    import jax

    a = dm.init_parallel_state(spec=dm.TopologySpec({"dp": len(source)}), ranks=source, name="a")
    b = dm.init_parallel_state(spec=dm.TopologySpec({"tp": len(target)}), ranks=target, name="b")
    whole = np.arange(24.0).reshape(12, 2)
    x = dm.distribute(whole, dm.P("dp"), state=a) if a.is_member else None
    ends, tree = {"src": ("a", dm.P("dp")), "dst": ("b", dm.P("tp"))}, None if x is None else {"w": x}
    calls = (
        lambda: dm.reshard(x, **ends),
        lambda: dm.transfer(tree, src="a", dst="b", specs=(dm.P("dp"), dm.P("tp"))),
    )
    return jax.process_index(), a.is_member or b.is_member, [refusal_of(call) for call in calls]


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ((0, 1), (2, 3), r"State 'a' over .* \(of process 0\) and State 'b' over .* \(of process 1\)"),
        ((0, 1), (0, 1, 2, 3), r"State 'a' over .* \(of process 0\) and State 'b' over .* \(of processes 0, 1\)"),
        ((0, 1, 2, 3), (2, 3), r"\(of processes 0, 1\) and State 'b' over .* \(of process 1\)"),
        ((0, 1, 2), (1, 2, 3), r"\(of processes 0, 1\) and State 'b' over .* \(of processes 0, 1\)"),
        ((0, 2), (1, 3), r"\(of processes 0, 1\) and State 'b' over .* \(of processes 0, 1\)"),
    ],
)
def test_states_over_different_devices_of_several_processes_are_refused_alike_in_each(source, target, said):
    """Whichever ends a process is in: one that raised alone would leave the others waiting, or with None."""
    for place, is_member, outcomes in processes(handed_between, source, target, devices=(2, 2, 2, 2)):
        for where, (kind, text) in zip(("reshard", "transfer"), outcomes, strict=True):
            if not is_member:
                assert (kind, text) == ("returned", "None"), place
                continue
            assert kind == "ShardingError", text
            assert text.startswith(f"{where}: State 'a' over")
            assert re.search(said, text), text
            assert "dm.transfer_link" in text


@in_processes(2, 2)
def test_a_process_moves_arrays_between_its_own_devices_and_all_move_them_between_orders():
    """What JAX can move is moved: within a process, and over the same devices in another order and grid."""
    import jax

    whole, first = np.arange(24.0).reshape(12, 2), 2 * jax.process_index()
    for process in (0, 1):
        ranks = ((2 * process,), (2 * process + 1,))
        one = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 1}), ranks=ranks[0], name=f"one_{process}")
        two = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 1}), ranks=ranks[1], name=f"two_{process}")
        if first == ranks[0][0]:
            x = dm.distribute(whole, dm.P("dp"), state=one)
            moved = dm.transfer([x], src=one, dst=two, specs=(dm.P("dp"), dm.P("tp")))[0]
            assert moved.sharding.device_set == set(two.shared.devices)
            np.testing.assert_array_equal(dm.to_numpy(moved, state=two), whole)
    a = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 4}), name="a")
    b = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2, "sp": 2}), ranks=(3, 1, 0, 2), name="b")
    x = dm.distribute(whole, dm.P("dp"), state=a)
    moved = dm.transfer({"w": x}, src=a, dst=b, specs=(dm.P("dp"), dm.P("sp", "tp")))["w"]
    np.testing.assert_array_equal(dm.to_numpy(moved, state=b), whole)
    with pytest.raises(ArrayTypeError, match="transfer: found None for an array of State 'a', of which this process"):
        dm.transfer(None, src=a, dst=b, specs=(dm.P("dp"), dm.P("sp", "tp")))
    with pytest.raises(ArrayTypeError, match="reshard: found None"):
        dm.reshard(None, src=(a, dm.P("dp")), dst=(b, dm.P("sp", "tp")))


@in_processes(2, 2)
def test_plain_numbers_are_reduced_outside_shard_map_for_metrics():
    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 2}))
    seconds = 1.5 + jax.process_index()
    assert dm.ops.all_reduce(seconds, "dp") == 4.0
    assert dm.ops.all_reduce(seconds, "dp", "mean") == 2.0
    assert dm.ops.all_reduce(np.float32(seconds), "dp", "max") == 2.5
    assert dm.ops.all_reduce(jax.process_index() + 1, "world", "min") == 1
    assert dm.ops.all_reduce(jax.process_index() + 1, "world") == 6, "each rank counts, not each process"
    assert dm.ops.broadcast(seconds, "dp", src=1) == 2.5


@in_processes(2, 2)
def test_states_over_the_ranks_of_one_process_each_work_side_by_side():
    import jax

    process = jax.process_index()
    left = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2}), ranks=(1, 0), name="left")
    right = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2}), ranks=(2, 3), name="right")
    mine, other = (left, right) if process == 0 else (right, left)
    with dm.use_parallel_state(mine):
        total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "tp"), dm.P("tp"), dm.P())
        np.testing.assert_array_equal(dm.to_numpy(total(WHOLE + process)), WHOLE[:4] + WHOLE[4:] + 2 * process)
        assert dm.host.all_gather(process, "tp") == [process, process]
    with pytest.raises(MembershipError, match="no member of State"):
        dm.distribute(WHOLE, dm.P("tp"), state=other)


@in_processes(2, 2)
def test_states_can_be_cleared_and_made_anew():
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
    for size in (4, 2, 4):
        first = dm.init_parallel_state(dp_size=size, tp_size=4 // size)
        assert dm.to_numpy(lifted(np.ones(4))).tolist() == [size] * (4 // size)
        assert dm.host.all_gather(size) == [size] * 4
        dm.clear_parallel_state()
        with pytest.raises(dm.StaleStateError):
            first.mesh  # noqa: B018


def found_nodes(*variables):
    """Return what `dm.nodes()` finds under what each process' launcher said, or its error."""
    import os

    import jax

    saved = dict(os.environ)
    os.environ.update(variables[jax.process_index()])
    try:
        return dm.nodes().groups.groups
    except dm.DualmeshError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(saved)


def launched(local_rank, local_size, node, count):
    said = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size, "GROUP_RANK": node, "GROUP_WORLD_SIZE": count}
    return {name: str(value) for name, value in said.items()}


@in_processes(2, 1)
def test_nodes_hold_all_ranks_of_their_processes():
    cases = [
        (({}, {}), ((0, 1, 2),)),
        (({"NCCL_HOSTID": "a"}, {"NCCL_HOSTID": "b"}), ((0, 1), (2,))),
        ((launched(0, 2, 0, 1), launched(1, 2, 0, 1)), ((0, 1, 2),)),
        ((launched(0, 1, 1, 2), launched(0, 1, 0, 2)), ((2,), (0, 1))),
    ]
    for variables, groups in cases:
        assert found_nodes(*variables) == groups
    state = dm.init_parallel_state(spec=dm.nodes().group_spec(), name="nodes")
    assert state.ranks("intra_node", 2) == (0, 1, 2)
    wrong = found_nodes({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, {})
    assert wrong.startswith("LaunchError: dm.nodes, ranks 0: for rank 0")
    contradicting = found_nodes(launched(0, 2, 0, 1), launched(0, 2, 0, 1))
    assert contradicting.startswith("LaunchError")


def federated_means(sizes, hsdp):
    """Check the means of arrays over each federation's devices, shard by shard, in processes that hold some of them."""
    import jax

    state = dm.init_parallel_state(spec=dm.FederatedSpec(sizes, hsdp), name="federation")
    topology, devices = state.spec.federation, np.array(state.shared.devices)
    numbers = sorted({topology.federated_rank(rank) for rank in state.local_ranks})
    parts, trees = models(sizes), []
    for number in numbers:
        rows = np.array(topology.mesh(topology.communicating(number)[0]))
        mesh = jax.sharding.Mesh(devices[rows], ("replica", "shard"))

        def laid_out(name, value, mesh=mesh):
            dim = DIMS.get(name)
            spec = jax.P() if dim is None else jax.P(*[None] * dim, "shard")
            layout = jax.sharding.NamedSharding(mesh, spec)
            return jax.make_array_from_callback(value.shape, layout, lambda at: value[at])

        trees.append({name: laid_out(name, value) for name, value in parts[number].items() if name != "odd"})
    given = trees[0] if len(trees) == 1 else trees
    for weights in (None, (3, 1, 2)[: len(sizes)]):
        wanted = mean_of(parts, weights)
        means = dm.federated_mean(given, state, weights)
        for before, after in zip(jax.tree.leaves(given), jax.tree.leaves(means), strict=True):
            assert before.sharding == after.sharding
        for mean in [means] if len(trees) == 1 else means:
            for name, x in mean.items():
                for shard in x.addressable_shards:
                    np.testing.assert_allclose(shard.data, wanted[name][shard.index], rtol=1e-5, atol=1e-6)
    blocks = np.arange(1.0, state.world_size + 1)
    mean = dm.shard_map(lambda x: dm.federated_mean(x, state), dm.P("world"), dm.P("world"))
    senders = [topology.communicating(number)[0] for number in range(len(sizes))]
    assert dm.to_numpy(mean(dm.distribute(blocks, dm.P("world"))))[0] == pytest.approx(blocks[senders].mean())
    uneven = {**trees[0], "more": trees[0]["whole"]} if jax.process_index() else trees[0]
    with pytest.raises(dm.DualmeshError, match=r"federated_mean: the process of rank \d+ gave|Give a list of"):
        dm.federated_mean(uneven if len(trees) == 1 else [uneven, *trees[1:]], state)


@pytest.mark.parametrize(
    ("devices", "sizes", "hsdp"),
    [
        ((2, 2), (2, 2), None),
        ((2, 1), (1, 2), 1),
        ((2, 2, 2, 2), (4, 4), None),
        ((2, 2, 2, 2), (4, 4), 2),
        ((2, 2, 2, 2), (2, 4, 2), None),
        ((2, 2, 2, 2), (2, 4, 2), 2),
    ],
)
def test_federated_means_of_several_processes_are_numpys(devices, sizes, hsdp):
    processes(federated_means, sizes, hsdp, devices=devices)


def linked(whole, store):
    """Send a tree between states on disjoint processes through their hosts; return what arrived, if here."""
    import jax

    process = jax.process_index()
    a = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2}), ranks=(0, 1), name="a")
    b = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2}), ranks=(3, 2), name="b")
    state, role, spec = (a, "source", dm.P("dp")) if process == 0 else (b, "target", dm.P(None, "tp"))
    with dm.transfer_link("weights", role=role, state=state, specs=spec, store=store) as link:
        if process == 0:
            link.send({"w": dm.distribute(whole, spec, state=a)}, version=1)
            return None
        tree = {"w": dm.distribute(np.zeros_like(whole), spec, state=b)}
        link.receive(into=tree)
        return dm.to_numpy(tree["w"], state=b)


def test_a_link_carries_trees_between_states_on_disjoint_processes_of_one_world():
    """The way that the refusal of dm.transfer there names."""
    found = processes(linked, WHOLE, f"tcp://127.0.0.1:{free_port()}", devices=(2, 2))
    assert found[0] is None
    np.testing.assert_array_equal(found[1], WHOLE)
