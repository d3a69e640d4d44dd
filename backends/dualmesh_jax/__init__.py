"""The jax backend."""
