"""The jax backend: one device per rank, one mesh per device order, named axes and `shard_map`."""

from dualmesh_jax import supported as supported  # first: it refuses a JAX that is too old
from dualmesh_jax.backend import JaxBackend

__all__ = ["JaxBackend"]
