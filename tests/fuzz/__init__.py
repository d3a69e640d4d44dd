"""Random wrong input: nothing but an error of dualmesh's that shows the value, or an accepted value.

`python -m tests.fuzz` tries 20,000 inputs.
"""
