"""`transfer_link`: the processes of two worlds meet and connect.

What passes between them then is in `link`; where they meet is in `store`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dualmesh._support import waits
from dualmesh._support.channel import route_to
from dualmesh._support.checks import is_one_of
from dualmesh._support.waits import check_timeout
from dualmesh.backend.carrier import NoCarrier
from dualmesh.backend.state import ParallelState
from dualmesh.errors import AgreementError, ArgumentError, did_you_mean, listed
from dualmesh.runtime.registry import registry
from dualmesh.topology.resolve import positive
from dualmesh.weights.endpoints import end_of, renames_of
from dualmesh.weights.executor import BUFFER_BYTES
from dualmesh.weights.group import MemberPlace, TransferGroup, check_name, join_group
from dualmesh.weights.key import find_key
from dualmesh.weights.link import SIDES, LinkSettings, TransferLink
from dualmesh.weights.store import address_of
from dualmesh.weights.wire import Visits


class LinkGroup(TransferGroup):
    """The processes of both sides of a link."""

    made_by = "dm.transfer_link"


def transfer_link(
    name: str,
    *,
    role: str,
    state: ParallelState | str,
    specs: Any,
    store: str,
    timeout_s: float | None = None,
    renames: Mapping[str, str] | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    checksum: bool = False,
    key: str | bytes | None = None,
) -> TransferLink:
    """Link a state of this world with one of another, of the same framework or not. *Collective over both worlds.*

    Every process of both states calls it. Blocks travel by TCP between the processes' host memories, each byte once to
    every rank that lacks it. When a side restarts, both call it again.

    Args:
        name: The link's name, the same on both sides.
        role: "source" or "target".
        state: This side's state, or its name.
        specs: How arrays lie in it: as in `dm.transfer`.
        store: "tcp://host:port": where the first process of the source serves, or a `dm.TransferStore` does.
        timeout_s: How long to wait for the other side, in seconds; None: as for states.
        renames: On the target: {path here: path in the source}.
        buffer_bytes: Memory that messages may use in a process, beside the copies of its blocks; the smaller of the
            two sides counts.
        checksum: Whether the target compares what arrives with what was sent; both sides say the same.
        key: The secret that all processes of both sides know; None: DUALMESH_TRANSFER_KEY, or that of this user on this
            machine. Who does not know it is refused.

    Raises:
        ArgumentError: The role or the address is none; or renames on the source.
        AgreementError: Sides said different settings.
        GroupTimeoutError: Processes did not come in time; the message names them.
    """
    where = "transfer_link"
    if not is_one_of(role, SIDES):
        raise ArgumentError(f"{where}: role={role!r}. Allowed: {listed(SIDES)}.{did_you_mean(role, SIDES)}", role=role)
    check_name(where, name)
    found = registry.get(state) if isinstance(state, str) else state
    if not isinstance(found, ParallelState):
        raise ArgumentError(f"{where}: state={state!r}. Give a state or its name.", state=state)
    found.require_ready(where)
    end_of(where, role, (found, specs))
    names = renames_of(where, renames)
    if names and role == "source":
        raise ArgumentError(
            f"{where}: renames={names!r} on the source, which sends under its own names. Give them on the target: "
            f"{{path there: path in the source}}.",
            renames=renames,
        )
    limit = waits.timeout_s() if timeout_s is None else check_timeout(where, timeout_s)
    address, bound = address_of(where, store), positive(where, "buffer_bytes", buffer_bytes)
    own = found.host.all_gather(found.local_ranks[0], "world")
    speakers = sorted(set(own))
    seat = MemberPlace(role, speakers.index(found.local_ranks[0]), len(speakers), SIDES)
    members = list(found.members)
    said: dict[str, Any] = {
        "side": role,
        "places": [members.index(rank) for rank in found.local_ranks],
        "topology": {"spec": found.topology.spec.to_dict(), "size": found.world_size},
        "settings": [bound, bool(checksum)],
    }
    with Visits(route_to(*address), find_key(where, key)) as visits:
        said["port"] = visits.port
        group = join_group(LinkGroup(name, seat, address, NoCarrier(found.backend), key), said, limit)
        try:
            settings = LinkSettings(limit, names, *_same_settings(name, group.told))
            link = TransferLink(group, role, found, specs, settings)
            link.connect(visits, limit)
        except BaseException:
            group.close()
            raise
    return link


def _same_settings(name: str, told: Iterable[Mapping[str, Any]]) -> tuple[int, bool]:
    every = [one["settings"] for one in told]
    checks = {one[1] for one in every}
    if len(checks) > 1:
        raise AgreementError(
            f"transfer_link {name!r}: checksum is True on one side and False on another. Say the same."
        )
    return min(one[0] for one in every), checks.pop()
