"""The wheel as it is built: what users install has types for every package."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from dualmesh.backend.discovery import requirements
from dualmesh.cli.report import EXTRA

ROOT = Path(__file__).parent.parent
BUILD = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"


def test_every_package_of_the_wheel_says_that_it_is_typed(tmp_path):
    """Without the marker mypy takes what a package exports for Any."""
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=ROOT, check=True, timeout=120, capture_output=True, text=True
    )
    names = zipfile.ZipFile(tmp_path / built.stdout.split()[-1]).namelist()
    packages = {name.split("/")[0] for name in names if name.endswith(".py")}
    assert packages == {"dualmesh", "dualmesh_torch", "dualmesh_jax", "dualmesh_sim"}
    assert {name for name in names if name.endswith("py.typed")} == {f"{package}/py.typed" for package in packages}


def test_what_messages_advise_to_install_is_what_the_extras_ask_for():
    """Packages of an index, not extras of one that need not be on it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert EXTRA.split() == [re.split("[><=]", one)[0] for one in extras["cli"]]
    for name in ("torch", "jax", "cli"):
        # Metadata is written in another order and case than pyproject.toml.
        assert sorted(requirements(name).lower().split()) == sorted(f"'{one}'".lower() for one in extras[name])
    assert requirements("of nobody") == "of nobody"
