"""Collectives of per-rank tensors: eager, traced and under way, on one record of each operation."""
