"""The contract of a backend as a suite: every collective, gradient and layout against numpy, in a place of one's own.

For those who ship a backend; dualmesh's own backends are held to the same checks. Longer than a test's own code: the
cases are in `cases`, what they mean in `oracle`, what workers run in `runs` and `laid_out`.
"""

from dualmesh.testing.contract.checks import (
    WORLDS,
    agreed,
    check_arrays,
    check_bits,
    check_collectives,
    check_dtypes,
    check_gradients,
)

__all__ = [
    "WORLDS",
    "agreed",
    "check_arrays",
    "check_bits",
    "check_collectives",
    "check_dtypes",
    "check_gradients",
]
