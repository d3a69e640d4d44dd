"""What the contract suite of `dualmesh.testing` has, under the names that tests use."""

from dualmesh.testing.contract.cases import DTYPES as DTYPES
from dualmesh.testing.contract.cases import Case as Case
from dualmesh.testing.contract.cases import axes_of as axes_of
from dualmesh.testing.contract.cases import case as case
from dualmesh.testing.contract.cases import cotangent as cotangent
from dualmesh.testing.contract.cases import dtypes as dtypes
from dualmesh.testing.contract.cases import grid as grid
