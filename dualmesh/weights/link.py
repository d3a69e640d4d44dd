"""Links between two worlds: a source's trees of arrays arrive in a target's layout, whatever frameworks the two are in.

Processes meet in `connect`; who sends what is planned in `plan`, by both sides alike. Long, as both
halves of one conversation are here.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from dualmesh._support.waits import check_timeout
from dualmesh.backend.host_blocks import HostLeaf
from dualmesh.backend.state import ParallelState
from dualmesh.errors import (
    AgreementError,
    ArgumentError,
    DualmeshError,
    ShardingError,
    listed,
)
from dualmesh.sharding.param_paths import leaves_by_path
from dualmesh.sharding.partition_spec import P
from dualmesh.topology.resolve import positive
from dualmesh.topology.spec import TopologySpec
from dualmesh.weights.endpoints import End, Fused, check_names, end_of, from_data, to_data
from dualmesh.weights.executor import HostBlocks, carry, message_bytes
from dualmesh.weights.group import TransferGroup
from dualmesh.weights.handle import TransferHandle
from dualmesh.weights.plan import TransferPlan, plan_transfer
from dualmesh.weights.wire import Peer, PeerWire, Visits, connect_to
from dualmesh.weights.write_back import put_all

SIDES = ("source", "target")


class LinkSettings(NamedTuple):
    """How a link behaves."""

    timeout_s: float
    renames: Mapping[str, str]
    """{path in the target: path in the source}."""
    buffer_bytes: int
    checksum: bool


class TransferLink:
    """One side of a link, in one process; made by `dualmesh.transfer_link`.

    Attributes:
        role: "source" or "target".
        generation: Which making of the link this is; after a peer restarted, make it again on both sides.
    """

    def __init__(
        self, group: TransferGroup, role: str, state: ParallelState, specs: Any, settings: LinkSettings
    ) -> None:
        self.group, self.role, self.state = group, role, state
        self.generation = group.generation
        self._specs, self._settings = specs, settings
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        self._seen: set[str] = set()
        """The arrays that trees of this link have held, fused ones apart."""

    # -- what it does ----------------------------------------------------------------------------------------------

    def send(self, tree: Any, *, version: int) -> int:
        """Send a tree to the target. *Collective over the source's processes, and the target's `receive`.*

        Args:
            tree: Nested containers of the state's arrays; any part of a model.
            version: A number that the target gets with it, for example the step.

        Raises:
            StaleStateError: A peer left or restarted.
            GroupTimeoutError: The target does not receive in time.
            AgreementError: The target refused, or ranks of the source gave different trees.
        """
        found: int = self.sending(tree, version=version).start().wait()
        return found

    def receive(self, *, into: Any, timeout_s: float | None = None) -> int:
        """Receive a tree into one's own, and return its version. *Collective over the target's processes.*

        Args:
            into: Nested dicts and lists of the state's arrays, at least those that are sent. torch tensors are written
                to; other frameworks' arrays are replaced in their dict or list.
            timeout_s: How long to wait for the source to begin, in seconds; None: as for the link.
        """
        found: int = self.receiving(into=into, timeout_s=timeout_s).start().wait()
        return found

    def sending(self, tree: Any, *, version: int) -> TransferHandle:
        """Return `send` to be started and waited for: `start` copies this process' blocks to the host. *Local.*"""
        self._check("send", "source")
        number = positive("TransferLink.send", "version", version, least=0)

        def begin() -> Callable[[], int]:
            leaves = {path: self._host_leaf(path, x) for path, x in leaves_by_path("TransferLink.send", tree).items()}
            if not leaves:
                raise ArgumentError("TransferLink.send: the tree has no arrays. Give at least one.", tree=tree)
            return lambda: self._send(leaves, number)

        return TransferHandle(begin, lambda found: found)

    def receiving(self, *, into: Any, timeout_s: float | None = None) -> TransferHandle:
        """Return `receive` as something to start and to wait for: `wait` writes what came. *Local.*"""
        self._check("receive", "target")
        limit = self._settings.timeout_s if timeout_s is None else check_timeout("TransferLink.receive", timeout_s)
        wanted = leaves_by_path("TransferLink.receive", into)

        def finish(found: tuple[int, dict[str, HostLeaf]]) -> int:
            version, leaves = found
            arrays = self.state.arrays
            put_all(
                into,
                {
                    path: arrays.from_host(path, wanted[path], leaf, self._plain(path, leaf.shape))
                    for path, leaf in leaves.items()
                },
            )
            return version

        return TransferHandle(lambda: lambda: self._receive(wanted, limit), finish)

    def close(self) -> None:
        """Leave. *Local*; idempotent."""
        for peer in self._peers.values():
            peer.close()
        self.group.close()

    def __enter__(self) -> "TransferLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TransferLink {self.group.name!r}, {self.role}, generation {self.generation}>"

    # -- meeting ---------------------------------------------------------------------------------------------------

    def connect(self, visits: Visits, timeout_s: float) -> None:
        """Connect every process of the source with every one of the target. *Collective*; called once."""
        told, settings = self.group.told, self._settings
        sides = {side: [rank for rank, one in enumerate(told) if one["side"] == side] for side in SIDES}
        others = sides[SIDES[1 - SIDES.index(self.role)]]
        names = {rank: f"process {others.index(rank)} of the {told[rank]['side']}" for rank in others}
        generation = f"{self.group.name}/{self.group.life}/{self.generation}"
        if self.role == "target":
            self._peers = visits.await_peers(names, generation, timeout_s)
        else:
            greeting = {"generation": generation, "place": self.group.rank}
            for rank in others:
                address = self.group.hosts[rank], told[rank]["port"]
                self._peers[rank] = connect_to(address, names[rank], self.group.secret, greeting, settings.timeout_s)
        for peer in self._peers.values():
            peer.timeout_s = settings.timeout_s
        self._tops = {side: told[ranks[0]]["topology"] for side, ranks in sides.items()}
        count = self._tops["source"]["size"]
        shift = 0 if self.role == "target" else count
        self._peer_of = {place + shift: self._peers[rank] for rank in others for place in told[rank]["places"]}
        self._own = {
            place + (count - shift): rank
            for place, rank in zip(told[self.group.rank]["places"], self.state.local_ranks, strict=True)
        }

    # -- moving ----------------------------------------------------------------------------------------------------

    def _send(self, leaves: Mapping[str, HostLeaf], version: int) -> int:
        with self._lock:
            arrays = {path: [list(leaf.shape), leaf.itemsize, leaf.dtype] for path, leaf in leaves.items()}
            specs = to_data({path: self._spec(path, leaf.shape) for path, leaf in leaves.items()})
            header = {"arrays": arrays, "specs": specs, "listed": sorted(self._end().known_names())}
            digest = hashlib.sha256(json.dumps(header).encode()).hexdigest()
            for peer in self._peers.values():
                peer.say(version=version, digest=digest, header=header)
            answers = {peer.name: peer.hear() for peer in self._peers.values()}
            refused = {name: one["refused"] for name, one in answers.items() if "refused" in one}
            try:
                first = next(iter(answers.values()))
                plan = None if refused else self._plan(header, first["specs"], first["renames"])
            except DualmeshError:
                self._tell_all(go=False)
                raise
            self._tell_all(go=plan is not None)
            if plan is None:
                name, text = next(iter(refused.items()))
                raise AgreementError(f"TransferLink.send: {name} refused version {version}: {text}", refused=refused)
            given = {at: {path: leaf.blocks[rank] for path, leaf in leaves.items()} for at, rank in self._own.items()}
            self._carry(plan, HostBlocks(given, {}))
            for peer in self._peers.values():
                answer = peer.hear()
                if "wrong" in answer:
                    raise AgreementError(f"TransferLink.send: {peer.name}: {answer['wrong']}")
            return version

    def _receive(self, wanted: Mapping[str, Any], timeout_s: float) -> tuple[int, dict[str, HostLeaf]]:
        with self._lock:
            said = {peer.name: peer.hear(timeout_s) for peer in self._peers.values()}
            try:
                plan, version = self._agreed(said), next(iter(said.values()))["version"]
                room = self._room(plan, wanted)
            except DualmeshError as error:
                self._tell_all(refused=f"{type(error).__name__}: {error}")
                for peer in self._peers.values():
                    peer.hear()
                raise
            self._tell_all(specs=to_data(plan.target.specs), renames=dict(plan.target.renames))
            if not all([peer.hear()["go"] for peer in self._peers.values()]):
                raise AgreementError(
                    f"TransferLink.receive: version {version} was called off, as a process of one side refused it. Its "
                    f"own error says why.",
                    version=version,
                )
            try:
                self._carry(plan, HostBlocks({}, room))
            except DualmeshError as error:
                self._tell_all(wrong=f"{type(error).__name__}: {error}")
                raise
            self._tell_all(done=version)
            self._seen |= {name for name, _ in _sent_names(said[next(iter(said))]["header"])}
            found, shapes = {}, _whole_shapes(plan)
            for path, (_, array) in plan.target_blocks().items():
                blocks = {rank: room[at][path] for at, rank in self._own.items()}
                found[path] = HostLeaf(shapes[path], array.itemsize, array.dtype, blocks)
            return version, found

    def _carry(self, plan: TransferPlan, blocks: HostBlocks) -> None:
        bound, checks = self._settings.buffer_bytes, self._settings.checksum
        carry(plan, self._own, PeerWire(self._peer_of), blocks, buffer_bytes=bound, checksum=checks)

    def _agreed(self, said: Mapping[str, Mapping[str, Any]]) -> TransferPlan:
        """Return the plan of what all processes of the source announce."""
        names = list(said)
        first = said[names[0]]
        for name in names[1:]:
            if (said[name]["digest"], said[name]["version"]) != (first["digest"], first["version"]):
                raise AgreementError(
                    f"TransferLink: {names[0]} announced {_version_of(first)}, {name} {_version_of(said[name])}, which "
                    f"differ. Send the same version of the same tree in all processes of the source.",
                )
        header = first["header"]
        specs, renames = self._taken(header)
        return self._plan(header, to_data(specs), renames)

    def _plan(self, header: Mapping[str, Any], target: Any, renames: Mapping[str, str]) -> TransferPlan:
        key = json.dumps([header, target, dict(renames)])
        if key not in self._known:
            count = self._tops["source"]["size"]
            ends = []
            for side, specs, first in (("source", header["specs"], 0), ("target", target, count)):
                top = self._tops[side]
                topology = TopologySpec.from_dict(top["spec"]).resolve(top["size"])
                ends.append((topology, from_data(specs), range(first, first + top["size"])))
            arrays = {path: (tuple(shape), size, dtype) for path, (shape, size, dtype) in header["arrays"].items()}
            bound = message_bytes(self._settings.buffer_bytes)
            self._known = {key: plan_transfer(arrays, src=ends[0], dst=ends[1], message_bytes=bound, renames=renames)}
        plan: TransferPlan = self._known[key]
        return plan

    def _taken(self, header: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return this side's specs and renames of what is sent: later trees may be parts of the first one.

        Raises:
            ShardingError: One is of what the source's specs do not list, and no tree of this link has held.
        """
        end, sent = self._end(), dict(_sent_names(header))
        known = {*sent, *self._seen, *header["listed"]}
        check_names("TransferLink.receive", known, end, " Or let the first tree that is sent hold it.")
        fused = {
            path: one
            for path, one in end.fused().items()
            if any(end.renames.get(name, name) in sent for name in one.names(path))
        }
        inside = {end.renames.get(name, name) for path, one in fused.items() for name in one.names(path)}
        plain: dict[str, Any] = {}
        for name, shape in sent.items():
            for path in end.paths_of(name, is_fused=name in inside):
                plain[path] = end.spec_of(path, shape)
        return {**plain, **fused}, {new: old for new, old in end.renames.items() if old in sent}

    def _room(self, plan: TransferPlan, wanted: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return empty blocks for what will come, after comparing with what is there to take it."""
        blocks = plan.target_blocks()
        missing = [path for path in blocks if path not in wanted]
        if missing:
            raise ShardingError(
                f"TransferLink.receive: into has no {listed(missing)}. It has: {listed(wanted)}. Give a place for all "
                f"that is sent; renames={{path here: path in the source}} says which is which.",
                paths=tuple(missing),
            )
        wholes = _whole_shapes(plan)
        for path, (shape, array) in blocks.items():
            # A global array has the whole shape, a rank's plain block its own.
            size = tuple(wanted[path].shape)
            if size not in (tuple(wholes[path]), tuple(shape)):
                raise ShardingError(
                    f"TransferLink.receive: {path!r} has shape {size} here, and {tuple(wholes[path])} in the source, "
                    f"of which a rank here holds {tuple(shape)}. Give a place of one of these shapes.",
                    path=path,
                    shape=size,
                )
            here = self.state.arrays.host_dtype(wanted[path])
            if here != array.dtype:
                raise ShardingError(
                    f"TransferLink.receive: {path!r} is {here} here, and {array.dtype} in the source. Convert one.",
                    path=path,
                )
        return {
            at: {path: HostLeaf.room(shape, array.itemsize) for path, (shape, array) in blocks.items()}
            for at in self._own
        }

    # -- this side -------------------------------------------------------------------------------------------------

    def _check(self, what: str, role: str) -> None:
        if self.role != role:
            raise ArgumentError(f"TransferLink.{what}: this side is the {self.role}; only the {role} can {what}.")
        self.state.require_ready(f"TransferLink.{what}")
        self.group.require_live(f"TransferLink.{what}")

    def _spec(self, path: str, shape: tuple[int, ...]) -> Any:
        return self._end().spec_of(path, shape)

    def _end(self) -> End:
        return end_of("transfer_link", self.role, (self.state, self._specs), self._settings.renames)

    def _plain(self, path: str, shape: tuple[int, ...]) -> P:
        spec = self._spec(path, shape)
        return spec.spec if isinstance(spec, Fused) else P.of(spec)

    def _host_leaf(self, path: str, x: Any) -> HostLeaf:
        return self.state.arrays.to_host(path, x, self._plain(path, tuple(getattr(x, "shape", ()))))

    def _tell_all(self, **said: Any) -> None:
        for peer in self._peers.values():
            peer.say(**said)


def _sent_names(header: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the arrays that are sent, fused ones apart, each with the shape of what it is sent in."""
    for path, (shape, _, _) in header["arrays"].items():
        spec = from_data(header["specs"])[path]
        for name in spec.names(path) if isinstance(spec, Fused) else (path,):
            yield name, tuple(shape)


def _version_of(said: Mapping[str, Any]) -> str:
    return f"version {said['version']} of {listed(said['header']['arrays'])}"


def _whole_shapes(plan: TransferPlan) -> dict[str, tuple[int, ...]]:
    """Return {path in the target: global shape}; a fused array's parts follow one another. *Pure.*"""
    found: dict[str, tuple[int, ...]] = {}
    for array, _, taken in plan.pairs:
        before = found.setdefault(taken.path, (0,) * len(array.shape) if taken.dim >= 0 else array.shape)
        if taken.dim >= 0:
            size = before[taken.dim] + array.shape[taken.dim]
            found[taken.path] = (*array.shape[: taken.dim], size, *array.shape[taken.dim + 1 :])
    return found
