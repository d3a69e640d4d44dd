"""Global arrays over the ranks of a state, as a backend lays them out and reads them back.

Arguments arrive checked (the package `arrays` does that); whole models are in `models`.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.backend.host_blocks import HostLeaf
from dualmesh.errors import BackendError
from dualmesh.sharding.partition_spec import P

if TYPE_CHECKING:
    from dualmesh.backend.state import ParallelState


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

    def transfer(self, tree: Any, job: Any) -> Any:
        """Return a tree that lies in the job's source laid out here; see `dualmesh.transfer`. Here array by array.

        `job` is a `TransferJob` of `weights.transfer`: source, target, what each holds, and how it is to be moved.
        """
        return job.array_by_array(tree, self.reshard)
