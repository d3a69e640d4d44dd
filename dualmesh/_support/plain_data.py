"""How values stand in plain data (YAML, TOML, JSON): what is ordered as lists of pairs, each field by one declaration.

The order of axes is their meaning, and tools sort the keys of mappings: PyYAML unless told otherwise, `json.dumps(...,
sort_keys=True)`, TOML editors. So an ordered thing is never written as a mapping, and a mapping is read as one only
where its order cannot come from such a tool. Which fields a class has is said where the class is.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from dualmesh._support.checks import items_in
from dualmesh.errors import DualmeshError, SpecError, did_you_mean, listed

Pairs = tuple[tuple[str, Any], ...]
_Value = TypeVar("_Value")

SORTED = (
    "{where}: {what} is a mapping with its keys in sorted order ({names}). The order is meaning, and tools that write "
    "files sort keys, so this one cannot be known. Write a list of pairs, first one first: {what}: {pairs}."
)

_LONGEST = 120
"""Characters up to which a message writes out the pairs that it asks for."""


# -- pairs -------------------------------------------------------------------------------------------------------------


def write_pairs(pairs: Iterable[tuple[str, Any]], write: Callable[[Any], Any] = lambda value: value) -> list[Any]:
    """Return ordered names and values as plain data: a list of pairs. *Pure.*

    >>> write_pairs((("pp", 2), ("dp", 4)))
    [['pp', 2], ['dp', 4]]
    """
    return [[name, write(value)] for name, value in pairs]


def pairs_in(where: str, what: str, data: Any, error: type[DualmeshError] = SpecError) -> Pairs:
    """Return names and values in order, from a mapping of Python, pairs, or mappings of one key each. *Pure.*

    Raises:
        SpecError: It is none of these, or gives a name twice; or `error`.
    """
    if isinstance(data, Mapping):
        return tuple(data.items())
    items = items_in(data)
    if items is None:
        found = type(data).__name__
        raise error(f"{where}: {what} must map names to values, found {found} {data!r}.", found=data)
    pairs = tuple(_pair(where, what, item, data, error) for item in items)
    names = [name for name, _ in pairs]
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise error(f"{where}: {what} gives {listed(map(repr, twice))} twice. Give it once.", found=data)
    return pairs


def read_pairs(where: str, what: str, data: Any, error: type[DualmeshError] = SpecError) -> Pairs:
    """Return names and values in order from plain data, which may come from a file. *Pure.*

    Args:
        where: What messages begin with.
        what: The key that the data stand under.
        data: Pairs, mappings of one key each, or one mapping whose keys are not sorted.
        error: The class of the error.

    Raises:
        SpecError: As `pairs_in`; or it is a mapping of several names in sorted order, or `error`.

    >>> read_pairs("f.yaml", "axes", [["dp", 2], {"tp": 4}]) == read_pairs("f.yaml", "axes", (("dp", 2), ("tp", 4)))
    True
    >>> read_pairs("f.yaml", "axes", {"tp": 2, "dp": 4})
    (('tp', 2), ('dp', 4))
    """
    pairs = pairs_in(where, what, data, error)
    if isinstance(data, Mapping) and may_be_sorted([name for name, _ in pairs]):
        asked = str(write_pairs(pairs))
        asked = asked if len(asked) <= _LONGEST else f"[[{pairs[0][0]!r}, ...], [{pairs[1][0]!r}, ...], ...]"
        names = listed(name for name, _ in pairs)
        text = SORTED.format(where=where, what=what, names=names, pairs=asked)
        raise error(text, found=data)
    return pairs


def may_be_sorted(names: Iterable[Any]) -> bool:
    """Tell whether the order of several names may be the work of a tool: by text, ignoring case, or by number. *Pure.*

    >>> may_be_sorted(["dp", "tp"]), may_be_sorted(["tp", "dp"]), may_be_sorted(["a2", "a10"]), may_be_sorted(["dp"])
    (True, False, True, False)
    """
    texts = [str(name) for name in names]
    return len(texts) > 1 and any(texts == sorted(texts, key=order) for order in (str, str.casefold, _natural))


def _natural(text: str) -> list[tuple[int, str]]:
    """Order as people do: case and marks do not count, numbers by value."""
    parts = re.findall(r"\d+|[^\W\d_]+", text.casefold())
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _pair(where: str, what: str, item: Any, data: Any, error: type[DualmeshError]) -> tuple[str, Any]:
    pair = next(iter(item.items())) if isinstance(item, Mapping) and len(item) == 1 else items_in(item)
    if pair is None or len(pair) != 2:
        raise error(
            f"{where}: {what} must map names to values, found {type(data).__name__} {data!r}, in which {item!r} is no "
            f"pair. Give pairs: [[name, value], ...].",
            found=data,
        )
    if not isinstance(pair[0], str):
        raise error(f"{where}: {what} has the name {pair[0]!r}. Names are strings.", found=item)
    return pair[0], pair[1]


def settings_of(where: str, data: Any) -> Pairs:
    """Return the items of a mapping whose order is no meaning, or refuse it. *Pure.*"""
    if not isinstance(data, Mapping):
        found = type(data).__name__
        raise SpecError(f"{where} must map names to values, found {found} {data!r}.", found=data)
    return tuple(data.items())


# -- fields ------------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How one field of a class stands in plain data."""

    key: str
    write: Callable[[Any], Any]
    read: Callable[[str, Any], Any]
    argument: str
    """What the class' constructor calls it."""
    left_out: Any
    """The value that is not written."""


