from typing import NamedTuple

import pytest

from dualmesh.errors import ArgumentError
from dualmesh.sharding.param_paths import Pattern, path_of, with_paths
from dualmesh.sharding.tree import leaves

MATCHES = {
    "layers.*.w": ({"layers.0.w", "layers.a_b.w"}, {"layers.w", "layers.0.1.w", "layers.0.w.x", "xlayers.0.w"}),
    "layers.**.w": ({"layers.w", "layers.0.w", "layers.0.1.w"}, {"layersw", "layers.0.wq", "a.layers.w"}),
    "**.w": ({"w", "a.w", "a.b.w"}, {"xw", "a.xw", ""}),
    "a.**": ({"a", "a.b", "a.b.c"}, {"ab", "b.a", ""}),
    "**": ({"", "a", "a.b"}, set()),
    "**.a.**": ({"a", "b.a", "a.b", "b.a.c"}, {"ab", "b.c"}),
    "*": ({"a"}, {"", "a.b"}),
    "w*.b*s": ({"w.bs", "wq.bias"}, {"w.x.bs", "xw.bs", "w.bsx"}),
    "a+b.[0]": ({"a+b.[0]"}, {"aab.0", "a+b.0"}),
    "": ({""}, {"a"}),
}


@pytest.mark.parametrize("text", MATCHES)
def test_patterns_match_whole_paths_by_segments(text):
    hits, misses = MATCHES[text]
    assert {path for path in hits | misses if Pattern(text).matches(path)} == hits


@pytest.mark.parametrize("text", ["a..b", ".a", "a.", "a**", "***", "a.b**.c", 3])
def test_malformed_patterns_are_refused(text):
    with pytest.raises(ArgumentError, match="is no segment"):
        Pattern(text)


class Pair(NamedTuple):
    mu: object
    nu: object


def test_paths_are_keys_joined_by_dots_in_the_order_of_the_leaves():
    tree = {"layers": [{"w": 1, "b": 2}, {"w": 3}], "state": Pair((4,), None), "a.b": 5}
    assert list(with_paths(tree)) == [
        ("layers.0.w", 1),
        ("layers.0.b", 2),
        ("layers.1.w", 3),
        ("state.mu.0", 4),
        ("a.b", 5),
    ]
    assert [leaf for _, leaf in with_paths(tree)] == list(leaves(tree))
    assert list(with_paths(7)) == [("", 7)]
    assert path_of(("a", 0, "b")) == path_of("a.0.b") == "a.0.b"
