"""A part of the fuzzer in every run; all of it by `python -m tests.fuzz`."""

import pytest

import dualmesh as dm
from tests.fuzz.run import fuzzed
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_errors_of_dualmesh_that_show_the_value(name):
    """Some inputs, the same in every run."""
    assert fuzzed(name, 20, derandomize=True) >= 20


def test_ten_thousand_axes_are_resolved_or_refused_by_name():
    """A spec as wide as this is slow, never wrong."""
    axes = {f"axis {number} é": 1 for number in range(10_000)} | {"dp": -1}
    topology = dm.TopologySpec(axes).resolve(8)
    assert topology.size("dp") == 8
    assert topology.size("axis 9999 é") == 1
    with pytest.raises(dm.DualmeshError, match="axis 77 é"):
        dm.TopologySpec(axes | {"axis 77 é": 0}).resolve(8)
