"""The compact text of a spec: `pp2 dp4 tp2 | expert(dp tp): ep_fsdp2 ep4 | dp_tp = dp tp | @data = dp | +8`.

Reading gives the plain data that `TopologySpec.from_dict` takes, writing starts from it; what it means is in `spec`.

Sections are separated by `|`, the first has the base axes, outermost first. Sizes follow the name (`tp2`), after a `*`
where the name ends with a digit (`stage1*2`); a `*` alone is a size to infer (`dp*`). Then, in any order:

- `NAME(OVER): AXES` a view; without `(OVER)` it is over the innermost base axes whose sizes multiply to its own; its
  roles follow, `@ROLE = AXES`;
- `NAME = AXES` a combined axis, `@ROLE = AXES` a role, both first = slowest;
- `+N` the rank offset.

Names with other characters are quoted: `"my axis"*2`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dualmesh._support.plain_data import write_pairs
from dualmesh.errors import SpecError, listed

_TOKEN = re.compile(r'\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<mark>[|=:()*@+])|(?P<word>[^\s|=:()*@+"]+))')
_PLAIN_NAME = re.compile(r'[^\s|=:()*@+"]+')
_SIZED = re.compile(r"(?P<name>.*?\D)(?P<size>[0-9]+)", re.DOTALL | re.ASCII)
_INFER = -1
_KEYS = ("axes", "combined", "views", "roles", "rank_offset")
_VIEW_KEYS = ("over", "axes", "roles")
_ORDERED = ("axes", "combined", "views")


def write_spec(data: Mapping[str, Any]) -> str:
    """Write the compact text of a spec's plain data. *Pure.*

    Raises:
        SpecError: A size is neither positive nor -1, or a name is no text.

    >>> write_spec({"axes": [["dp", -1], ["stage1", 2]], "combined": [["all", ["dp", "stage1"]]]})
    'dp* stage1*2 | all = dp stage1'
    """
    _refuse_others("a spec", data, _KEYS)
    axes = dict(data["axes"])
    sections = [_sizes_text(axes)]
    for name, view in data.get("views", []):
        _refuse_others(f"view {name!r}", view, _VIEW_KEYS)
        over, sizes = list(view["over"]), dict(view["axes"])
        implied = over == _find_implied(axes, sizes)
        roles = "".join(f" {_role(part, members)}" for part, members in view.get("roles", {}).items())
        sections.append(f"{_name(name)}{'' if implied else f'({_names(over)})'}: {_sizes_text(sizes)}{roles}")
    sections += [f"{_name(name)} = {_names(members)}" for name, members in data.get("combined", [])]
    sections += [_role(name, members) for name, members in data.get("roles", {}).items()]
    offset = data.get("rank_offset", 0)
    if type(offset) is not int or offset < 0:
        raise SpecError(f"Notation: rank_offset={offset!r} must be an integer of at least 0.", rank_offset=offset)
    sections += [f"+{offset}"] if offset else []
    return " | ".join(section.rstrip() for section in sections)


def read_spec(text: str) -> dict[str, Any]:
    """Read the compact text of a spec; return its plain data. *Pure.*

    Raises:
        SpecError: The text does not follow the notation; the message shows where.

    >>> read_spec("dp4 tp2 | expert: ep_fsdp2 ep4")["views"]
    [['expert', {'over': ['dp', 'tp'], 'axes': [['ep_fsdp', 2], ['ep', 4]]}]]
    """
    if not isinstance(text, str):
        raise SpecError(f"Notation: {text!r} is no text. Write for example 'dp4 tp2'.", text=text)
    sections = _sections(text)
    data: dict[str, Any] = {"axes": _Reader(text, sections[0]).sizes()}
    for tokens in sections[1:]:
        _Reader(text, tokens).section(data)
    for view in data.get("views", {}).values():
        view["axes"] = write_pairs(view["axes"].items())
    return {key: write_pairs(value.items()) if key in _ORDERED else value for key, value in data.items()}


def _refuse_others(what: str, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse what the notation has no form for, which the text would lose."""
    others = [key for key in data if key not in known]
    if others:
        raise SpecError(
            f"Notation: {what} has {listed(others)}, which one line cannot say. Use to_dict().", keys=others
        )


# -- writing -----------------------------------------------------------------------------------------------------------


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise SpecError(f"Notation: {name!r} is no name. Names are non-empty strings.", name=name)
    if _PLAIN_NAME.fullmatch(name):
        return name
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _names(names: Iterable[str]) -> str:
    return " ".join(_name(name) for name in names)


def _role(name: str, members: Iterable[str]) -> str:
    return f"@{_name(name)} = {_names(members)}"


def _sizes_text(axes: Mapping[str, Any]) -> str:
    return " ".join(_write_size(name, size) for name, size in axes.items())


def _write_size(name: str, size: Any) -> str:
    text = _name(name)
    if size == _INFER:
        return f"{text}*"
    if type(size) is not int or size < 1:
        raise SpecError(f"Notation: {name}={size!r} is no size. Sizes are positive integers, or one -1.", size=size)
    glued = f"{text}{size}"
    match = _SIZED.fullmatch(glued)
    return glued if match and match["name"] == text and not text.endswith('"') else f"{text}*{size}"


