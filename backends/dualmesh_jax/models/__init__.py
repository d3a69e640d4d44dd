"""Whole models: any registered tree, and modules that run in one state."""
