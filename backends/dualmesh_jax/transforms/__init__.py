"""Functions of global arrays: per-rank functions lifted, gradients, recomputation."""
