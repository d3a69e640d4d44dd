"""The example that a user would copy runs here as it is: two GPTs equal over five topologies, each fault found."""

from dualmesh import testing
from examples.cross_framework_test import FAULTS, TOPOLOGIES
from examples.cross_framework_test import differences as differences
from examples.cross_framework_test import test_a_fault_is_found_where_it_is as test_a_fault_is_found_where_it_is
from examples.cross_framework_test import test_both_programs_train_alike as test_both_programs_train_alike


def test_it_has_five_topologies_and_every_fault_but_one_that_cannot_happen_to_it():
    """That one, of wrappers' reductions, is seen in tests/invariance."""
    from tests.invariance.faults import FAULTS as ELSEWHERE

    assert len(TOPOLOGIES) == 5
    assert set(testing.FAULTS) - set(FAULTS) == {"wrappers_average"}
    assert "wrappers_average" in {fault for fault, _ in ELSEWHERE.values()}
