"""The sim backend."""
