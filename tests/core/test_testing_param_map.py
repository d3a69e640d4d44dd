"""Whose parameter is whose: a map is a bijection, or it says what is left over."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmesh.errors import ArgumentError, DualmeshError, ShapeError
from dualmesh.testing import ParamMap, transforms

draw = np.random.default_rng(2)


def test_a_map_goes_there_and_back():
    tree = {
        **{f"layers.{i}.{name}": draw.normal(size=(6, 4)) for i in range(12) for name in ("q", "k", "v", "up")},
        **{f"layers.{i}.scale": draw.normal(size=4) for i in range(12)},
        "gate_up": draw.normal(size=(8, 3)),
        "rope": draw.normal(size=(4, 2)),
    }
    names = ParamMap(
        [
            (("layers.*.q", "layers.*.k", "layers.*.v"), "h_*.qkv", transforms.transpose().then(transforms.fuse(1, 3))),
            ("layers.*.up", "h_*.up", transforms.reshape((6, 4), (3, 2, 4))),
            ("layers.*.scale", "scales", transforms.stack()),
            ("gate_up", ("gate", "up"), transforms.split(0, sizes=(5, 3))),
            ("rope", "rope", transforms.permute((2, 0, 3, 1))),
        ]
    )
    there = names.to_jax(tree)
    assert len(there) == 12 * 2 + 4
    parts = [tree[f"layers.11.{name}"].T for name in "qkv"]
    np.testing.assert_array_equal(there["h_11.qkv"], np.concatenate(parts, 1))
    np.testing.assert_array_equal(there["scales"], np.stack([tree[f"layers.{i}.scale"] for i in range(12)]))
    np.testing.assert_array_equal(there["up"], tree["gate_up"][5:])
    np.testing.assert_array_equal(there["rope"], tree["rope"][[2, 0, 3, 1]])
    back = names.to_torch(there)
    assert back.keys() == tree.keys()
    for name, array in tree.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    assert names.torch_sources(there)["layers.3.k"] == ("h_3.qkv",)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([("a", "x")], "no rule takes b.w, c"),
        ([("a", "x"), ("*.w", "y.*"), ("c", "z"), ("d", "v")], "d: no parameter has this name"),
        ([("a", "x"), ("*.w", "y.*"), ("c", "x")], "x is made twice"),
        ([("a", "x"), ("*.w", "y.*"), ("b.*", "u.*"), ("c", "z")], "b.w is taken twice"),
        ([("a", "x"), (("*.w", "*.v"), "y.*", transforms.fuse(0)), ("c", "z")], "b.v: missing, and goes with b.w"),
        ([("a", ("x", "y")), ("*.w", "y.*"), ("c", "z")], "the transform gives 1 arrays for x, y"),
    ],
)
def test_a_map_that_is_no_bijection_says_what_is_left_over(rules, said):
    with pytest.raises(ArgumentError, match=said):
        ParamMap(rules).to_jax({"a": np.ones(2), "b.w": np.ones(2), "c": np.ones(2)})


STACKED = [("layers.*", "all", transforms.stack())]


@pytest.mark.parametrize(
    ("rules", "names", "said"),
    [
        (STACKED, ["layers.0", "layers.2"], r"only stands for 0, 1, 2, ... without gaps, and found are 0, 2"),
        (STACKED, ["layers.1", "layers.2"], r"without gaps, and found are 1, 2"),
        (STACKED, ["layers.00", "layers.1"], r"without gaps, and found are 00, 1"),
        (STACKED, ["layers.first", "layers.0"], r"without gaps, and found are first, 0"),
        ([(("a.*", "b.*"), "all", transforms.stack())], ["a.0", "b.0", "a.1"], r"b.1: missing, and goes with a.0, a.1"),
        ([("a.*", "x.*"), ("b", "x.b")], ["a.0", "b"], r"x.b would come back as a.b, but came from other names"),
        ([("p*q*", "r*s*")], ["p1q2s3"], r"r1s2s3 would come back as p1s2q3"),
        ([("a", "b", transforms.transpose(0))], ["a"], r"a: transpose: \(0,\) are not the dims of shape \(2, 3\)"),
    ],
)
def test_names_that_would_not_come_back_are_refused(rules, names, said):
    tree = {name: np.full((2, 3), place) for place, name in enumerate(names)}
    with pytest.raises(ArgumentError, match=said):
        ParamMap(rules).to_jax(tree)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (("a.*.*", "b", transforms.stack()), "have 2 and 0 stars"),
        ((("a.*", "b"), "c.*"), "have 0, 1 and 1 stars"),
        (("a", "b", "c"), "is no rule"),
        (("a",), "is no rule"),
        (("a", ()), "each side is a name or some names"),
        (("a", 3), "names is 3"),
        (3, "a rule is 3"),
    ],
)
def test_a_rule_that_is_none_is_refused(rule, said):
    with pytest.raises(ArgumentError, match=said):
        ParamMap([rule])


def test_several_names_of_all_layers_are_stacked_one_behind_the_other_and_come_back():
    names = ParamMap([(("a.*", "b.*"), "all", transforms.stack(1))])
    tree = {f"{name}.{i}": np.array([10.0 * i + 100 * (name == "b")]) for i in range(11) for name in "ab"}
    there = names.to_jax(tree)
    assert there["all"][0].tolist() == [*(10.0 * i for i in range(11)), *(100 + 10.0 * i for i in range(11))]
    back = names.to_torch(there)
    assert {name: array.tolist() for name, array in back.items()} == {n: a.tolist() for n, a in tree.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: transforms.permute((0, 0)), "no permutation"),
        (lambda: transforms.transpose(0, 2), "no permutation of 0..1"),
        (lambda: transforms.reshape((2, 3), (5,)), "not as many elements"),
        (lambda: transforms.reshape((2, 3), (-1,)), "Say every size"),
        (lambda: transforms.fuse(0, 0), "of no array at all"),
        (lambda: transforms.fuse(0, 2).forward([np.ones(2), np.ones(3)]), r"has the sizes \(2, 3\)"),
        (lambda: transforms.fuse(0, 2).forward([np.ones((2, 1)), np.ones((2, 2))]), "do not fit together"),
        (lambda: transforms.fuse(0, 2).forward([np.ones(2), np.ones(2, np.float32)]), "do not fit together"),
        (lambda: transforms.stack().forward([np.ones(2), np.ones(3)]), "do not fit together"),
        (lambda: transforms.stack().forward([]), "no array to take"),
        (lambda: transforms.stack(3).forward([np.ones(2)]), r"shape \(1, 2\) has no dim 3"),
        (lambda: transforms.split(0, 2).forward([np.ones(5)]), "has 5 positions, which are not 2 equal parts"),
        (
            lambda: transforms.split(0, sizes=(1, 2)).forward([np.ones(4)]),
            r"4 positions, which are not the sizes \(1, 2",
        ),
        (lambda: transforms.split(1).forward([np.ones(4)]), r"shape \(4,\) has no dim 1"),
        (lambda: transforms.permute((1, 0)).forward([np.ones(3)]), "has 2 positions, and dim 0 .* has 3"),
        (lambda: transforms.reshape((2, 3), (6,)).forward([np.ones((3, 2))]), r"from shape \(2, 3\), and found \(3, 2"),
    ],
)
def test_transforms_that_lose_something_are_refused(change, said):
    with pytest.raises(ShapeError, match=said):
        change()


ONE, TWO, NONE = ["a.*", "b.*", "x.*", "*", "a*"], ["d.*.e.*", "p*q*", "y*-*"], ["c", "w", "a.0", "x.1"]
small = st.integers(0, 3)
changes = st.recursive(
    st.one_of(
        st.just(transforms.same()),
        st.just(transforms.transpose()),
        st.permutations(range(2)).map(lambda order: transforms.transpose(*order)),
        st.builds(
            transforms.permute, st.integers(1, 4).flatmap(lambda n: st.permutations(range(n))), st.integers(-2, 2)
        ),
        st.sampled_from([((2, 4), (8,)), ((4, 2), (2, 2, 2)), ((4,), (2, 2))]).map(
            lambda two: transforms.reshape(*two)
        ),
        st.builds(transforms.fuse, st.integers(-2, 2), st.integers(1, 3)),
        st.builds(
            lambda dim, sizes: transforms.split(dim, sizes=sizes), st.integers(-2, 1), st.lists(small, min_size=1)
        ),
        st.builds(transforms.split, st.integers(-2, 1), st.integers(1, 3)),
        st.builds(transforms.stack, st.integers(-2, 2)),
    ),
    lambda inner: st.builds(lambda one, other: one.then(other), inner, inner) | inner.map(lambda one: one.inverse()),
    max_leaves=2,
)
sides = st.sampled_from(ONE + TWO + NONE)
several = st.lists(sides, min_size=1, max_size=2).map(tuple)
pairs = st.one_of(
    *[st.tuples(st.sampled_from(kind), st.sampled_from(kind)) for kind in (ONE, TWO, NONE)],
    st.tuples(st.sampled_from(ONE), st.sampled_from(NONE)),
    st.tuples(several, several),
)
SHAPES = st.sampled_from([(4,), (2, 4), (4, 2), (8,), (2, 2, 2), ()])
TEXTS = st.sampled_from([("0",), ("0", "1"), ("0", "1"), ("0", "1", "2"), ("1", "x"), ("0", "2"), ("1-2", "q")])


@st.composite
def any_map(draw):
    """Draw rules, and a tree with names that they take, now and then others too: (rules, {name: shape})."""
    drawn = draw(st.lists(st.tuples(pairs, st.none() | changes), min_size=1, max_size=2))
    rules = [pair if change is None else (*pair, change) for pair, change in drawn]
    tree = {}
    for sources, *_ in rules:
        shape, texts = draw(SHAPES), draw(TEXTS)
        for source in (sources,) if isinstance(sources, str) else sources:
            filled = [source.replace("*", text, 1).replace("*", other) for text in texts for other in texts]
            tree |= dict.fromkeys(filled, shape)
    if draw(st.integers(0, 19)) == 0:
        tree[draw(st.sampled_from(["w", "a.7", "other"]))] = (4,)
    return rules, tree


def numbered_arrays(shapes):
    """Return arrays in which every element of every array differs."""
    return {
        name: np.arange(np.prod(shape)).reshape(shape) + 100.0 * i for i, (name, shape) in enumerate(shapes.items())
    }


def assert_comes_back(names, tree):
    there = names.to_jax(tree)
    assert sum(array.size for array in there.values()) == sum(array.size for array in tree.values())
    back = names.to_torch(there)
    assert back.keys() == tree.keys()
    for name, array in tree.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    assert names.to_jax(back).keys() == there.keys()


@settings(max_examples=300)
@given(any_map())
def test_whatever_the_rules_there_and_back_is_the_identity_or_it_is_refused_by_name(drawn):
    rules, shapes = drawn
    tree = numbered_arrays(shapes)
    try:
        there = (names := ParamMap(rules)).to_jax(tree)
    except DualmeshError:
        return
    assert there
    assert_comes_back(names, tree)


@st.composite
def fitting(draw):
    """Draw rules and a tree that they fit: (rules, {name: shape})."""
    rules, tree = [], {}
    for part in range(draw(st.integers(1, 5))):
        rows, columns, layers = (draw(st.integers(1, 4)) for _ in range(3))
        shape, order = (rows, columns), draw(st.permutations(range(rows)))
        parts = draw(st.integers(1, 3))
        every = [f"m{part}.{i}.w" for i in range(layers)]
        kind = draw(st.integers(0, 5))
        one = (f"m{part}.*.w", f"n{part}_*.kernel")
        if kind == 0:
            rules.append((*one, transforms.transpose()))
        elif kind == 1:
            rules.append((*one, transforms.permute(order).then(transforms.reshape(shape, (rows * columns,)))))
        elif kind == 2:
            rules.append((one[0], f"n{part}", transforms.stack(draw(st.integers(-3, 2)))))
        elif kind == 3:
            names = tuple(f"m{part}.*.w{i}" for i in range(parts))
            every = [name.replace("*", str(i)) for i in range(layers) for name in names]
            rules.append((names, one[1], transforms.transpose().then(transforms.fuse(1, parts))))
        elif kind == 4:
            sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
            targets = tuple(f"n{part}_*.{i}" for i in range(len(sizes)))
            shape = (sum(sizes), columns)
            rules.append((one[0], targets, transforms.split(0, sizes=sizes)))
        else:
            every = [f"m{part}.{i}.e.{j}" for i in range(layers) for j in "xy"]
            rules.append((f"m{part}.*.e.*", f"n{part}.*-*"))
        tree |= dict.fromkeys(draw(st.permutations(every)), shape)
    return rules, tree


@settings(max_examples=60)
@given(fitting())
def test_a_map_that_fits_is_taken_there_and_back(drawn):
    rules, shapes = drawn
    assert_comes_back(ParamMap(rules), numbered_arrays(shapes))
