"""Pictures show every rank once per axis, in its group's colour; node crossings hold to brute force."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualmesh as dm
from dualmesh.errors import ArgumentError, RankError
from dualmesh.pictures import draw
from dualmesh.pictures.axis_facts import facts

SPEC = dm.parallel_spec(dp_shard_size=-1, ulysses_size=2, tp_size=2, ep_size=2)


def cells(svg):
    """Return [(label, fill)] of all rank cells in order."""
    root = ET.fromstring(svg)
    shapes = [node for node in root if node.get("class", "").startswith("dmf-")]
    return [
        (word.text, box.get("class").split()[0])
        for box, word in pairwise(shapes)
        if box.tag.endswith("rect") and word.tag.endswith("text") and word.get("text-anchor") == "middle"
    ]


@pytest.mark.parametrize("world", [8, 64, 512])
def test_every_rank_has_a_cell_in_its_groups_colour_in_every_panel(world):
    topology = SPEC.resolve(world)
    found = cells(draw(topology).svg)
    axes = [axis for axis in ("dp_shard", "ulysses", "tp", "ep_fsdp", "ep") if topology.size(axis) > 1]
    assert len(found) == world * len(axes)
    for place, axis in enumerate(axes):
        group_of = {rank: number for number, group in enumerate(topology.partition(axis).tolist()) for rank in group}
        expected = [(str(rank), f"dmf-group{group_of[rank] % 12}") for rank in range(world)]
        assert found[place * world : (place + 1) * world] == expected


def test_a_million_ranks_are_drawn_as_blocks():
    svg = draw(SPEC.resolve(1 << 20)).svg
    assert "Cell n is the 2,048 ranks from 2,048 n on, 256 nodes" in svg
    assert len(svg) < 2_000_000


def test_rank_groups_leave_other_ranks_empty():
    topology = dm.GroupSpec({"node": [[0, 1, 2], [4]]}).resolve(6)
    fills = dict(cells(draw(topology).svg))
    assert fills == {
        "0": "dmf-group0",
        "1": "dmf-group0",
        "2": "dmf-group0",
        "3": "dmf-empty",
        "4": "dmf-group1",
        "5": "dmf-empty",
    }


def test_themes_differ_and_auto_follows_the_reader():
    topology = SPEC.resolve(8)
    light, dark, auto = (draw(topology, theme=theme).svg for theme in ("light", "dark", "auto"))
    assert "prefers-color-scheme" in auto
    assert "prefers-color-scheme" not in light + dark
    assert len({light, dark, auto}) == 3


def test_endings_decide_and_others_are_refused(tmp_path):
    topology = SPEC.resolve(8)
    page = topology.draw(tmp_path / "t.html").html
    assert "<table>" in page
    assert (tmp_path / "t.html").read_text() == page
    with pytest.raises(ArgumentError, match=r"Endings: \.svg, \.png, \.html"):
        topology.draw(tmp_path / "t.pdf")
    with pytest.raises(RankError, match="rank 8 is in none of topology"):
        topology.draw(rank=8)
    with pytest.raises(ArgumentError, match="Did you mean 'dark'"):
        topology.draw(theme="drak")


def test_notebooks_show_specs_topologies_and_states():
    with dm.session(backend="sim", world_size=8):
        state = dm.init_parallel_state(spec=SPEC, name="thinker")
        for shown in (state, state.topology, SPEC):
            html = shown._repr_html_()
            assert "ulysses" in html
            assert re.search("<script|None", html) is None
        assert "thinker" in state._repr_html_()


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    per_node=st.integers(1, 9),
    offset=st.integers(0, 9),
)
def test_which_axes_cross_nodes_is_what_counting_says(sizes, per_node, offset):
    spec = dm.TopologySpec({f"a{place}": size for place, size in enumerate(sizes)}, rank_offset=offset)
    world = 1
    for size in sizes:
        world *= size
    topology = spec.resolve(world)
    for fact in facts(topology, per_node):
        groups = topology.partition(fact.name).tolist()
        counted = any(len({rank // per_node for rank in group}) > 1 for group in groups)
        assert fact.crosses_nodes == counted, fact


def test_no_word_is_cut_and_rings_that_would_mark_every_cell_are_left_out():
    topology = SPEC.resolve(8)
    names = {"talker": dm.parallel_spec(dp_shard_size=8).resolve(8), "thinker": topology}
    words = " ".join(node.text for node in ET.fromstring(draw(names).svg) if node.tag.endswith("text"))
    assert words.count("rings mark the groups of rank 0.") == 2
    assert words.count("dp_sp = dp_replicate x dp_shard x ulysses x cp") == 2
    assert ".." not in words
    assert "dms-ink" not in draw(names["talker"], theme="light").svg
    assert "dms-ink" in draw(topology, theme="light").svg
