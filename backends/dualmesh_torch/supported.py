"""Which versions of torch this backend works with. Imported before all else: an older one lacks what the rest imports.

What differs between the versions that work is in `private`.
"""

import torch

from dualmesh._support.versions import refuse_older

LEAST = "2.11"
"""Older ones were not tried: groups by their members alone, and FSDP2's reductions, look different in them."""
NEWEST = "2.14.1"
"""The newest one that the tests ran with: see docs/versions.md."""

refuse_older("torch", torch.__version__, LEAST)
