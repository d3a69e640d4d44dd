"""Averaging between groups of ranks."""
