"""`FederatedGroups`: a federation as the spec of a named state, its partitions as axes.

What a user declares is in `federation`; who is together is planned in `federated_topology`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dualmesh._support.plain_data import stands_as
from dualmesh.errors import SpecError
from dualmesh.topology.group_topology import GroupSpec
from dualmesh.topology.rank_groups import RankGroups

if TYPE_CHECKING:
    from dualmesh.topology.federated_topology import FederatedTopology


@dataclass(frozen=True, init=False, repr=False)
class FederatedGroups(GroupSpec):
    """Rank groups that are the partitions of a federation: axes "federated", "replica", "shard" and "federation".

    Attributes:
        federation: Who holds what, and who speaks to whom.
    """

    federation: "FederatedTopology" = stands_as("federation")  # noqa: RUF009 (it returns a field)

    def __init__(self, federation: "FederatedTopology", axes: Mapping[str, RankGroups]) -> None:
        super().__init__(axes)
        object.__setattr__(self, "federation", federation)

    def to_dict(self) -> dict[str, Any]:
        """Return the federation as plain data, which `FederatedSpec.from_dict` reads. *Pure.*"""
        return self.federation.spec.to_dict()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NoReturn:
        """Refuse: a federation is read by `FederatedSpec.from_dict`, and becomes groups in a world."""
        raise SpecError("FederatedGroups.from_dict: read dm.FederatedSpec.from_dict(data), and resolve it for a world.")

    def __repr__(self) -> str:
        return repr(self.federation.spec)
