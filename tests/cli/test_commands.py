"""The command line answers in tables and in JSON, with the same numbers that topologies give."""

import json
import subprocess
import sys
import tracemalloc

import pytest

import dualmesh as dm
from dualmesh.cli import run
from dualmesh.cli.app import COMMANDS

SIZES = ("--world-size=64", "--dp-shard=8", "--ulysses", "4", "--tp=2", "--ep_size=8")
CONFIG = """\
world_size: 8
gpus_per_node: 4
states:
  thinker: {dp_shard: -1, ulysses: 2}
  talker: {dp_shard: 8}
"""


@pytest.fixture
def answer(capsys):
    """Return what a command prints as JSON, and its exit code."""

    def ask(*argv):
        code = run([*argv, "--json"])
        return json.loads(capsys.readouterr().out), code

    return ask


@pytest.fixture
def config(tmp_path):
    """Return a file of two states."""
    path = tmp_path / "states.yaml"
    path.write_text(CONFIG)
    return path


def test_show_says_of_every_axis_what_the_topology_says(answer):
    found, code = answer("show", *SIZES, "--gpus-per-node=8", "--rank=17")
    topology = dm.parallel_spec(dp_shard_size=8, ulysses_size=4, tp_size=2, ep_size=8).resolve(64)
    base = found["states"]["base"]
    assert code == 0
    assert dm.TopologySpec.from_text(base["spec"]).resolve(64) == topology
    for axis in base["axes"]:
        groups = topology.partition(axis["name"]).tolist()
        assert (axis["sizes"], axis["groups"]) == ([topology.size(axis["name"])], len(groups))
        assert axis["first_group"] == groups[0][:8]
        assert axis["crosses_nodes"] == any(len({rank // 8 for rank in group}) > 1 for group in groups)
    for name, place in base["rank"]["axes"].items():
        group = topology.ranks(name, 17)
        here = group.index(17)
        assert (place["index"], place["size"], place["group"]) == (here, len(group), list(group[:8]))
        assert (place["before"], place["after"]) == (group[here - 1], group[(here + 1) % len(group)])


def test_show_prints_tables_that_are_not_cut(capsys):
    assert run(["show", *SIZES, "--rank=17"]) == 0
    text = capsys.readouterr().out
    assert "0 2 4 6 8 10 12 14" in text
    assert "on another node: 9, 25" in text
    assert "…" not in text


def test_show_answers_for_a_million_ranks_without_a_table_of_them(answer):
    tracemalloc.start()
    found, _ = answer(
        "show", "--world-size=1048576", "--dp-shard=-1", "--ulysses=4", "--tp=8", "--ep=8", "--rank=77777"
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20  # bytes; one integer a rank would be as much
    assert found["states"]["base"]["axes"][2]["sizes"] == [32768]


def test_a_world_that_is_not_given_follows_where_all_sizes_are(answer):
    assert answer("show", "--dp-shard=4", "--tp=2")[0]["world_size"] == 8
    assert answer("show", "--dp-shard=-1", "--tp=2")[0]["error"].endswith("Give --world-size.")


def test_draw_puts_several_states_into_one_picture(answer, config, tmp_path):
    found, code = answer("draw", f"--config={config}", "-o", str(tmp_path / "t.svg"), "--theme=dark")
    assert (code, found["states"]) == (0, ["thinker", "talker"])
    svg = (tmp_path / "t.svg").read_text()
    assert ">thinker<" in svg
    assert ">talker<" in svg


def test_check_names_file_and_line_of_every_problem(answer, config, tmp_path):
    found, code = answer("check", str(config))
    assert (code, found["problems"], list(found["states"])) == (0, [], ["thinker", "talker"])
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(CONFIG.replace("ulysses: 2", "ulises: 2").replace("dp_shard: 8", "dp_shard: 0"))
    found, code = answer("check", str(wrong))
    assert code == 1
    assert [problem.split(" ")[0] for problem in found["problems"]] == [f"{wrong}:4:", f"{wrong}:5:"]
    assert "Did you mean 'ulysses'?" in found["problems"][0]
    found, code = answer("check", str(config), "--world-size=9")
    assert code == 1


def test_plan_counts_the_communicators_and_bytes_of_a_step(answer):
    found, code = answer("plan", "--world-size=8", "--dp-shard=4", "--tp=2", "--parameters=1000", "--layers=1",
                         "--hidden-size=4", "--sequence=16", "--batch=1")  # fmt: skip
    base = found["states"]["base"]
    assert code == 0
    step = {(one["axis"], one["work"]): one["bytes_sent"] for one in base["step"]}
    # 1000 parameters of 2 bytes, halved by tp: 3/4 of 1000 bytes are sent in each of two gathers and one scatter.
    assert step["dp_shard_sp", "gather parameters, forward and backward"] == 1500
    assert step["dp_shard_sp", "scatter gradients"] == 750
    # 16 tokens x 4 x 2 bytes = 128: four all-reduces over 2 ranks send 128 each.
    assert step["tp", "add partial activations"] == 512
    assert base["bytes_held"] == 16 * 1000 / 8
    lanes = {(one["size"], one["lane"]) for one in base["communicators"] if one["size"] > 1}
    assert lanes == {(4, "param"), (4, "data"), (2, "data"), (8, "data")}


def test_plan_ranks_the_splits_that_fit_a_world(answer):
    found, code = answer("plan", "--world-size=16", "--axes=dp_shard,tp", "--gpus-per-node=8")
    assert code == 0
    assert sorted(one["sizes"]["tp"] for one in found["splits"]) == [1, 2, 4, 8, 16]
    assert [one["across"] for one in found["splits"]] == sorted(one["across"] for one in found["splits"])


def test_plan_compares_splits_at_one_global_batch(answer):
    """Every split trains on the same tokens in a step, so a rank that holds more of a sample sends more of it."""
    found, code = answer("plan", "--world-size=16", "--axes=dp_shard,tp", "--gpus-per-node=8", "--sequence=1024")
    assert code == 0
    assert (found["global_batch"], found["tokens_per_step"]) == (16, 16 * 1024)
    for one in found["splits"]:
        assert one["batch"] * one["sizes"]["dp_shard"] == 16
        sizes = [f"--{axis.replace('_', '-')}={size}" for axis, size in one["sizes"].items()]
        alone, _ = answer("plan", "--gpus-per-node=8", "--sequence=1024", f"--batch={one['batch']}", *sizes)
        steps = alone["states"]["base"]["step"]
        assert one["across"] == sum(step["bytes_sent"] for step in steps if step["crosses_nodes"])


def test_plan_leaves_out_splits_that_a_global_batch_does_not_fit(answer, capsys):
    """A data size that does not divide the samples is left out and counted; none that fits is refused."""
    found, code = answer("plan", "--world-size=8", "--axes=dp_shard,tp", "--global-batch=2")
    assert (code, [one["sizes"]["dp_shard"] for one in found["splits"]]) == (0, [2, 1])
    assert run(["plan", "--world-size=8", "--axes=dp_shard,tp", "--global-batch=2"]) == 0
    assert "2 more splits are left out" in capsys.readouterr().out
    assert run(["plan", "--world-size=8", "--axes=dp_shard", "--global-batch=3"]) == 2
    assert "--global-batch=3 is a multiple of the data size of no split. Data sizes: 8." in capsys.readouterr().err


def test_plan_says_how_many_splits_it_leaves_out(capsys):
    assert run(["plan", "--world-size=64", "--axes=dp_shard,ulysses,tp"]) == 0
    assert "28 splits of 64 ranks, the best 20 of them (--json: all);" in " ".join(capsys.readouterr().out.split())


def test_a_reader_may_leave_early():
    shown = f"{sys.executable} -m dualmesh show --world-size=4096 --dp-shard=4096 --json"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {shown} | head -c 20"], capture_output=True, text=True)
    assert (done.returncode, done.stderr, len(done.stdout)) == (0, "", 20)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("shwo",), "no command 'shwo'. Commands: show, draw, plan, doctor, check. Did you mean 'show'?"),
        (("show", "--dp-shart=2"), "Did you mean --dp-shard?"),
        (("show", "--tp=x"), "--tp_size='x': give an integer."),
        (("show", "--tp=3", "--world-size=4"), "multiply to 3, but the world has 4 ranks"),
        (("show", "--world-size=4"), "No parallel settings are given."),
        (("show", "--world-size=four", "--tp=4"), "four"),
        (("show", "--tp=2", "--rank=2"), "rank 2 is in no state. Ranks: 0..1."),
        (("show", "tp=2"), "tp=2 is no flag. Flags begin with --."),
        (("draw", "--tp=2", "-o", "t.pdf"), "Endings: .svg, .png, .html."),
        (("draw", "--tp=2", "--theme=drak"), "Did you mean 'dark'?"),
        (("check",), "0 files given"),
        (("check", "none.yaml"), "none.yaml: cannot be read: No such file or directory."),
        (("plan", "--tp=2", "--batch=0"), "batch=0. Give at least 1."),
        (("plan", "--axes=tp", "--world-size=4", "--gpus-per-node=0"), "gpus_per_node is 0. It must be"),
        (("show", "--tp=2", "--world-size=0"), "world_size is 0. It must be"),
        (("show", "--tp=2", "--gpus-per-node=-1"), "gpus_per_node is -1. It must be"),
        (("plan", "--tp=2", "--rank=2"), "rank 2 is in no state. Ranks: 0..1."),
        (("draw", "--tp=2", "--rank=2"), "rank 2 is in none of base."),
        (("doctor", "--world-size=0"), "world_size is 0. It must be"),
        (("plan", "--axes=tp,dp", "--world-size=4"), "Name different ones of pp, dp_replicate"),
        (("doctor", "--frameworks=pytorch"), "Known: jax, torch. Did you mean 'torch'?"),
    ],
)
def test_a_wrong_question_gets_one_sentence_and_code_2(argv, sentence, capsys):
    assert run(argv) == 2
    told = capsys.readouterr()
    assert sentence in told.err
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert run([*argv, "--json"]) == 2
    assert sentence in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(("argv", "module"), [(("show", "--tp=2"), "rich"), (("show", "--tp=2"), "absl")])
def test_a_missing_package_is_named_with_the_extra_and_code_3(argv, module, monkeypatch, capsys):
    for name in ("rich.console", "rich.table", "absl.flags"):
        if name.startswith(module):
            monkeypatch.setitem(sys.modules, name, None)
    assert run(argv) == 3
    assert "pip install absl-py rich PyYAML" in capsys.readouterr().err


def test_the_process_ends_with_the_code_and_says_what_to_install():
    """`main` is what the script and `python -m dualmesh` call."""
    code = "import sys; sys.modules['absl'] = None; from dualmesh.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    found = "dualmesh: the package 'absl-py' is not installed. pip install absl-py rich PyYAML\n"
    assert (ended.returncode, ended.stderr) == (3, found)
    ended = subprocess.run([sys.executable, "-m", "dualmesh", "shwo"], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_every_flag_and_the_exit_codes(name, capsys):
    for argv in ([name, "--help"], ["help", name]):
        assert run(argv) == 0
        text = capsys.readouterr().out
        assert all(f"--{flag.name.replace('_', '-')}" in text for flag in COMMANDS[name].flags)
        assert "Exit codes: 0" in text
    assert run([]) == 0
    assert name in capsys.readouterr().out
