"""Every test here leaves pytest's process as it found it: frameworks live in the workers alone."""

from tests.leftovers import nothing_is_left_behind as nothing_is_left_behind
