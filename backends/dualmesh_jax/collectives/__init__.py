"""Collectives of per-rank blocks inside `shard_map`, on `jax.lax`."""
