"""Whole models: laid out by a plan, wrapped by FSDP2, initialized where they will lie."""
