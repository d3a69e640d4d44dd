"""Imports run one way: a package imports only packages listed before it, for types and inside functions too."""

import shutil

import pytest

from tests.layers import ORDER, PAGE, ROOT, imports_of, modules_of, room_of, upward_edges, with_table

UPWARD: set[str] = set()
"""What is imported against the order today. May only shrink."""
GIVEN = {"errors", "_support", "topology", "sharding", "backend", "runtime"}
"""What backends import of the core."""
BESIDE = {
    "dualmesh_jax.testing": {"testing"},
    "dualmesh_sim.testing": {"testing"},
    "dualmesh_torch.testing": {"testing"},
    "dualmesh_torch.weights": {"weights"},
    "dualmesh_torch.veomni": {"", "ops", "sequence"},
}
"""What parts of backends import beside that: what tests look into, messages as planned, VeOmni's names over ours."""
BEYOND = {
    "dualmesh_jax.arrays.arrays -> dualmesh.weights.transfer",
    "dualmesh_jax.interop -> dualmesh.arrays.transforms",
    "dualmesh_torch.arrays.arrays -> dualmesh.weights.transfer",
}
"""What else they import today. May only shrink."""


def test_every_package_stands_in_the_order():
    known = modules_of("dualmesh", ROOT)
    assert {room_of(module) for module in known} == {*ORDER}


def test_no_package_imports_one_that_comes_later():
    assert upward_edges(ROOT) == UPWARD


@pytest.mark.parametrize(
    ("file", "line", "edge"),
    [
        (
            "topology/layout.py",
            "from dualmesh.runtime.scope import scope_name",
            "topology.layout -> dualmesh.runtime.scope",
        ),
        ("errors.py", "from dualmesh.topology import layout", "errors -> dualmesh.topology.layout"),
        ("sharding/tree.py", "import dualmesh.cli.app", "sharding.tree -> dualmesh.cli.app"),
        (
            "backend/state.py",
            "def late():\n    from dualmesh.weights.plan import Piece",
            "backend.state -> dualmesh.weights.plan",
        ),
        (
            "ops/pairs.py",
            "if TYPE_CHECKING:\n    from dualmesh.config import Configuration",
            "ops.pairs -> dualmesh.config",
        ),
        ("runtime/rng.py", "late = load('dualmesh.arrays.loss')", "runtime.rng -> dualmesh.arrays.loss"),
        ("interop.py", "from dualmesh import session", "interop -> dualmesh"),
        ("__init__.py", "provide(cli='dualmesh.cli.app')", " -> dualmesh.cli.app"),
    ],
)
def test_an_import_against_the_order_is_found_wherever_it_hides(tmp_path, file, line, edge):
    shutil.copytree(ROOT / "dualmesh", tmp_path / "dualmesh", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "dualmesh" / file).open("a") as module:
        module.write(f"\n{line}\n")
    assert upward_edges(tmp_path) - UPWARD == {f"dualmesh.{edge}".replace(". ->", " ->")}


def test_backends_import_the_contract_and_what_it_needs():
    core, found = modules_of("dualmesh", ROOT), set()
    for backend in ("dualmesh_sim", "dualmesh_torch", "dualmesh_jax"):
        for module, path in modules_of(backend, ROOT / "backends").items():
            part = ".".join(module.split(".")[:2])
            allowed = GIVEN | BESIDE.get(part, set())
            found |= {f"{module} -> {name}" for name in imports_of(path, core) if room_of(name) not in allowed}
    assert found == BEYOND


def test_the_map_of_the_packages_is_current():
    """`python -m tests.layers` writes it anew."""
    text = PAGE.read_text()
    assert text == with_table(text)
