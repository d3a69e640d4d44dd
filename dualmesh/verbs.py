"""What a backend carries out on arrays: the five abstract classes behind every public array function.

Arguments arrive here checked and normalised (`ops`, `arrays`, `shard_map`, `host` do that); starting worlds and
building states is in `backend`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dualmesh.errors import BackendError
from dualmesh.host_leaf import HostLeaf
from dualmesh.lazy import np
from dualmesh.partition_spec import P
from dualmesh.pending import Finished, Pending
from dualmesh.topology import Axis

if TYPE_CHECKING:
    from dualmesh.federated_averaging import AveragingPlan
    from dualmesh.state import ParallelState
    from dualmesh.transferring import TransferJob

Kind = Literal["bool", "integer", "float", "complex"]


class Collectives(ABC):
    """Per-rank blocks in, per-rank blocks out; differentiable, each with the gradient of `op_table`.

    `reduce` and `place_block`, which the table also names, are for backends that write their backward by hand.

    Dims are non-negative, sizes divide, axes exist and have size > 1 (`permute`, `shift`, `take_block` and
    `axis_index` also come with size 1). Inputs may be non-contiguous. The result never shares memory with the input.
    """

    @abstractmethod
    def admit(self, where: str, x: Any, axis: Axis) -> Kind:
        """Refuse an array or a place in which `where` cannot run; return the kind of the array's dtype.

        Raises:
            ArrayTypeError: `x` is no array of this backend.
            OutsideShardMapError: No rank is defined here.
            StaleStateError: The state's session has ended.
        """

    @abstractmethod
    def all_reduce(self, x: Any, axis: Axis, *, op: str) -> Any:
        """Reduce elementwise over the axis; shape stays. `op` is sum, mean, max or min."""

    @abstractmethod
    def all_gather(self, x: Any, axis: Axis, *, dim: int) -> Any:
        """Concatenate the blocks along `dim` in index order; `dim` grows by the size of the axis."""

    @abstractmethod
    def reduce_scatter(self, x: Any, axis: Axis, *, dim: int, op: str) -> Any:
        """Reduce, then keep block `index` of `dim`. `op` is sum or mean."""

    @abstractmethod
    def all_to_all(self, x: Any, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
        """Send block j of `split_dim` to index j, concatenate what arrives along `concat_dim` by sender index."""

    @abstractmethod
    def broadcast(self, x: Any, axis: Axis, *, src: int) -> Any:
        """Return the bits of index `src`'s block everywhere."""

    @abstractmethod
    def permute(self, x: Any, axis: Axis, *, pairs: tuple[tuple[int, int], ...]) -> Any:
        """Send each pair's src block to its dst; indices that no pair names as dst get zeros."""

    def shift(self, x: Any, axis: Axis, *, offset: int, wrap: bool, size: int) -> Any:
        """Send each block `offset` indices on, around the end where `wrap`; `size` is the axis'. Here by `permute`."""
        targets = [(src, (src + offset) % size if wrap else src + offset) for src in range(size)]
        return self.permute(x, axis, pairs=tuple((src, dst) for src, dst in targets if 0 <= dst < size))

    @abstractmethod
    def ragged_all_to_all(
        self, x: Any, axis: Axis, *, send_counts: Any, recv_counts: Any, rows: int, sent_rows: int
    ) -> Any:
        """Send runs of rows of `x` to the indices in order; return what arrives by sender, then zeros up to `rows`.

        Counts are tuples of ints, one per index, or traced integers; `sent_rows` is `x.shape[0]`. Also for size 1.
        """

    @abstractmethod
    def enter(self, x: Any, axis: Axis) -> Any:
        """Return `x`; its gradient is summed over the axis. The only result that may share memory with its input."""

    @abstractmethod
    def leave(self, x: Any, axis: Axis) -> Any:
        """Return the sum over the axis; its gradient passes as it is."""

    @abstractmethod
    def take_block(self, x: Any, axis: Axis, *, dim: int) -> Any:
        """Return block `index` of `dim`; communicates nothing."""

    @abstractmethod
    def axis_index(self, axis: Axis) -> Any:
        """Return this rank's index along the axis, an int or a traced integer."""

    @abstractmethod
    def stop_gradient(self, x: Any) -> Any:
        """Return `x` cut off from the gradient."""

    def known_number(self, x: Any) -> float | None:
        """Return the value of a scalar array where looking at it waits for nothing, else None: traced, on a device."""
        return None

    def started(self, verb: str, x: Any, axis: Axis, **settings: Any) -> Pending:
        """Start all_reduce, all_gather, reduce_scatter or all_to_all, with the settings of that method.

        Here it runs to its end; backends that can do other work meanwhile say how.
        """
        return Finished(getattr(self, verb)(x, axis, **settings))


