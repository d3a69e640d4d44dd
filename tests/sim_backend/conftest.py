"""Every test here leaves pytest's process as it found it."""

from tests.leftovers import nothing_is_left_behind as nothing_is_left_behind
