"""Weights from one set of ranks to another: messages, and groups beside each world's own."""
