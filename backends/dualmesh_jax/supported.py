"""Which versions of JAX this backend works with. Imported before all else: an older one lacks what the rest imports.

What differs between the versions that work is in `private`.
"""

import jax

from dualmesh._support.versions import refuse_older

LEAST = "0.10.2"
"""0.10.0 and 0.10.1 have no `set_global` of a user context and no `PartitionSpec.partitions`."""
NEWEST = "0.12.0.1"
"""The newest one that the tests ran with: see docs/versions.md."""

refuse_older("jax", jax.__version__, LEAST)