_NEVER = object()


def stands_as(
    key: str,
    write: Callable[[Any], Any] = lambda value: value,
    read: Callable[[str, Any], Any] = lambda where, data: data,
    *,
    argument: str | None = None,
    left_out: Any = _NEVER,
) -> Any:
    """Return a dataclass field that says how it stands in plain data. *Pure.*

    Args:
        key: Its key.
        write: Make plain data of the field.
        read: Make of a place's name and plain data what the constructor takes.
        argument: The constructor's name for it; None: the key.
        left_out: The value that is not written and may be missing; a field without one must be given.
    """
    return dataclasses.field(metadata={"form": Form(key, write, read, argument or key, left_out)})


def forms_of(kind: Any) -> dict[str, Form]:
    """Return how the fields of a class stand, by name. *Pure.*

    Raises:
        TypeError: A field does not say: it would be lost.
    """
    forms = {field.name: field.metadata.get("form") for field in dataclasses.fields(kind)}
    unsaid = [name for name, form in forms.items() if form is None]
    if unsaid:
        raise TypeError(f"{kind!r}: {listed(unsaid)} does not say how it stands in plain data. Use stands_as(key).")
    return {name: form for name, form in forms.items() if form is not None}


def write_fields(value: Any) -> dict[str, Any]:
    """Return a value as plain data, every field that is not left out. *Pure.*

    Raises:
        SpecError: A name has characters that cannot be printed: YAML's writers do not keep all of those.
    """
    found = ((form, getattr(value, name)) for name, form in forms_of(value).items())
    data = {form.key: form.write(held) for form, held in found if form.left_out is _NEVER or held != form.left_out}
    for text in _texts(data):
        if not text.isprintable():
            raise SpecError(
                f"{type(value).__name__}: {text!r} cannot be written, as it has characters that cannot be printed. "
                f"Give names of printable characters.",
                name=text,
            )
    return data


def _texts(data: Any) -> Iterator[str]:
    """Yield the strings of plain data, keys too."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _texts(item)


def read_fields(where: str, kind: type[_Value], data: Any) -> _Value:
    """Return what `write_fields` wrote as a value of a class. *Pure.*

    Raises:
        SpecError: It is no mapping, has a key that is none, or lacks one that must be there.
    """
    forms = {form.key: form for form in forms_of(kind).values()}
    check_fields(where, kind, data)
    given = {key: value for key, value in data.items() if value is not None}
    return kind(**{forms[key].argument: forms[key].read(where, value) for key, value in given.items()})


def check_fields(where: str, kind: Any, data: Any) -> None:
    """Refuse data that is no mapping, has a key that is no field of a class, or lacks one. *Pure.*"""
    forms = forms_of(kind).values()
    needed = tuple(form.key for form in forms if form.left_out is _NEVER)
    check_keys(where, data, tuple(form.key for form in forms), needed)


def check_keys(where: str, data: Any, known: tuple[str, ...], needed: tuple[str, ...] = ()) -> None:
    """Refuse data that is no mapping, has unknown keys or lacks some that are needed. *Pure.*"""
    for key, _ in settings_of(where, data):
        if key not in known:
            raise SpecError(
                f"{where}: unknown key {key!r}. Keys: {listed(known)}.{did_you_mean(key, known)}", key=key, known=known
            )
    missing = [key for key in needed if data.get(key) is None]
    if missing:
        raise SpecError(
            f"{where}: {listed(map(repr, missing))} is missing. Keys: {listed(known)}. Found: {listed(data)}.",
            missing=tuple(missing),
        )
