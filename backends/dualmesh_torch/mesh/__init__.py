"""Process groups and device meshes: shared by states, cut from roots, ended when no member needs them."""
