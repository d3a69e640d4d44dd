"""States, global arrays and functions of them. A global array is a numpy array; a spec only says how to cut it."""

import numpy as np

from dualmesh.backend import (
    Arrays,
    HostObjects,
    P,
    ParallelState,
    PlainModels,
    Programs,
    check_axes,
    dim_layouts,
    global_shape,
    leaves,
    mapped,
    slices_of,
    spec_tree,
)
from dualmesh.errors import NotDifferentiableError, ShapeError, ShardingError
from dualmesh_toy.blocks import ToyCollectives
from dualmesh_toy.threads import Crew, here


class ToyState(ParallelState):
    """A topology whose ranks are threads."""

    backend = "toy"

    def __init__(self, plan, world):
        super().__init__(plan, world)
        self.collectives = ToyCollectives(self)
        self.arrays = ToyArrays(self)
        self.programs = ToyPrograms(self)
        self.models = PlainModels(self)
        self.host = ToyHost(self)
        self.group = self._group_for

    @property
    def held_ranks(self):
        return super().held_ranks if here.get() is None else (here.get()[1],)

    @property
    def mesh(self):
        return self.topology.partition("world")

    @property
    def fsdp_mesh(self):
        return self.topology.partition(self.topology.role("params"))

    def submesh(self, *axes):
        return self.topology.partition(axes)

    def axes(self, axis):
        names = (axis,) if isinstance(axis, str) else axis
        return tuple(name for name in names if self.size(name) > 1)

    def pspec(self, *entries, partial=()):
        spec = P(*entries, partial=partial)
        check_axes(self.topology, spec)
        return spec

    def sharding(self, spec):
        return self.pspec(*spec.entries, partial=spec.partial)

    def _group_for(self, axis):
        self.require_ready("group")
        return self.ranks(axis)

    def cut(self, whole, spec, rank):
        """Return the block of a rank, a copy."""
        return whole[slices_of(self.topology, spec, whole.shape, self.grid_rank(rank))].copy()

    def everyone(self):
        """Return the session ranks of the state."""
        return [self.session_rank(rank) for rank in self.topology.partition("world")[0].tolist()]


class ToyArrays(Arrays):
    def __init__(self, state):
        self._state = state

    def distribute(self, array, spec):
        array = np.array(array)
        dim_layouts(self._state.topology, spec, array.shape)
        if spec.partial:
            raise ShardingError(f"toy: {spec!r} is partial, which an array cannot be.")
        return array

    def to_numpy(self, x):
        return np.array(x)

    def shard_local(self, block, spec):
        return self.distribute(block, spec)

    def constrain(self, x, spec):
        return self.distribute(x, spec)

    def reshard(self, x, spec, source, source_spec):
        return self.distribute(source.arrays.distribute(x, source_spec), spec)


class ToyPrograms(Programs):
    def __init__(self, state):
        self._state = state

    def shard_map(self, fn, in_specs, out_specs, axes, check_replicated):
        for spec in (*leaves(in_specs), *leaves(out_specs)):
            check_axes(self._state.topology, P.of(spec), what="shard_map")

        def program(*args):
            state = self._state
            args = mapped(np.asarray, args)
            specs = spec_tree(in_specs, args, what="in_specs")
            mapped(lambda x, spec: dim_layouts(state.topology, spec, x.shape), args, specs)
            ranks = state.everyone()
            run = Crew(ranks).run(lambda rank: fn(*mapped(lambda x, spec: state.cut(x, spec, rank), args, specs)))
            results = [mapped(np.asarray, result) for result in run]
            specs = spec_tree(out_specs, results[0], what="out_specs")
            return mapped(lambda spec, *blocks: self._joined(spec, blocks, ranks, check_replicated), specs, *results)

        return program

    def _joined(self, spec, blocks, ranks, check_replicated):
        state = self._state
        if len({(block.shape, block.dtype) for block in blocks}) > 1:
            raise ShapeError(f"toy: ranks returned {[block.shape for block in blocks]}. Shapes must be equal.")
        shape = global_shape(state.topology, spec, blocks[0].shape)
        dim_layouts(state.topology, spec, shape)
        whole = np.zeros(shape, blocks[0].dtype)
        written = {}
        for rank, block in zip(ranks, blocks, strict=True):
            cut = slices_of(state.topology, spec, shape, state.grid_rank(rank))
            index = state.index(spec.partial, rank) if spec.partial else 0
            key = (str(cut), index)
            if key not in written:
                first = all(place != key[0] for place, _ in written)
                whole[cut] = block if first else whole[cut] + block
                written[key] = block
            elif check_replicated and block.tobytes() != written[key].tobytes():
                raise ShardingError(f"toy: rank {rank} returned another block than {spec!r} declares equal.")
        return whole

    def value_and_grad(self, fn, argnums):
        raise NotDifferentiableError("value_and_grad: the toy backend has no autodiff.")

    def remat(self, fn):
        return fn

    def sum_gradients(self, model):
        pass

    def sync_gradients(self, params, axis):
        return mapped(lambda x: self._state.collectives.all_reduce(x, axis, op="sum"), params)

    def global_norm(self, tree, order, axis):
        return np.linalg.norm(np.concatenate([np.ravel(x) for x in leaves(tree)]), order)


class ToyHost(HostObjects):
    def __init__(self, state):
        self._state = state

    def barrier(self):
        self.all_gather(None, "world")

    def broadcast(self, value, axis, *, src):
        return self.all_gather(value, axis)[src]

    def all_gather(self, value, axis):
        if here.get() is None:
            return [value] * self._state.size(axis)
        crew, rank = here.get()
        return crew.swap(rank, self._state.ranks(axis), "host", value)
