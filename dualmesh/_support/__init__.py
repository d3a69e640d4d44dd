"""What knows nothing of meshes: argument checks, warnings, optional imports, plain data."""