class Arrays(ABC):
    """Global arrays laid over the ranks of a state."""

    @abstractmethod
    def distribute(self, array: Any, spec: P) -> Any:
        """Return a sharded array from a global host array that every process holds; communicates nothing."""

    @abstractmethod
    def to_numpy(self, x: Any) -> Any:
        """Return the global value as a numpy array on every process. Collective over the state."""

    @abstractmethod
    def shard_local(self, block: Any, spec: P) -> Any:
        """Return a sharded array from what this process holds; communicates nothing.

        `block` is this rank's block, or for a process with several ranks the smallest slice of the global array
        that covers all of its ranks' blocks.
        """

    @abstractmethod
    def constrain(self, x: Any, spec: P) -> Any:
        """Return the same global value with the sharding `spec`. Collective over the state."""

    def grown(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Return a global host array with zeros at the end of its dims, up to `shape`; here a numpy array."""
        whole = np.asarray(array)
        found = np.zeros(shape, whole.dtype)
        found[tuple(slice(size) for size in whole.shape)] = whole
        return found

    def checked(self, array: Any) -> Any:
        """Return a host array as what `handed_out` takes.

        Raises:
            ArrayTypeError: `distribute` would refuse it.
        """
        return array

    def handed_out(self, array: Any, spec: P, src: int) -> Any:
        """Return what `distribute` makes of the array of index `src` of "world"; collective over the state.

        The array comes from `checked`, and `spec` divides it; others' is not looked at.

        Raises:
            BackendError: This backend runs in one process only, which holds every array.
        """
        raise BackendError(f"distribute: {type(self).__qualname__} does not offer src=. Give the array everywhere.")

    @abstractmethod
    def reshard(self, x: Any, spec: P, source: "ParallelState", source_spec: P) -> Any:
        """Return the global value that lies in `source` as `source_spec` says laid out here; see `dualmesh.reshard`.

        The states are of one backend and live; this process is a member of one of them at least.
        """

    def to_host(self, path: str, x: Any, spec: P) -> HostLeaf:
        """Return copies of this process' blocks of an array in host memory, laid out as the spec says.

        Collective over the state where the array lies otherwise.

        Raises:
            BackendError: This backend has no such thing.
        """
        raise BackendError(f"transfer_link: {type(self).__qualname__} copies no arrays to the host.", path=path)

    def host_dtype(self, x: Any) -> str:
        """Return the name of an array's dtype, as numpy and ml_dtypes call it. Local."""
        return str(x.dtype)

    def from_host(self, path: str, x: Any, leaf: HostLeaf, spec: P) -> Any:
        """Return the array of some blocks: `x` itself where that can be written to. Local.

        Raises:
            BackendError: This backend has no such thing.
        """
        raise BackendError(f"transfer_link: {type(self).__qualname__} takes no arrays from the host.", path=path)

    def transfer(self, tree: Any, job: "TransferJob") -> Any:
        """Return a tree that lies in the job's source laid out here; see `dualmesh.transfer`. Here array by array."""
        return job.array_by_array(tree, self.reshard)


class Programs(ABC):
    """Functions of global arrays."""

    @abstractmethod
    def shard_map(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        axes: tuple[str, ...] | None,
        check_replicated: bool,
    ) -> Callable[..., Any]:
        """Return `fn` lifted from per-rank blocks to global arrays; see `dualmesh.shard_map`."""

    @abstractmethod
    def value_and_grad(self, fn: Callable[..., Any], argnums: tuple[int, ...]) -> Callable[..., tuple[Any, Any]]:
        """Return a function that gives (value, tuple of gradients by argnums) of a global scalar."""

    @abstractmethod
    def remat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn` whose forward is recomputed in backward, under the scope that its forward had."""

    @abstractmethod
    def sum_gradients(self, model: Any) -> None:
        """Make every gradient reduction that wrappers in `model` do a plain sum over the ranks that must be summed.

        Backends of frameworks with wrappers also take `axis`, `unwrapped` and `blocks` of `dualmesh.sum_gradients`,
        by name.
        """

    @abstractmethod
    def sync_gradients(self, params: Any, axis: Axis) -> Any:
        """Sum the gradients of replicated parameters over the axis; return them."""

    @abstractmethod
    def global_norm(self, tree: Any, order: float, axis: Axis | None) -> Any:
        """Return the norm of all global arrays in a tree together, a scalar; `order` is above 0 or inf.

        Blocks, which differ along `axis` only, count as global arrays that are split over it.
        """

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        order: float,
        blocks: Mapping[Axis, Any],
        error_if_nonfinite: bool,
    ) -> Any:
        """Scale gradients in place; return their norm before. For frameworks whose parameters hold gradients.

        Raises:
            BackendError: The framework's gradients are values.
        """
        raise BackendError(
            "clip_grad_norm_: the gradients of this backend are values, which nothing changes in place. Multiply them "
            "by min(1, max_norm / (dm.global_norm(gradients) + 1e-6))."
        )

    def federated_mean(self, tree: Any, plan: "AveragingPlan") -> Any:
        """Carry out a plan of federated averaging for the state's ranks; see `dualmesh.federated_mean`."""
        raise BackendError(f"federated_mean: {type(self).__qualname__} does not offer it. Use torch, jax or sim.")


class Models(ABC):
    """Whole models: trees of arrays, or modules, laid out array by array. Specs come checked, in the model's order."""

    @abstractmethod
    def parameters(self, model: Any) -> "list[tuple[str, Any]]":
        """Return (path, array) of everything in a model that gets a spec. A path is keys joined by dots."""

    @abstractmethod
    def filled(self, model: Any, values: Sequence[Any]) -> Any:
        """Return a tree like the model with a value in place of every array; of a module, {path: value}."""

    @abstractmethod
    def abstract(self, model: Any, specs: Sequence[P]) -> Any:
        """Return such a tree of what has the shapes, dtypes and shardings of the arrays, and no memory."""

    @abstractmethod
    def apply(self, model: Any, specs: Sequence[P], units: Mapping[str, tuple[str, ...] | None]) -> Any:
        """Return the model laid out over the ranks.

        `units` are patterns of modules that a wrapper gathers as one, each with the axes that the wrapper splits over,
        or None for the usual ones.
        """

    @abstractmethod
    def init(self, fn: Callable[..., Any], specs_of: Callable[[Any], Sequence[P]], args: Sequence[Any]) -> Any:
        """Return `fn(*args)` laid out as `specs_of(model)` says, with no process holding all of it where it can be."""


class HostObjects(ABC):
    """Plain Python objects between processes."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every process of the state is here. Collective over the state."""

    @abstractmethod
    def broadcast(self, value: Any, axis: Axis, *, src: int) -> Any:
        """Return the object of index `src`. Collective over the axis."""

    @abstractmethod
    def all_gather(self, value: Any, axis: Axis) -> list[Any]:
        """Return the objects of all indices, in index order. Collective over the axis."""
