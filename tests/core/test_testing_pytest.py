"""The kit under pytest as users run it: importlib mode off the import path, fixtures in any order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cloudpickle

import dualmesh as dm

ROOT = Path(__file__).parent.parent.parent

USERS = """
import threading
import warnings

import pytest

import dualmesh as dm
from dualmesh import testing
from dualmesh.testing.fixtures import nothing_left, sim_session

BASE = 10
POOL = testing.Pool({})


class Answer:
    def __init__(self, value):
        self.value = value


def added(x):
    return Answer(BASE + doubled(x))


def doubled(x):
    return 2 * x


def test_a_function_of_this_module_travels_and_its_class_comes_back():
    (answer,) = POOL.run(added, [(4,)])
    assert type(answer) is Answer and answer.value == 18
    POOL.close()


def test_the_world_first(sim_session, nothing_left):
    dm.init_parallel_state(tp_size=8)


def test_the_check_first(nothing_left, sim_session):
    dm.init_parallel_state(tp_size=8)


def test_a_daemon_left(nothing_left):
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()


def test_a_world_left(nothing_left):
    dm.init_distributed("sim", world_size=2)
"""


def test_closures_that_name_the_package_travel():
    spec = dm.P("tp")
    assert cloudpickle.loads(cloudpickle.dumps(lambda: (dm, dm.P("tp") == spec)))() == (dm, True)


def test_users_tests_run_in_importlib_mode_and_what_they_leave_fails_them(tmp_path):
    folder = tmp_path / "users" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_users.py").write_text(USERS)
    (folder.parent / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\n")
    command = [str(Path(sys.executable).parent / "pytest"), "-q", "-rA", "tests/test_users.py"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    ended = subprocess.run(command, cwd=folder.parent, env=env, capture_output=True, text=True, timeout=120)
    said = ended.stdout
    assert set(re.findall(r"^PASSED \S+::(\w+)", said, re.MULTILINE)) >= {
        "test_a_function_of_this_module_travels_and_its_class_comes_back",
        "test_the_world_first",
        "test_the_check_first",
    }, said
    assert set(re.findall(r"^ERROR \S+::(\w+)", said, re.MULTILINE)) == {"test_a_daemon_left", "test_a_world_left"}, (
        said
    )
    assert "threads: ['forgotten'] still run" in said
    assert "worlds: was [], is ['sim']" in said
