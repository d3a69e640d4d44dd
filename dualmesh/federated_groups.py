"""`FederatedGroups`: a federation as the spec of a named state, its partitions as axes.

What a user declares is in `federation`; who is together is planned in `federated_topology`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dualmesh.group_topology import GroupSpec
from dualmesh.rank_groups import RankGroups

if TYPE_CHECKING:
    from dualmesh.federated_topology import FederatedTopology


@dataclass(frozen=True, init=False, repr=False)
class FederatedGroups(GroupSpec):
    """Rank groups that are the partitions of a federation: axes "federated", "replica", "shard" and "federation".

    Attributes:
        federation: Who holds what, and who speaks to whom.
    """

    federation: "FederatedTopology"

    def __init__(self, federation: "FederatedTopology", axes: Mapping[str, RankGroups]) -> None:
        super().__init__(axes)
        object.__setattr__(self, "federation", federation)

    def to_dict(self) -> dict[str, Any]:
        """Return the federation as plain data, which `FederatedSpec.from_dict` reads. *Pure.*"""
        return self.federation.spec.to_dict()

    def __repr__(self) -> str:
        return repr(self.federation.spec)
