"""The core imports no framework, and neither backend imports the other's; each look is a fresh process."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dualmesh as dm

LOADED = "import sys; print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'jax', 'jaxlib', 'numpy'}))"

MODULES = {path.rpartition(".")[2] for path in dm._MODULES}
FACE = ["dualmesh", "dualmesh._support", "dualmesh._support.provided", "dualmesh._support.public_names"]


def fresh(code):
    """Return what a fresh interpreter prints."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return ended.stdout.strip()


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import dualmesh", "[]"),
        ("import dualmesh as dm; dm.parallel_spec(dp_size=2).resolve(2).ranks('dp', 1)", "[]"),
        ("import dualmesh as dm; dm.parallel_spec(dp_size=2).resolve(2).partition('dp')", "['numpy']"),
        ("import dualmesh_sim", "[]"),
        ("import torch", "['numpy', 'torch']"),
    ],
)
def test_import_loads_no_framework(code, loaded):
    assert fresh(f"{code}\n{LOADED}") == loaded


def test_torch_backend_never_loads_jax_and_works_without_it():
    code = """
import sys
for name in ("jax", "jaxlib"):
    sys.modules[name] = None
import dualmesh as dm
with dm.session(backend="torch"):
    print(dm.init_parallel_state(dp_size=1).backend)
"""
    assert fresh(code) == "torch"


def test_jax_backend_never_loads_torch_and_works_without_it():
    code = """
import sys
sys.modules["torch"] = None
import dualmesh as dm
with dm.session(backend="jax", world_size=2):
    print(dm.init_parallel_state(dp_size=2).backend)
"""
    assert fresh(code) == "jax"


def test_import_changes_no_global_setting():
    code = """
import os, signal, sys, warnings, locale, threading
def settings():
    return (dict(os.environ), list(warnings.filters), list(sys.path), list(sys.meta_path), sys.excepthook,
            sys.getrecursionlimit(), signal.getsignal(signal.SIGINT), locale.setlocale(locale.LC_ALL),
            threading.active_count())
before = settings()
import dualmesh
print(settings() == before)
"""
    assert fresh(code) == "True"


def test_backends_change_no_global_setting_when_imported():
    code = """
import torch, jax, torch.distributed as dist
def settings():
    return (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), dist.is_initialized(),
            dict(jax.config.values))
before = settings()
import dualmesh_torch, dualmesh_jax
print(settings() == before)
"""
    assert fresh(code) == "True"


def test_a_missing_framework_is_named_with_the_cure_and_no_chain_of_tracebacks():
    code = """
import sys
sys.modules["jax"] = None
import dualmesh as dm
from dualmesh.errors import BackendImportError
try:
    dm.init_distributed("jax")
except BackendImportError as error:
    print(error, error.__cause__, error.__suppress_context__)
"""
    found = "Backend 'jax' could not be imported: jax is not installed. pip install 'jax>=0.10.2'. None True"
    assert fresh(code) == found


def test_importing_the_face_loads_nothing_behind_it():
    """Every public name is loaded when asked for, and then only with what it needs."""
    loaded = "print(sorted(name for name in sys.modules if name.startswith('dualmesh')))"
    assert fresh(f"import sys, dualmesh\n{loaded}") == str(FACE)
    absent = (
        *("backend", "presets", "sharding", "runtime", "arrays", "pictures", "testing", "federated", "config"),
        *("cli", "initializers", "weights", "topology.federation"),
    )
    needed = f"import sys, dualmesh as dm; dm.parallel_spec(dp_size=2).resolve(2); absent = {absent}"
    assert fresh(f"{needed}\nprint([name for name in absent if f'dualmesh.{{name}}' in sys.modules])") == "[]"


def test_the_face_names_the_same_for_readers_of_types_for_the_loader_and_in_all():
    tree = ast.parse(Path(dm.__file__).read_text())
    (typed,) = (node.body for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    homes = {alias.name: node.module.removeprefix("dualmesh.") for node in typed for alias in node.names}
    loaded = {name: home for home, names in dm._HOMES.items() for name in names.split()}
    paths = {path.rpartition(".")[2]: path.rpartition(".")[0] or "dualmesh" for path in dm._MODULES}
    assert homes == {**loaded, **paths}
    assert {*homes} == {*dm.__all__, "errors"}
    assert {*homes} <= {*dir(dm)}


@pytest.mark.parametrize("package", ["dualmesh", "dualmesh.backend"])
def test_no_module_is_called_like_a_public_name_that_is_none(package):
    """Python binds a module to its package whenever it is imported, and would put it in the name's place."""
    found = importlib.import_module(package)
    modules = {module.name for module in pkgutil.iter_modules(found.__path__)}
    assert [name for name in found.__all__ if name in modules and name not in MODULES] == []


def test_every_public_name_is_found_after_all_modules_were_imported():
    code = """
import importlib, pkgutil, dualmesh as dm
for module in pkgutil.walk_packages(dm.__path__, "dualmesh."):
    if module.name != "dualmesh.__main__":
        importlib.import_module(module.name)
for home, names in dm._HOMES.items():
    for name in names.split():
        assert getattr(dm, name) is getattr(importlib.import_module(f"dualmesh.{home}"), name), name
from dualmesh import *
print(session.__name__, nodes.__name__, scoped.__name__, ops.__name__)
"""
    assert fresh(code) == "session nodes scoped dualmesh.ops"


def test_cross_tests_compare_arrays_by_the_kit_that_users_have_and_by_nothing_else():
    ways = ("np.testing", "numpy.testing", "allclose(", "array_equal(", "torch.equal(")
    texts = {path.name: path.read_text() for path in (Path(__file__).parent.parent / "cross").glob("*.py")}
    assert len(texts) > 20
    assert [(name, way) for name, text in texts.items() for way in ways if way in text] == []
