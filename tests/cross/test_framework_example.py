"""The example that a user would copy runs here as it is: two GPTs equal over five topologies, each fault found."""

from examples.cross_framework_test import FAULTS, TOPOLOGIES
from examples.cross_framework_test import recording as recording
from examples.cross_framework_test import test_a_fault_is_found_where_it_is as test_a_fault_is_found_where_it_is
from examples.cross_framework_test import test_both_programs_train_alike as test_both_programs_train_alike


def test_it_has_five_topologies_and_faults_of_values_and_of_gradients():
    assert len(TOPOLOGIES) == 5
    assert {"gradient" in first for _, _, first in FAULTS} == {True, False}
