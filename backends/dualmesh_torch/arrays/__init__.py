"""Global arrays as DTensors: laid out, read back, handed from one layout to another."""
