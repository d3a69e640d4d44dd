"""Which versions are too old, and what is said of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dualmesh._support import versions
from dualmesh.errors import BackendImportError

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("version", "least", "expected"),
    [
        ("0.10.1", "0.10.2", True),
        ("0.10.2", "0.10.2", False),
        ("0.10.2.dev20260101", "0.10.2", False),
        ("0.9.2", "0.10.2", True),
        ("0.12.0.1", "0.10.2", False),
        ("2.9.1+cu128", "2.11", True),
        ("2.11.0a0+git12ab", "2.11", False),
        ("2.11", "2.11.0", False),
        ("10.0", "2.11", False),
        ("1!2.10", "2.11", True),
        ("unknown", "2.11", False),
    ],
)
def test_versions_are_compared_as_numbers(version, least, expected):
    assert versions.is_older(version, least) is expected


def test_an_older_framework_is_refused_with_what_to_install():
    with pytest.raises(BackendImportError, match=re.escape("pip install --upgrade 'jax>=0.10.2'")) as caught:
        versions.refuse_older("jax", "0.10.1", "0.10.2")
    assert str(caught.value).startswith("Backend 'jax': jax 0.10.1 is too old: dualmesh needs 0.10.2 or newer.")
    assert (caught.value.version, caught.value.least) == ("0.10.1", "0.10.2")


@pytest.mark.parametrize(("name", "version", "least"), [("jax", "0.10.1", "0.10.2"), ("torch", "2.10.0", "2.11")])
def test_a_backend_refuses_an_older_framework_before_it_asks_it_for_anything(tmp_path, name, version, least):
    """The framework on the path is nothing but its version: whatever else is imported first would fail."""
    (tmp_path / f"{name}.py").write_text(f"__version__ = {version!r}\n")
    code = f"""
import dualmesh as dm
try:
    dm.session(backend={name!r}).__enter__()
except dm.errors.BackendImportError as error:
    print(error)
"""
    paths = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "backends")])
    command = [sys.executable, "-W", "error", "-c", code]
    env = {**os.environ, "PYTHONPATH": paths}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert ended.stdout.strip() == (
        f"Backend {name!r}: {name} {version} is too old: dualmesh needs {least} or newer. Install one: "
        f"pip install --upgrade '{name}>={least}'."
    ), ended.stderr


def test_a_version_newer_than_the_newest_tested_is_noted_not_refused():
    (said,) = versions.newer("torch", "2.15.0.dev20270101+cpu", "2.14.1")
    assert said.startswith(
        "torch 2.15.0.dev20270101+cpu is newer than 2.14.1, the newest that dualmesh was tested with."
    )
    assert versions.newer("torch", "2.14.1+cu130", "2.14.1") == versions.newer("torch", "2.13.0", "2.14.1") == []
