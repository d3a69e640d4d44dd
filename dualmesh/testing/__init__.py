"""What proves that two frameworks, or two topologies, compute the same thing.

This face re-exports; each name is documented where it lives.
"""

from dualmesh.testing import transforms as transforms
from dualmesh.testing.comparison import compare_places
from dualmesh.testing.differences import Difference, assert_same, difference
from dualmesh.testing.faults import FAULTS
from dualmesh.testing.injection import inject
from dualmesh.testing.instruments import Held, Instruments
from dualmesh.testing.noise import counter_noise
from dualmesh.testing.param_map import ParamMap
from dualmesh.testing.places import PLACES, Place, jax_place, place_of, run_on
from dualmesh.testing.pools import Pool
from dualmesh.testing.ports import Trained, compare_ports
from dualmesh.testing.recorder import record, replay
from dualmesh.testing.recordings import Recording, compare_recordings, load
from dualmesh.testing.sharded import assert_sharded_as
from dualmesh.testing.taps import tap
from dualmesh.testing.topologies import absl_cases, splits

__all__ = [
    "FAULTS",
    "PLACES",
    "Difference",
    "Held",
    "Instruments",
    "ParamMap",
    "Place",
    "Pool",
    "Recording",
    "Trained",
    "absl_cases",
    "assert_same",
    "assert_sharded_as",
    "compare_places",
    "compare_ports",
    "compare_recordings",
    "counter_noise",
    "difference",
    "inject",
    "jax_place",
    "load",
    "place_of",
    "record",
    "replay",
    "run_on",
    "splits",
    "tap",
    "transforms",
]
