"""The project promises no versions but those that ran: see `matrix`, which writes docs/versions.md."""

import re
import tomllib
from pathlib import Path

import pytest

from dualmesh._support import versions
from tests import matrix

ROOT = Path(__file__).parent.parent
RAN = [row for row in matrix.rows().values() if row.versions != "not run"]


def in_cells(package, kind=""):
    """Return the versions of a package in the cells that ran, oldest first."""
    found = {part.split()[1] for row in RAN for part in row.versions.split(", ") if part.split()[0] == package}
    return sorted(found, key=versions.release)


def floors():
    """Return what pyproject.toml asks for at least."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(one for extra in ("torch", "jax") for one in project["optional-dependencies"][extra]),
    ]
    return dict(one.split(">=") for one in wanted), project


@pytest.mark.parametrize("package", ["torch", "jax", "numpy", "array-api-compat"])
def test_the_oldest_version_asked_for_ran(package):
    least = versions.release(floors()[0][package])
    assert versions.release(in_cells(package)[0])[: len(least)] == least


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_backend_knows_the_oldest_and_the_newest_version_that_ran(name):
    source = (ROOT / "backends" / f"dualmesh_{name}" / "supported.py").read_text()
    least, newest = (re.search(rf'^{what} = "(.+)"$', source, re.MULTILINE)[1] for what in ("LEAST", "NEWEST"))
    assert (least, newest) == (floors()[0][name], in_cells(name)[-1])


def test_the_classifiers_name_the_pythons_that_ran():
    ran = {".".join(row.python.split(".")[:2]) for row in RAN}
    prefix = "Programming Language :: Python :: 3."
    named = {line.rsplit(" ", 1)[1] for line in floors()[1]["classifiers"] if line.startswith(prefix)}
    assert named == ran


def test_the_readme_names_the_versions_that_ran():
    def span(package, most):
        first, last = (".".join(one.split(".")[:most]) for one in (in_cells(package)[0], in_cells(package)[-1]))
        return f"{first} to {last}"

    pythons = sorted({int(row.python.split(".")[1]) for row in RAN})
    text = " ".join((ROOT / "README.md").read_text().split())
    said = f"Tested with torch {span('torch', 2)}, JAX {span('jax', 3)}, numpy {span('numpy', 2)} and Python "
    assert f"{said}3.{pythons[0]} to 3.{pythons[-1]}" in text


def test_no_cell_that_ran_failed():
    assert [row.cell for row in RAN if row.failed != "0"] == []
