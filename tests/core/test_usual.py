"""The usual axes: what the seed's sizes mean, and every problem of them at once."""

import inspect

import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, SpecError


def sizes(world_size, **kwargs):
    topology = dm.parallel_spec(**kwargs).resolve(world_size)
    return {name: size for name, size in topology.sizes.items() if size > 1}


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"dp_size": 8}, {"dp_shard": 8}),
        ({"dp_shard_size": 8}, {"dp_shard": 8}),
        ({"dp_size": -1}, {"dp_shard": 8}),
        ({"dp_size": 8, "dp_shard_size": 8}, {"dp_shard": 8}),
        ({"dp_size": 8, "dp_replicate_size": 8}, {"dp_replicate": 8}),
        ({"dp_size": 8, "dp_replicate_size": 2, "dp_shard_size": 4}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_size": 8, "dp_replicate_size": 2, "dp_shard_size": -1}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_size": -1, "dp_replicate_size": 2}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_replicate_size": -1, "dp_shard_size": 4}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_size": 2, "ulysses_size": 2, "cp_size": -1}, {"dp_shard": 2, "ulysses": 2, "cp": 2}),
        ({"pp_size": 2, "tp_size": 4}, {"pp": 2, "tp": 4}),
    ],
)
def test_data_parallel_sizes_are_derived_from_each_other(kwargs, expected):
    assert sizes(8, **kwargs) == expected


def test_all_axes_exist_in_the_usual_order():
    topology = dm.parallel_spec().resolve(1)
    assert topology.base_axes == ("pp", "dp_replicate", "dp_shard", "ulysses", "cp", "tp")
    assert topology.axis_names[6:] == ("dp", "sp", "dp_shard_sp", "dp_sp", "world")


def test_experts_fold_inside_each_pipeline_and_tensor_coordinate():
    topology = dm.parallel_spec(dp_shard_size=4, tp_size=2, pp_size=2, ep_size=2).resolve(16)
    assert topology.partition("ep").tolist()[:3] == [[0, 2], [1, 3], [4, 6]]
    assert topology.partition("ep_fsdp").tolist()[:2] == [[0, 4], [1, 5]]
    assert topology.partition("ep_replicate").tolist() == [[rank] for rank in range(16)]


def test_experts_may_fold_tensor_parallel_ranks_or_be_outermost():
    over = ("dp_shard", "tp")
    topology = dm.parallel_spec(dp_shard_size=4, tp_size=2, ep_size=4, ep_over=over).resolve(8)
    assert topology.partition("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    outer = dm.parallel_spec(dp_shard_size=8, extra_parallel_sizes=(4,), extra_parallel_outermost=(True,)).resolve(8)
    assert outer.partition("ep").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_several_extra_parallels_fold_independently():
    spec = dm.parallel_spec(dp_shard_size=8, extra_parallel_names=("ep", "emb"), extra_parallel_sizes=(2, 4))
    topology = spec.resolve(8)
    assert topology.partition("emb").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.partition("emb_fsdp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.partition("ep").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dp_size": 8, "dp_replicate_size": 3, "dp_shard_size": 2}, "dp_size=8, but .* is 6. Leave dp_size out"),
        ({"dp_size": 8, "dp_replicate_size": 2, "dp_shard_size": 2}, "dp_shard_size=4 would fit"),
        ({"dp_size": 0, "dp_shard_size": 8}, "dp_size=0 is no size"),
        ({"dp_size": -8, "dp_shard_size": -8}, "2 problems.*\n.*dp_size=-8 is no size.*\n.*dp_shard_size=-8"),
        ({"dp_size": True}, "dp_size=True is no size"),
        ({"tp_size": 2.0}, "tp_size=2.0 is no size"),
        ({"tp_size": None}, "tp_size=None is no size"),
        ({"extra_parallel_sizes": (2, 2)}, "1 extra parallel name .*2 sizes .* Give one size and one placement"),
        ({"extra_parallel_names": ("ep", "ep"), "extra_parallel_sizes": (2, 2)}, "repeat. Name each once"),
        ({"extra_parallel_sizes": (0,)}, "extra parallel ep=0 is no size"),
        ({"ep_size": -1}, "extra parallel ep=-1 is no size"),
        ({"ep_size": 2, "extra_parallel_sizes": (4,)}, "ep_size=2, but extra_parallel_sizes gives ep=4"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(kwargs, message):
    with pytest.raises(SpecError, match=f"(?s)parallel_spec: .*{message}"):
        dm.parallel_spec(**kwargs)


@pytest.mark.parametrize("name", ["tp", "dp", "ep_fsdp"])
def test_an_extra_parallel_needs_a_name_of_its_own(name):
    spec = dm.parallel_spec(dp_shard_size=8, extra_parallel_names=("ep", name), extra_parallel_sizes=(2, 4))
    with pytest.raises(SpecError, match=f"the name '{name}' is taken twice"):
        spec.resolve(8)


def test_an_extra_parallel_that_does_not_divide_says_what_would():
    with pytest.raises(SpecError, match=r"has 8 positions. ep_fsdp=-1 needs the others .* divisor of 8: 1, 2, 4, 8"):
        dm.parallel_spec(dp_shard_size=8, ep_size=3).resolve(8)


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        (
            dm.init_parallel_state,
            {"tp": 2},
            r"init_parallel_state: there is no argument 'tp'\..*Did you mean 'tp_size'\?$",
        ),
        (
            dm.init_parallel_state,
            {"ulysses": 2, "dp_size": 2},
            r"no argument 'ulysses'.*Did you mean 'ulysses_size'\?$",
        ),
        (dm.init_parallel_state, {"dp_shard_sise": 2}, r"no argument 'dp_shard_sise'.*Did you mean 'dp_shard_size'\?$"),
        (dm.init_parallel_state, {"zzz": 2}, r"no argument 'zzz'\. Arguments: dp_size, .*group_options\.$"),
        (dm.parallel_spec, {"ep": 2}, r"parallel_spec: there is no argument 'ep'.*Did you mean 'ep_size'\?$"),
        (
            dm.init_parallel_states,
            {"tp": 2},
            r"Did you mean 'tp_size'\? It is an argument of parallel_spec: give its spec",
        ),
        (
            dm.init_parallel_states,
            {"tp_size": 2},
            r"no argument 'tp_size'.*group_options\. It is an argument of parallel_spec",
        ),
        (dm.init_parallel_states, {"own_group": True}, r"Did you mean 'own_groups'\?$"),
    ],
)
def test_a_keyword_that_is_none_is_refused_with_the_one_that_was_meant(call, given, message):
    """The size of an axis is found by its name, and where another function takes it that is said."""
    with pytest.raises(ArgumentError, match=message):
        call(**given)


def test_signatures_stay_as_they_are_written():
    """Type checkers, help and editors see the keywords."""
    names = list(inspect.signature(dm.parallel_spec).parameters)
    assert names[:3] == ["dp_size", "dp_replicate_size", "dp_shard_size"]
    assert list(inspect.signature(dm.init_parallel_states).parameters)[:2] == ["specs", "default"]
