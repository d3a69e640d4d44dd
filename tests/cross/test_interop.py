"""Arrays from one framework to the other in processes that hold both, against numpy on the global array."""

import itertools

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import assert_same, assert_sharded_as
from tests.joint import joint_world, lone_pool, lone_world

SPLITS = (None, "dp", "tp", ("dp", "tp"), ("tp", "dp"))
FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES = (*FLOATS, "bool", "int8", "uint8", "int32", "complex64")
SHAPES = ((3, 4), (0, 3), ())


def test_rank_r_of_one_world_is_rank_r_of_the_other():
    """Both worlds hold the same ranks; a state is the same topology in both, under the same names."""

    def seen():
        state = dm.init_parallel_state(dp_size=2, tp_size=2, name="policy")
        twin = state.on("jax")
        assert twin.on("torch") is state
        assert state.on("torch") is state
        assert twin.topology == state.topology
        assert dm.get_parallel_state_by_name("policy") is state
        dm.clear_parallel_state()
        return state.backend, twin.backend, state.local_ranks, twin.local_ranks, twin.names, twin.is_live

    assert joint_world(seen) == [("torch", "jax", (rank,), (rank,), ["policy"], False) for rank in range(4)]


def test_first_framework_named_is_the_default():
    """`init_parallel_state` without a backend builds in the first one."""
    assert joint_world(_default_backend, backends=("jax", "torch")) == ["jax"] * 4


def _default_backend():
    return dm.init_parallel_state(dp_size=4).backend


def test_every_split_crosses_block_by_block():
    """A DTensor's block on each rank is that of the array, and comes back as it was, for every spec on 2 x 2."""

    def crossed(data, pairs):
        from dualmesh import interop

        state = dm.init_parallel_state(dp_size=2, tp_size=2)
        (rank,) = state.local_ranks
        for entries in pairs:
            spec = dm.P(*entries)
            there = interop.to_jax(dm.distribute(data, spec))
            block = np.asarray(there.addressable_data(0))
            assert_same(f"{spec}", data[dm.local_slices(spec, data.shape, rank=rank)], block, rtol=0)
            assert state.on("jax").spec_of(there) == state.spec_of(dm.distribute(data, spec))
            back = interop.to_torch(there)
            assert_sharded_as(back, spec, values=data, rtol=0)
            assert back.placements == dm.distribute(data, spec).placements
        return len(pairs)

    used = [
        pair
        for pair in itertools.product(SPLITS, SPLITS)
        if len({axis for entry in pair for axis in dm.P(entry).axes}) == sum(len(dm.P(entry).axes) for entry in pair)
    ]
    data = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    assert joint_world(crossed, data, used) == [len(used)] * 4


def test_every_dtype_crosses_bit_by_bit():
    """Both ways, in every dtype that both have, also without elements and without dims."""

    def crossed(dtypes, shapes):
        import torch

        from dualmesh import interop

        found = []
        for name, shape in itertools.product(dtypes, shapes):
            data = (torch.arange(int(np.prod(shape))).reshape(shape) % 7).to(getattr(torch, name))
            there = interop.to_jax(data)
            back = interop.to_torch(there)
            sent, received = (x.reshape(-1).view(torch.uint8).numpy() for x in (data, back))
            assert_same(f"bytes of {name} {shape}", sent, received)
            found.append((there.dtype.name, there.shape, back.dtype == data.dtype))
        return found

    expected = [(name, shape, True) for name, shape in itertools.product(DTYPES, SHAPES)]
    assert lone_world(crossed, DTYPES, SHAPES) == expected


def test_a_copy_is_a_copy_and_zero_copy_shares_memory():
    """Writing to a copied tensor leaves the other side; without a copy the pointers are equal, both ways."""

    def crossed():
        import jax.numpy as jnp
        import torch

        from dualmesh import interop

        mine = torch.arange(64.0)
        copied, shared = interop.to_jax(mine), interop.to_jax(mine, copy=False)
        theirs = jnp.arange(64.0)
        back, seen = interop.to_torch(theirs), interop.to_torch(theirs, copy=False)
        pointers = (
            shared.unsafe_buffer_pointer() == mine.data_ptr(),
            seen.data_ptr() == theirs.unsafe_buffer_pointer(),
        )
        mine += 1
        back += 1
        return pointers, np.asarray(copied)[1], np.asarray(shared)[1], np.asarray(theirs)[1], back[1].item()

    assert lone_world(crossed) == ((True, True), 1.0, 2.0, 1.0, 2.0)


def test_strided_tensors_cross_with_their_values():
    """Transposed, stepped and expanded views arrive as numpy has them; the JAX array is a copy."""

    def crossed(data):
        import torch

        from dualmesh import interop

        whole = torch.from_numpy(data)
        views = [
            whole.T,
            whole[:, ::2],
            whole[1:, 1:],
            whole.expand(2, *whole.shape),
            torch.view_as_complex(whole.reshape(-1, 2)).conj(),
        ]
        return [np.asarray(interop.to_jax(view)) for view in views]

    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    pairs = data.reshape(-1, 2)
    expected = [data.T, data[:, ::2], data[1:, 1:], np.broadcast_to(data, (2, 4, 6)), pairs[:, 0] - 1j * pairs[:, 1]]
    assert_same("view", expected, lone_world(crossed, data), rtol=0)


def test_nested_containers_keep_their_form():
    """Dicts, lists and tuples come back the same; numbers, strings and None stay."""

    def crossed():
        import torch

        from dualmesh import interop

        tree = {"a": [torch.ones(2), (3, None)], "b": "text"}
        there = interop.to_jax(tree)
        back = interop.to_torch(there)
        return type(there["a"]).__name__, there["a"][1], back["b"], interop.to_jax(there)["a"][0] is there["a"][0]

    assert lone_world(crossed) == ("list", (3, None), "text", True)


