"""One mesh per device order, and which mesh is around the code that runs."""