def _find_implied(axes: Mapping[str, int], view: Mapping[str, int]) -> list[str] | None:
    """Return the fewest innermost base axes whose sizes multiply to the view's, or None."""
    sizes = [*axes.values(), *view.values()]
    if not all(type(size) is int and size >= 1 for size in sizes):
        return None
    total = 1
    for size in view.values():
        total *= size
    names = list(axes)
    covered = 1
    for start in range(len(names) - 1, -1, -1):
        covered *= axes[names[start]]
        if covered == total:
            return names[start:]
    return None


# -- reading -----------------------------------------------------------------------------------------------------------


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def _sections(text: str) -> list[list[_Token]]:
    sections: list[list[_Token]] = [[]]
    place = 0
    end = len(text.rstrip())
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None:
            raise _fault(text, place, "a quote is not closed")
        kind = match.lastgroup or ""
        token = _Token(kind, _unquote(match[kind]) if kind == "quoted" else match[kind], match.start(kind))
        place = match.end()
        if token.kind == "mark" and token.text == "|":
            sections.append([])
        else:
            sections[-1].append(token)
    return sections


def _unquote(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)


def _fault(text: str, place: int, what: str) -> SpecError:
    return SpecError(
        f"Notation: {what} at character {place}: {text[:place]}>>>{text[place:]}. Write for example "
        f"'pp2 dp4 tp2 | expert(dp): ep_fsdp2 ep2 | dp_tp = dp tp | @data = dp | +8'.",
        text=text,
        place=place,
    )


class _Reader:
    """The tokens of one section, read from the left."""

    def __init__(self, text: str, tokens: Sequence[_Token]) -> None:
        self._text = text
        self._tokens = list(tokens)
        self._next = 0

    def section(self, data: dict[str, Any]) -> None:
        if self._takes("+"):
            self._offset(data)
        elif self._takes("@"):
            self._keep(data, "roles", self._name(), self._members())
        else:
            name = self._name()
            if self._sees("="):
                self._keep(data, "combined", name, self._members())
            else:
                self._keep(data, "views", name, self._view(data["axes"]))
        self._end()

    def sizes(self) -> dict[str, int]:
        """Read sized names to the end of the section, or to a role."""
        found: dict[str, int] = {}
        while self._next < len(self._tokens) and not self._sees("@"):
            place = self._place()
            name, size = self._sized()
            if name in found:
                raise _fault(self._text, place, f"the name {name!r} is taken twice")
            found[name] = size
        return found

    def _sized(self) -> tuple[str, int]:
        token = self._tokens[self._next]
        place = self._place()
        name = self._name()
        if self._takes("*"):
            digits = self._digits()
            return name, _INFER if digits is None else digits
        match = _SIZED.fullmatch(name) if token.kind == "word" else None
        if match is None:
            raise _fault(self._text, place, f"the axis {name!r} has no size: give one ({name}*2), or {name}* to infer")
        return match["name"], int(match["size"])

    def _digits(self) -> int | None:
        """Read a number that follows without a space, or return None."""
        before = self._tokens[self._next - 1]
        if self._next < len(self._tokens):
            token = self._tokens[self._next]
            if token.place == before.place + len(before.text) and token.text.isascii() and token.text.isdigit():
                self._next += 1
                return int(token.text)
        return None

    def _offset(self, data: dict[str, Any]) -> None:
        place = self._place()
        number = self._digits()
        if number is None:
            raise _fault(self._text, place, "a rank offset, + and a number, was expected")
        data["rank_offset"] = number

    def _view(self, axes: Mapping[str, int]) -> dict[str, Any]:
        place = self._place()
        over: list[str] | None = None
        if self._takes("("):
            over = self._list()
            self._expect(")")
        self._expect(":")
        sizes = self.sizes()
        if over is None:
            over = _find_implied(axes, sizes)
        if over is None:
            raise _fault(
                self._text, place, "no innermost base axes multiply to this view's sizes: name what it is over, (AXES)"
            )
        view: dict[str, Any] = {"over": over, "axes": sizes}
        while self._takes("@"):
            self._keep(view, "roles", self._name(), self._members())
        return view

    def _members(self) -> list[str]:
        self._expect("=")
        return self._list()

    def _list(self) -> list[str]:
        names = []
        while self._next < len(self._tokens) and self._tokens[self._next].kind != "mark":
            names.append(self._name())
        return names

    def _name(self) -> str:
        if self._next == len(self._tokens) or self._tokens[self._next].kind == "mark":
            raise _fault(self._text, self._place(), "a name was expected")
        self._next += 1
        return self._tokens[self._next - 1].text

    def _keep(self, data: dict[str, Any], kind: str, name: str, value: Any) -> None:
        kept = data.setdefault(kind, {})
        if name in kept:
            raise _fault(self._text, self._tokens[0].place, f"the name {name!r} is taken twice in {kind}")
        kept[name] = value

    def _sees(self, mark: str) -> bool:
        token = self._tokens[self._next] if self._next < len(self._tokens) else None
        return token is not None and token.kind == "mark" and token.text == mark

    def _takes(self, mark: str) -> bool:
        if self._sees(mark):
            self._next += 1
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._takes(mark):
            raise _fault(self._text, self._place(), f"{mark!r} was expected")

    def _end(self) -> None:
        if self._next < len(self._tokens):
            raise _fault(self._text, self._place(), "the section should end")

    def _place(self) -> int:
        if self._next < len(self._tokens):
            return self._tokens[self._next].place
        return self._tokens[-1].place + len(self._tokens[-1].text) if self._tokens else len(self._text)
