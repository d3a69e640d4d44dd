"""The compact text of a spec: what is written is read back, and what cannot be read is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualmesh as dm
from dualmesh.errors import SpecError

NAMES = st.text(min_size=1, max_size=5).filter(str.isprintable) | st.sampled_from(
    ["dp", "tp2", "2", "a b", 'q"\\', "|", "@", "ep*", "x²"]
)
SIZES = st.integers(1, 99) | st.just(-1)


@st.composite
def specs(draw):
    axes = draw(st.dictionaries(NAMES, SIZES, min_size=1, max_size=4))
    members = st.lists(st.sampled_from(list(axes)) | NAMES, max_size=3)
    views = {
        name: dm.View(draw(members), draw(st.dictionaries(NAMES, SIZES, max_size=3)))
        for name in draw(st.lists(NAMES, max_size=2, unique=True))
    }
    return dm.TopologySpec(
        axes,
        draw(st.dictionaries(NAMES, members, max_size=2)),
        views,
        draw(st.dictionaries(NAMES, members, max_size=2)),
        rank_offset=draw(st.integers(0, 20)),
    )


@given(specs())
def test_whatever_is_declared_is_read_back(spec):
    assert dm.TopologySpec.from_text(spec.to_text()) == spec


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("dp4 tp2", {"axes": [["dp", 4], ["tp", 2]]}),
        ("  dp*   tp2 ", {"axes": [["dp", -1], ["tp", 2]]}),
        ("stage1*2 dp*4", {"axes": [["stage1", 2], ["dp", 4]]}),
        ('"a b"*2 "q\\""*', {"axes": [["a b", 2], ['q"', -1]]}),
        (
            "dp4 tp2|c=tp dp|@data=dp|+8",
            {
                "axes": [["dp", 4], ["tp", 2]],
                "combined": [["c", ["tp", "dp"]]],
                "roles": {"data": ["dp"]},
                "rank_offset": 8,
            },
        ),
        (
            "pp2 dp4 | e(dp): a* b2",
            {"axes": [["pp", 2], ["dp", 4]], "views": [["e", {"over": ["dp"], "axes": [["a", -1], ["b", 2]]}]]},
        ),
    ],
)
def test_the_notation_means(text, data):
    assert dm.TopologySpec.from_text(text) == dm.TopologySpec.from_dict(data)


def test_a_view_is_over_the_innermost_axes_that_multiply_to_it():
    text = "pp2 dp_shard4 ulysses2 tp2 | expert: ep_fsdp4 ep4"
    spec = dm.TopologySpec.from_text(text)
    assert spec.views["expert"].over == ("dp_shard", "ulysses", "tp")
    assert spec.to_text() == text
    assert spec.resolve(32).partition("ep").tolist()[1] == [4, 5, 6, 7]


@pytest.mark.parametrize("text", ["pp1 dp4 | e: a2 b2", "dp4 tp1 | e(dp): a4"])
def test_what_a_view_is_over_is_written_where_it_is_not_implied(text):
    assert dm.TopologySpec.from_text(text).to_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp", "'dp' has no size: give one .* at character 0: >>>dp"),
        ("dp4 tp", "at character 4: dp4 >>>tp"),
        ("dp4 dp2", "'dp' is taken twice at character 4"),
        ("dp4 | e a2", "':' was expected"),
        ("dp4 | e: a3", "name what it is over"),
        ("dp4 | = dp", "a name was expected"),
        ("dp4 | e(dp: a4", r"'\)' was expected"),
        ("dp4 | c = dp = tp", "the section should end"),
        ("dp4 | c = dp | c = dp", "'c' is taken twice in combined"),
        ("dp4 | +x", "a rank offset"),
        ('dp4 | "c = dp', "a quote is not closed"),
        ("dp4 |", "a name was expected"),
        ('"a b"2', "has no size"),
    ],
)
def test_text_that_cannot_be_read_is_shown_where(text, message):
    with pytest.raises(SpecError, match=f"Notation: .*{message}") as caught:
        dm.TopologySpec.from_text(text)
    assert caught.value.text == text


@pytest.mark.parametrize(
    "spec",
    [
        dm.TopologySpec({"dp": 0}),
        dm.TopologySpec({"dp": "2"}),
        dm.TopologySpec({"": 2}),
        dm.TopologySpec({"dp": 2}, rank_offset=-1),
    ],
)
def test_a_spec_that_cannot_be_is_not_written(spec):
    with pytest.raises(SpecError, match="Notation: "):
        spec.to_text()


def test_only_text_is_read():
    with pytest.raises(SpecError, match="3 is no text"):
        dm.TopologySpec.from_text(3)
