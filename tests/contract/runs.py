"""What the contract suite of `dualmesh.testing` has, under the names that tests use."""

from dualmesh.testing.contract.runs import applied as applied
from dualmesh.testing.contract.runs import collectives as collectives
from dualmesh.testing.contract.runs import gradients as gradients
from dualmesh.testing.contract.runs import opened as opened
from dualmesh.testing.contract.runs import special_values as special_values