REFUSED = {
    "gradient": ("to_jax", lambda torch, jnp: torch.ones(2, requires_grad=True), {}, r"requires a gradient.*call_jax"),
    "int64": ("to_jax", lambda torch, jnp: torch.arange(2), {}, r"int64 as int32.*jax_enable_x64"),
    "float64": ("to_jax", lambda torch, jnp: torch.ones(2).double(), {}, r"float64 as float32"),
    "gaps": ("to_jax", lambda torch, jnp: torch.ones(4, 4)[:, ::2], {"copy": False}, r"strides \(4, 2\).*contiguous"),
    "alignment": ("to_jax", lambda torch, jnp: torch.ones(4, 4)[1:], {"copy": False}, r"without a copy.*aligned"),
    "numpy": ("to_jax", lambda torch, jnp: np.ones(2), {}, r"found a ndarray.*torch arrays"),
    "numpy back": ("to_torch", lambda torch, jnp: {"x": np.ones(2)}, {}, r"found a ndarray.*jax arrays"),
    "flag": ("to_torch", lambda torch, jnp: jnp.ones(2), {"copy": 1}, r"copy is 1\. Give True or False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_cross_is_refused_by_name(case):
    """The message says what was found and what to do."""

    def refused(name, make, settings):
        import jax.numpy as jnp
        import torch

        from dualmesh import interop

        try:
            getattr(interop, name)(make(torch, jnp), **settings)
        except dm.DualmeshError as error:
            return str(error)
        return "nothing"

    name, make, settings, message = REFUSED[case]
    with pytest.raises(AssertionError, match=f"(?s)^{name}: .*{message}"):
        raise AssertionError(lone_world(refused, name, make, settings))


def test_traced_arrays_and_other_meshes_are_refused():
    """A traced array has no values, and a mesh that is not the state's has no spec."""

    def refused():
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from dualmesh import interop

        dm.init_parallel_state(dp_size=2, tp_size=2)
        found = []
        mesh = Mesh(np.array(jax.devices()), ("rows",))
        other = jax.make_array_from_callback((4,), NamedSharding(mesh, PartitionSpec("rows")), lambda cut: np.ones(1))
        for attempt in (lambda: jax.jit(interop.to_torch)(1.0), lambda: interop.to_torch(other)):
            with pytest.raises(dm.DualmeshError) as error:
                attempt()
            found.append(str(error.value))
        return found

    for traced, other in joint_world(refused):
        assert "traced array" in traced
        assert "call_torch" in traced
        assert "is not on the mesh of State 'base'" in other


def test_trees_move_between_states_of_two_frameworks():
    """From torch to JAX and back, to another grid and to some of the ranks only, bit for bit."""

    def moved(data):
        dm.init_parallel_state(spec=dm.TopologySpec({"tp": 4}), name="trainer", backend="torch")
        dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 2}), name="sampler", backend="jax")
        dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2}), ranks=(3, 1), name="judge", backend="jax")
        tree = {"w": dm.distribute(data, dm.P("tp"), state=dm.get_parallel_state_by_name("trainer"))}
        specs = dm.P("tp"), dm.P("dp", "tp"), dm.P(None, "tp")
        there = dm.transfer(tree, src="trainer", dst="sampler", specs=specs[:2])
        back = dm.transfer(there, src="sampler", dst="trainer", specs=(specs[1], specs[0]))
        some = dm.transfer(tree, src="trainer", dst="judge", specs=(specs[0], specs[2]))
        block = np.asarray(some["w"].addressable_data(0)) if some is not None else None
        sampler = dm.get_parallel_state_by_name("sampler")
        read = dm.to_numpy(there["w"], state=sampler), dm.to_numpy(back["w"])
        return type(there["w"]).__module__[:3], *read, block

    data = np.arange(32, dtype=np.float32).reshape(8, 4)
    expected = [None, data[:, 2:], None, data[:, :2]]
    for (framework, there, back, block), own in zip(joint_world(moved, data), expected, strict=True):
        assert framework == "jax"
        wanted = {"there": data, "back": data, "judge's": own}
        assert_same("moved", wanted, {"there": there, "back": back, "judge's": block}, rtol=0)


def test_ranks_in_other_processes_have_no_twin():
    """A JAX process of several ranks and a torch process of one are no twins."""

    def refused():
        with dm.session(backend="torch"), dm.session(backend="jax", world_size=8):
            try:
                dm.init_parallel_state(dp_size=8, backend="jax").on("torch")
            except dm.DualmeshError as error:
                return str(error)
            return "nothing"

    (message,) = lone_pool.run(refused, [()])
    assert "this process holds the ranks 0 of 1 in torch, and 0, 1" in message


STARTS = {
    "twice": ({"backend": ("torch", "torch")}, "Name different backends"),
    "none": ({"backend": ()}, "at least one"),
    "no leader": ({"backend": ("sim",)}, "none of sim can tell"),
    "devices": ({"backend": ("torch", "sim"), "local_devices": 2}, "each process holds one rank"),
    "unknown": ({"backend": ("jacks", "sim")}, "No backend 'jacks'"),
}


@pytest.mark.parametrize("case", STARTS)
def test_worlds_that_cannot_start_together_are_refused(case):
    """Nothing is left running."""
    settings, message = STARTS[case]
    with pytest.raises(dm.DualmeshError, match=message):
        dm.init_distributed(**settings)
