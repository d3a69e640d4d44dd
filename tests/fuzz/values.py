"""Wrong values, and whether a message shows one."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["tp", "dp", "dp_shard", "ep", "é", "軸", "dp tp", "a.b", "None", "2", "-1", " ", "\n", "x" * 300]),
    st.binary(max_size=3),
    st.sampled_from([int, object(), np.int64(3), np.float32(2.5), np.bool_(True), np.array([1, 2]), 2 + 1j, ...]),
)
wild = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(0, 3)), inner, max_size=3),
        st.sets(st.integers(-2, 9), max_size=3),
    ),
    max_leaves=5,
)
sizes = st.sampled_from([1, 2, 4, 8, -1])
names = st.sampled_from(["dp", "tp", "pp", "a", "b", "é"])


def is_left_out(value: Any) -> bool:
    """Tell whether a value says as much as none at all."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, dict):
        return all(map(is_left_out, value.values()))
    return value is None or (isinstance(value, list | tuple | set) and not value)


def is_shown(value: Any, message: str) -> bool:
    """Tell whether a message shows a value, or for a container something of it."""
    return any(words in message for words in _forms(value))


def _forms(value: Any) -> Iterator[str]:
    yield repr(value)
    yield from (repr(value)[:40],) if len(repr(value)) > 60 else ()
    if isinstance(value, str):
        yield value if value.strip() else repr(value)
    elif isinstance(value, type):
        yield value.__name__
    elif not isinstance(value, Mapping | Iterable):
        yield str(value)
    if isinstance(value, list | tuple | set | frozenset | bytes):
        yield repr(list(value))
        yield repr(tuple(value))
    if isinstance(value, Mapping):
        yield repr(dict(value))
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        yield from ("none", "empty", "at least one") if not value else ()
        for item in value.items() if isinstance(value, Mapping) else value:
            yield from _forms(item) if not isinstance(item, str) or item else (repr(item),)
    if isinstance(value, np.ndarray):
        yield from (str(value), *map(repr, value.tolist()))
