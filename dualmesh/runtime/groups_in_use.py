"""`groups_in_use`: the communicators that dualmesh holds in this process, and for whom.

Which groups a rank needs is planned in `communicators`; making and ending them is in the backends.
"""

from dualmesh.backend import discovery
from dualmesh.backend.group_options import GroupInUse


def groups_in_use() -> tuple[GroupInUse, ...]:
    """Return the process groups that dualmesh holds in this process, sorted. *Local.*

    Each list of ranks has one group per lane, shared by all states; it ends with the last state that uses it. JAX and
    sim have no groups.

    >>> import dualmesh as dm
    >>> with dm.session(backend="sim", world_size=2):
    ...     base = dm.init_parallel_state(dp_size=2)
    ...     dm.groups_in_use()
    ()
    """
    return tuple(sorted(group for backend in discovery.loaded().values() for group in backend.groups_in_use()))
