"""`dualmesh doctor` finds and explains what is wrong, each in a real process of its own."""

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dualmesh.cli.diagnosis import ports

ROOT = Path(__file__).parent.parent.parent
NEEDED = ("numpy", "array_api_compat", "absl", "rich", "markdown_it", "mdurl", "pygments", "yaml")


def doctor(*argv, env=None, flags=()):
    """Return the findings by what was looked at, and the exit code, of `python -m dualmesh doctor`."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    ended = subprocess.run(
        [sys.executable, *flags, "-m", "dualmesh", "doctor", "--json", *argv],
        env={**os.environ, **paths, **(env or {})},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode in (0, 1), ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["is_well"] == (ended.returncode == 0)
    return {one["check"]: one for one in answer["findings"] if one["status"] == "problem"}, answer


@pytest.fixture
def bare(tmp_path):
    """Return the environment of an interpreter that has what dualmesh needs, and no framework."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name in NEEDED:
        found = Path(__import__(name).__file__).parent
        (folder / name).symlink_to(found)
    for found in Path(__import__("numpy").__file__).parent.parent.glob("numpy*.libs"):
        (folder / found.name).symlink_to(found)
    own = Path(importlib.metadata.distribution("dualmesh-topology")._path)
    (folder / own.name).symlink_to(own)
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends"), str(folder)])}, folder


def test_no_framework_a_half_set_environment_and_a_port_in_use_are_found(bare):
    env, _ = bare
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        launched = {"RANK": "0", "MASTER_PORT": port, "DUALMESH_TP_SIZ_SIZE": "2", "DUALMESH_BACKEND": "nccl"}
        problems, _ = doctor(flags=("-S",), env={**env, **launched})
    assert "neither of jax, torch" in problems["frameworks"]["found"]
    assert "pip install one of 'jax>=0.10.2', 'torch>=2.11'" in problems["frameworks"]["cure"]
    assert "RANK, MASTER_PORT set, but WORLD_SIZE, MASTER_ADDR missing" in problems["environment: launcher"]["found"]
    assert "Set all of RANK, WORLD_SIZE" in problems["environment: launcher"]["cure"]
    assert "DUALMESH_TP_SIZ_SIZE='2' is no setting" in problems["environment: settings"]["found"]
    assert "DUALMESH_BACKEND='nccl' is no backend" in problems["environment: DUALMESH_BACKEND"]["found"]
    assert f"port {port} of this machine is in use" in problems["port"]["found"]
    assert "MASTER_PORT" in problems["port"]["cure"]


def test_a_torch_that_is_too_old_or_broken_is_found(bare):
    env, folder = bare
    (folder / "torch-1.13.1.dist-info").mkdir()
    (folder / "torch-1.13.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n")
    (folder / "torch.py").write_text("raise ImportError('libcudart.so.11.0: cannot open shared object file')\n")
    _, answer = doctor("--nosmoke", flags=("-S",), env=env)
    found = [one for one in answer["findings"] if (one["check"], one["status"]) == ("torch", "problem")]
    assert found[0]["found"] == "torch 1.13.1 is too old: dualmesh needs 2.11 or newer"
    assert "pip install --upgrade 'torch>=2.11'" in found[0]["cure"]
    assert "libcudart.so.11.0" in found[1]["found"]


def test_jax_started_too_early_and_too_few_devices_are_found(tmp_path):
    (tmp_path / "trainer_settings.py").write_text("import jax\nSCALE = jax.numpy.ones(())\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "backends")])
    asked = ("--imports=trainer_settings", "--frameworks=jax", "--world-size=8")
    problems, _ = doctor(*asked, "--timeout-s=300", env={"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"})
    assert "importing trainer_settings starts jax" in problems["jax start"]["found"]
    assert "before anything that makes an array" in problems["jax start"]["cure"]
    assert "8 ranks are wanted on this machine, but jax has 1 cpu device" in problems["jax devices"]["found"]


def test_two_ranks_of_each_framework_add_up():
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    problems, answer = doctor("--timeout-s=300", env=launched)
    assert problems == {}
    found = {one["check"]: one["found"] for one in answer["findings"]}
    assert found["torch smoke test"] == "2 processes add up to [4.0, 6.0]"
    assert found["jax smoke test"] == "2 devices of one process add up to [4.0, 6.0]"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"MASTER_PORT": "0"}, []),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT='70000' is no port"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT='http' is no port"]),
        ({"MASTER_PORT": "1", "MASTER_ADDR": "elsewhere.example"}, []),
        ({"MASTER_PORT": "1", "RANK": "3"}, []),
    ],
)
def test_only_a_port_that_this_process_is_to_open_is_looked_at(variables, found):
    assert [one.found for one in ports(variables)] == found
