"""Global arrays on a state's mesh: laid out, read back, constrained."""
