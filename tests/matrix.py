"""Run the suite's core in one environment per cell, and write what ran to docs/versions.md: see `matrix.sh`.

Needs nothing but Python: the environments of the cells bring the rest.
"""

import argparse
import datetime
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
TOOLS = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6", "cloudpickle>=3", "hatchling>=1.24", "editables")
EXTRAS = ("absl-py>=2", "rich>=13", "PyYAML>=6")
INSTALL_S, TESTS_S = 1800, 5400
IMPORT = "import sys; from importlib.metadata import version as v; print(sys.version.split()[0], *map(v, sys.argv[1:]))"
TORCH = ("contract torch", "torch_backend/test_life.py", "torch_backend/test_compile.py")
JAX = ("contract jax", *(f"jax_backend/test_{name}.py" for name in ("scope", "hand_written", "strict_settings")))
NUMPY = ("contract sim", "sim_backend", "core/test_layout.py", "core/test_topology.py", "core/test_versions.py")
WHEEL = ("wheel",)
CONTRACT = ["tests/contract/test_shard_map.py"]
HEAD = """# Versions

Written by `bash tests/matrix.sh`, which makes an environment for each cell and runs the suite's core in it; what did
not run says why. *contract* is what every backend promises of `shard_map`, *wheel* the built package installed
with nothing but what the cell names, `pip check` and one program. The whole suite runs with torch 2.13.0 and JAX 0.10.2
on Python 3.11 (`bash tests/run.sh`). No cell has a GPU.

An older torch or JAX than the oldest here is refused when its backend is imported, with the version to install;
`dualmesh doctor` says so too, and notes one that is newer than the newest.

| cell | Python | versions | what ran | passed | failed | skipped | when |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


class Cell(NamedTuple):
    """One environment and what runs in it."""

    name: str
    python: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def shown(self) -> tuple[str, ...]:
        """Return the packages whose versions the table shows."""
        return tuple(re.split(r"[<>=]", package)[0] for package in self.packages)


def cells() -> list[Cell]:
    """Return all cells, in the order of the table."""
    oldest = {
        package: least for package, least in re.findall(r'"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    }
    found = []
    for version, want in (("2.11.0", "==2.11.0"), ("2.13.0", "==2.13.0"), ("newest", "")):
        found.append(Cell(f"torch-{version}-py3.11", "3.11", (f"torch{want}", "numpy"), TORCH))
    for version, want, pythons in (
        ("0.10.2", "==0.10.2", ("3.11", "3.13")),
        ("0.11", "==0.11.*", ("3.13",)),  # 0.11 dropped Python 3.11
        ("newest", "", ("3.12", "3.13")),
    ):
        for python in pythons:
            found.append(Cell(f"jax-{version}-py{python}", python, (f"jax{want}", "numpy"), JAX))
    least = f"numpy=={oldest['numpy']}.*"
    found.append(
        Cell("numpy-oldest-py3.11", "3.11", (least, f"array-api-compat=={oldest['array-api-compat']}.*"), NUMPY)
    )
    for python in ("3.11", "3.12", "3.13"):
        found.append(Cell(f"numpy-newest-py{python}", python, ("numpy", "array-api-compat"), NUMPY))
    for python in ("3.11", "3.13"):
        for package in ("numpy", "torch==2.13.0", "jax"):
            found.append(Cell(f"wheel-{package.partition('=')[0]}-py{python}", python, (package,), WHEEL))
    return found


class NotRunError(Exception):
    """A part of a cell is not to be had here."""


class Row(NamedTuple):
    """A line of the table."""

    cell: str
    python: str
    versions: str
    tests: str
    passed: str
    failed: str
    skipped: str
    when: str


def interpreter(python: str) -> str:
    """Return a Python of a minor version: PYTHON, or found on the path or through pyenv."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    places = [os.environ.get("PYTHON"), shutil.which(f"python{python}"), shutil.which("python3")]
    for place in [*places, *sorted(glob.glob(f"{pyenv}/versions/{python}.*/bin/python"), reverse=True)]:
        if place:
            ask = [place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            answer = subprocess.run(ask, capture_output=True, text=True, check=False)
            if answer.returncode == 0 and answer.stdout.strip() == python:
                return place
    raise NotRunError(f"no Python {python} on the path or in pyenv")


def environment(cell: Cell) -> Path:
    """Return the interpreter of a cell's environment, which is made once."""
    start = interpreter(cell.python)
    packages = (*cell.packages, *(() if cell.tests == WHEEL else (*TOOLS, *EXTRAS, "array-api-compat>=1.11")))
    home = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    folder = Path(os.environ.get("DUALMESH_MATRIX") or f"{home}/dualmesh/matrix")
    key = hashlib.sha256(repr((packages, str(ROOT))).encode()).hexdigest()[:8]
    here = folder / f"{cell.name}-{key}"
    python = here / "bin" / "python"
    if not (here / "ready").exists():
        print(f"{cell.name}: installing {' '.join(cell.packages)} into {here}", flush=True)
        shutil.rmtree(here, ignore_errors=True)
        subprocess.run([start, "-m", "venv", str(here)], check=True)
        pip(python, "install", *packages)
        if cell.tests != WHEEL:
            pip(python, "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        (here / "ready").touch()
    return python


def pip(python: Path, *arguments: str) -> None:
    """Run pip quietly; what it cannot get makes the cell one that is not run."""
    command = [str(python), "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    if arguments[0] == "check":
        command.remove("--quiet")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotRunError(f"pip {arguments[0]} took longer than {INSTALL_S} s") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "is ignored" not in line and line.strip()]
        wanted = [line for line in lines if line.startswith("ERROR")] or lines or ["pip failed"]
        raise NotRunError(wanted[-1].removeprefix("ERROR: ").replace("|", "/")[:160])


def run(cell: Cell) -> Row:
    """Run what a cell runs; a failed test is a count, a part that is not to be had a reason."""
    when = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        python = environment(cell)
        counts = wheel(cell, python) if cell.tests == WHEEL else core(cell, python)
    except NotRunError as error:
        return Row(cell.name, cell.python, "not run", str(error), "", "", "", when)
    shown = cell.shown if "numpy" in cell.shown else (*cell.shown, "numpy")
    answer = subprocess.run([str(python), "-c", IMPORT, *shown], capture_output=True, text=True, check=True)
    full, *versions = answer.stdout.split()
    said = ", ".join(f"{name} {version.split('+')[0]}" for name, version in zip(shown, versions, strict=True))
    return Row(cell.name, full, said, ", ".join(cell.tests), *map(str, counts), when)


def core(cell: Cell, python: Path) -> tuple[int, int, int]:
    """Run a cell's tests; return how many passed, failed and were skipped."""
    counts = [0, 0, 0]
    for index, (files, only) in enumerate(asked(cell.tests)):
        report = python.parent.parent / f"report-{index}.xml"
        report.unlink(missing_ok=True)
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--tb=short"]
        command += [*(["-k", only] if only else []), *files]  # one after another: each world has processes of its own
        env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
        try:
            subprocess.run(command, cwd=ROOT, timeout=TESTS_S, check=False, env=env)
        except subprocess.TimeoutExpired:
            raise NotRunError(f"the tests took longer than {TESTS_S} s") from None
        if not report.exists():
            raise NotRunError("pytest ended without a report")
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            counts = [counts[0] + total - failed - skipped, counts[1] + failed, counts[2] + skipped]
    passed, failed, skipped = counts
    return passed, failed, skipped


def asked(tests: tuple[str, ...]) -> list[tuple[list[str], str]]:
    """Return runs of pytest: files, and the backend whose tests of a file for all are meant."""
    own = [f"tests/{name}" for name in tests if not name.startswith("contract ")]
    shared = [(CONTRACT, name.removeprefix("contract ")) for name in tests if name.startswith("contract ")]
    return [*shared, (own, "")]


PROGRAM = """
import sys, warnings
warnings.simplefilter("error")
import numpy as np, dualmesh as dm
name = sys.argv[1]
with dm.session(backend=name, world_size=1 if name == "torch" else 2):
    state = dm.init_parallel_state(dp_size=1 if name == "torch" else 2)
    add = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
    total = dm.to_numpy(add(dm.distribute(np.arange(4, dtype="float32"), dm.P("dp"))))
assert total.sum() == 6, total
"""


def wheel(cell: Cell, python: Path) -> tuple[int, int, int]:
    """Build the wheel, install it with what the cell names, check, run one program, all but that being absent."""
    here = python.parent.parent
    shutil.rmtree(here / "wheel", ignore_errors=True)
    pip(python, "wheel", "--no-deps", "--wheel-dir", str(here / "wheel"), str(ROOT))
    (built,) = (here / "wheel").glob("*.whl")
    (package,) = cell.shown
    backend, extra = ("sim", "") if package == "numpy" else (package, f"[{package}]")
    pip(python, "install", "--force-reinstall", "--no-deps", str(built))
    pip(python, "install", f"{built}{extra}")
    done = [subprocess.run([str(python), "-m", "pip", "check"], check=False).returncode]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    done.append(subprocess.run([str(python), "-c", PROGRAM, backend], cwd=here, env=env, check=False).returncode)
    return done.count(0), len(done) - done.count(0), 0


def rows() -> dict[str, Row]:
    """Return the lines of the table as it is."""
    found = {}
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if len(parts) == len(Row._fields) and parts[0] not in ("cell", "---"):
            found[parts[0]] = Row(*parts)
    return found


def write(found: dict[str, Row]) -> None:
    """Write the page; cells that never ran say so."""
    lines = []
    for cell in cells():
        row = found.get(cell.name) or Row(cell.name, cell.python, "not run", "not asked for yet", "", "", "", "")
        lines.append(f"| {' | '.join(row)} |")
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


def main() -> int:
    """Run the cells that were asked for; return 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", help="names of cells, or parts of them; none: all")
    parser.add_argument("--list", action="store_true", help="name the cells, run nothing")
    given = parser.parse_args()
    wanted = [cell for cell in cells() if not given.cells or any(part in cell.name for part in given.cells)]
    if given.list or not wanted:
        print("\n".join(cell.name for cell in (wanted or cells())))
        return 0 if wanted else 2
    failed = 0
    for cell in wanted:
        row = run(cell)
        print(" ".join(row), flush=True)
        failed += row.failed not in ("", "0")
        write({**rows(), cell.name: row})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
