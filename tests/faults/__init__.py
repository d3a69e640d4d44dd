"""Faults that ranks can make together, each made in real processes: what happens, after how long, who is told what.

`python -m tests.faults` makes all of them and writes the table in docs/faults.md.
"""
