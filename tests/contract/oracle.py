"""What the contract suite of `dualmesh.testing` has, under the names that tests use."""

from dualmesh.testing.contract.oracle import COMBINED as COMBINED
from dualmesh.testing.contract.oracle import TOPOLOGIES as TOPOLOGIES
from dualmesh.testing.contract.oracle import VIEWS as VIEWS
from dualmesh.testing.contract.oracle import backward as backward
from dualmesh.testing.contract.oracle import block_of as block_of
from dualmesh.testing.contract.oracle import everywhere as everywhere
from dualmesh.testing.contract.oracle import forward as forward
from dualmesh.testing.contract.oracle import groups as groups
from dualmesh.testing.contract.oracle import members as members
