"""A backend that a stranger ships is found, chosen by name and held to the same contract (see tests/contract)."""

import re
import sys
from pathlib import Path

import pytest

import dualmesh as dm
from dualmesh.errors import BackendError
from tests.third_party.installed import PACKAGE, folder, toy_world


def loaded_modules():
    return sorted(name for name in sys.modules if name.startswith("dualmesh_")), dm.get_parallel_state().backend


def test_an_installed_package_brings_its_backend_and_needs_no_other():
    def look():
        dm.init_parallel_state(dp_size=2)
        return loaded_modules()

    ((modules, backend),) = toy_world(look, world_size=2)
    assert backend == "toy"
    assert {name.split(".")[0] for name in modules} == {"dualmesh_toy"}


def test_the_installation_is_the_package_alone():
    assert {path.name.split("-")[0] for path in Path(folder()).iterdir()} == {"dualmesh_toy"}


def test_a_backend_that_is_not_installed_is_refused_with_those_that_are():
    with pytest.raises(BackendError, match=r"No backend 'toy'. Backends: (?!.*toy).*sim"), dm.session(backend="toy"):
        pass


def test_the_package_knows_dualmesh_only():
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert [name for name in ("dualmesh_sim", "dualmesh_torch", "dualmesh_jax", "tests") if name in text] == []
        assert set(re.findall(r"\bdualmesh\.[\w.]+", text)) <= {"dualmesh.backend", "dualmesh.errors"}
