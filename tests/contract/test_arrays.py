"""Arrays laid over ranks, on every backend, against slices of the global numpy array."""

import numpy as np
import pytest

from dualmesh import P
from tests.contract import laid_out, oracle
from tests.contract.backends import BACKENDS, agreed, run

SPECS = {
    1: [P(), P("a"), P("world", "b")],
    2: [P(), P("a"), P(None, "a"), P("b", "a")],
    4: [P(), P("a"), P("b", "a"), P("a", "b"), P(("a", "b")), P(("b", "a")), P(None, ("b", "a")), P("world")],
    6: [P("a"), P(("b", "a")), P("b", "a"), P(None, ("a", "b"))],
    8: [
        *(P("a", "b", "c"), P("c", "b", "a"), P(("a", "c"), "b"), P(("c", "a"), None, "b"), P(("b", "a"), "c")),
        *(P(("c", "b", "a")), P("ca", "b"), P("bc", "a"), P(None, "world"), P(None, "bc"), P("b"), P("ca")),
        *(P("wide", "narrow"), P(("narrow", "wide")), P("narrow", None, "wide"), P("narrow")),
    ],
}


@pytest.mark.parametrize("world", SPECS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_come_back_as_they_went_and_each_rank_holds_its_slice(backend, world):
    whole = np.arange(24.0 * 24 * 12).reshape(24, 24, 12)
    found = agreed(run(backend, laid_out.round_trips, world, whole, SPECS[world], world_size=world))
    for spec, got in zip(SPECS[world], found, strict=True):
        entries = (*spec.entries, None, None, None)[:3]
        wanted = np.stack([oracle.block_of(world, entries, whole, rank) for rank in range(world)])
        assert [key for key in ("distribute", "shard_local", "constrain") if not np.array_equal(whole, got[key])] == []
        assert [np.array_equal(wanted, there) for there in got["there"]] == [True, True, True], spec
        assert np.array_equal(wanted, np.stack([whole[cut] for cut in got["slices"]])), spec


@pytest.mark.parametrize(
    ("size", "settings", "offset"),
    [(2, {"ranks": (0, 1)}, 0), (2, {"ranks": (3, 1)}, 0), (3, {"ranks": (2, 0, 3)}, 0), (2, {}, 2), (3, {}, 1)],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_some_ranks_holds_its_blocks_in_the_listed_order(backend, size, settings, offset):
    whole = np.arange(12.0)
    found = run(backend, laid_out.subset, size, settings, offset, whole, world_size=4)
    values = [value for is_member, value in found if is_member]
    assert len(values) == (size if backend == "torch" else 1)
    for value in values:
        assert np.array_equal(np.tile(whole, size), value)
