"""Functions of global arrays: per-rank functions lifted, gradients taken and summed."""
