"""The sim backend: numpy, every rank of the world simulated in one process. It is the reference for values."""

from dualmesh_sim.arrays import SimArray
from dualmesh_sim.backend import SimBackend

__all__ = ["SimArray", "SimBackend"]
