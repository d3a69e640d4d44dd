"""What `print(topology)` shows, and what `diff` says."""

from math import prod

import pytest

import dualmesh as dm


def test_a_small_topology_is_drawn_with_every_group():
    spec = dm.TopologySpec(
        {"pp": 2, "dp": 2, "cp": 1, "tp": 2}, views={"e": dm.View(("dp", "tp"), {"edp": 1, "ep": 4})}
    )
    lines = str(spec.resolve(8)).splitlines()
    assert lines == [
        "Topology(pp=2, dp=2, cp=1, tp=2, e=(edp=1, ep=4), world_size=8)",
        "",
        "pp dp | tp 0 1",
        " 0  0 |    0 1",
        " 0  1 |    2 3",
        " 1  0 |    4 5",
        " 1  1 |    6 7",
        "",
        "pp     0 4 | 1 5 | 2 6 | 3 7",
        "dp     0 2 | 1 3 | 4 6 | 5 7",
        "tp     0 1 | 2 3 | 4 5 | 6 7",
        "ep     0 1 2 3 | 4 5 6 7",
        "world  0 1 2 3 4 5 6 7",
        "size 1: cp, edp",
    ]


@pytest.mark.parametrize("world", [1, 2, 63, 64])
def test_up_to_64_ranks_every_rank_is_in_the_grid(world):
    text = str(dm.TopologySpec({"dp": world}, rank_offset=100).resolve(world))
    for rank in range(100, 100 + world):
        assert str(rank) in text or world == 1


def test_a_large_topology_gets_a_summary():
    text = str(dm.TopologySpec({"dp": -1, "tp": 5}, rank_offset=10).resolve(65))
    assert text.splitlines() == [
        "Topology(dp=13, tp=5, world_size=65, rank_offset=10)",
        "",
        "dp     5 groups of 13: 10 15 20 25 .. 70 | ..",
        "tp     13 groups of 5: 10 11 12 13 .. 14 | ..",
        "world  1 group of 65: 10 11 12 13 .. 74",
    ]


def test_many_axes_are_cut():
    text = str(dm.TopologySpec({f"axis{place}": 1 for place in range(1000)} | {"dp": -1}).resolve(4))
    assert len(text) < 5000


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("dp4 tp2", "dp4 tp2", ["no difference"]),
        ("dp4 tp2", "dp4 tp2 | +8", ["rank_offset: 0 -> 8"]),
        (
            "dp4 tp2",
            "tp2 dp4",
            [
                "order: dp tp -> tp dp",
                "dp: first group [0, 2, 4, 6] -> [0, 1, 2, 3]",
                "tp: first group [0, 1] -> [0, 4]",
            ],
        ),
        ("dp4 tp2", "dp2 tp2 cp2", ["cp: only in the second, base axis of size 2", "dp: size 4 -> 2"]),
        ("dp4 | e: a2 b2", "dp4", ["a: only in the first, axis of view 'e' of size 2"]),
        ("dp4 | c = dp", "dp4 | c =", ["c: size 4 -> 1", "c: (dp) -> ()"]),
        ("dp2 tp2 | @data = dp", "dp2 tp2 | @data = tp", ["role data: (dp) -> (tp)"]),
        ("dp2 tp2 | @data = dp", "dp2 tp2", ["role data: (dp) -> none"]),
        ("dp2 tp2 | e(dp): a2", "dp2 tp2 | e(tp): a2", ["a: first group [0, 2] -> [0, 1]", "view e: (dp) -> (tp)"]),
    ],
)
def test_a_difference_is_said_for_people(old, new, lines):
    def topology(text):
        spec = dm.TopologySpec.from_text(text)
        return spec.resolve(prod(spec.axes.values()))

    found = topology(old).diff(topology(new)).splitlines()
    assert [line for line in lines if line not in found] == []
    assert ("no difference" in found) == (old == new)


def test_another_world_is_a_difference():
    spec = dm.TopologySpec({"dp": -1})
    assert spec.resolve(4).diff(spec.resolve(8)).splitlines() == ["world_size: 4 -> 8", "dp: size 4 -> 8"]
