"""The toy backend installed as a stranger would install it, in a folder of its own, and worlds that run on it."""

import atexit
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from dualmesh.testing import place_of, run_on

PACKAGE = Path(__file__).parent / "toy"
INSTALL = "-m pip install --quiet --no-deps --no-build-isolation --no-index --disable-pip-version-check --target"


@cache
def folder() -> str:
    """Install the package once; return the folder, which goes when this process ends."""
    target = tempfile.mkdtemp(prefix="dualmesh_toy_")
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    # Built from a copy: a build may leave files beside the source.
    source = shutil.copytree(PACKAGE, Path(target) / "source")
    installed = str(Path(target) / "site")
    subprocess.run([sys.executable, *INSTALL.split(), installed, str(source)], check=True, timeout=120)
    return installed


def toy_world(fn: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = 120.0) -> list[Any]:
    """Run `fn` in a process that has the package on its path, every rank a thread; return [result]."""
    place = place_of("toy", env={"OMP_NUM_THREADS": "1", "DUALMESH_TIMEOUT_S": "20"}, path=[folder()])
    return run_on(place, fn, *args, world_size=world_size, timeout_s=timeout_s)
