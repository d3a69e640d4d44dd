"""Reading plain settings: each is known and taken, or a problem; all problems come in one error.

Which settings a project has is in `setting_names`, what they mean for ranks in `importers`.
"""

from collections.abc import Mapping
from typing import Any

from dualmesh._support.plain_data import settings_of
from dualmesh.errors import did_you_mean, listed
from dualmesh.topology.resolve import refuse, whole


class Settings:
    """The settings of one project while they are read; problems are collected."""

    def __init__(self, where: str, settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        self.where = where
        self.problems: list[str] = []
        self._known = known
        self._given = dict(settings_of(where, settings))
        for key in self._given:
            if key not in known:
                hint = did_you_mean(key, known) or f" Known: {listed(sorted(known))}."
                self.problems.append(f"{key!r} is no setting of this project that is known here.{hint}")

    def get(self, key: str) -> Any:
        """Return a setting, or the project's default where it is left out or None."""
        value = self._given.get(key)
        return self._known[key] if value is None else value

    def size(self, key: str, *, inferred: bool = False) -> int:
        """Return a size, given as an integer or as a command line gives it."""
        value = self.get(key)
        number = int(value) if isinstance(value, str) and value.strip().lstrip("-").isdecimal() else whole(value)
        if number is not None and (number >= 1 or (inferred and number == -1)):
            return number
        allowed = "a positive integer, or -1 to infer it" if inferred else "a positive integer"
        self.problems.append(f"{key}={value!r} is no size. It must be {allowed}.")
        return 1

    def refuse(self) -> None:
        """Raise all problems at once."""
        refuse(self.where, self.problems)
