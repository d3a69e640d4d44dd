"""Other projects' topologies: their names, their sizes, their configuration.

Their settings, as they write them, are read in `importers`.
"""

from dualmesh.presets.specs import accelerate, megatron, megatron_rank_groups, nemo_rl, torchtitan

__all__ = ["accelerate", "megatron", "megatron_rank_groups", "nemo_rl", "torchtitan"]
