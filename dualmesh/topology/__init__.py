"""Integer algebra: which axes exist, how large, which rank stands where."""
