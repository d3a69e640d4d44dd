"""The core imports no framework, and neither backend imports the other's; each look is a fresh process."""

import subprocess
import sys

import pytest

LOADED = "import sys; print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'jax', 'jaxlib', 'numpy'}))"


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
    found = "Backend 'jax' could not be imported: jax is not installed. pip install 'dualmesh-topology[jax]'. None True"
    assert fresh(code) == found
