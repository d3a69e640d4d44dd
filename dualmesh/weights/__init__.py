"""Weights from one set of ranks to another, also across worlds."""
