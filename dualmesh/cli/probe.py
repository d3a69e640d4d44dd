"""What `doctor` runs in fresh processes: `python -m dualmesh.cli.probe report|smoke BACKEND [MODULE ...]`.

A backend answers for its framework in its module `doctor`; what the answers mean is in `diagnosis`.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from dualmesh import session
from dualmesh._support.optional_imports import np
from dualmesh.arrays.distribute import distribute, to_numpy
from dualmesh.arrays.transforms import shard_map
from dualmesh.backend import discovery
from dualmesh.ops import all_reduce
from dualmesh.runtime.init import init_parallel_state
from dualmesh.sharding.partition_spec import P

MARK = "dualmesh-probe:"
SMOKE_RANKS = 2
TIMEOUT_S = 30.0


def report(backend: str, modules: Sequence[str]) -> dict[str, Any]:
    """Import modules, then say what a framework has here. *Local.*"""
    for module in modules:
        importlib.import_module(module)
    point = discovery.available()[backend]
    found: dict[str, Any] = importlib.import_module(f"{point.module}.doctor").report()
    return found


def smoke(backend: str, modules: Sequence[str]) -> dict[str, Any]:
    """Import modules, then add up numbers of two ranks. *Collective over the processes that were started.*"""
    for module in modules:
        importlib.import_module(module)
    size = None if os.environ.get("RANK") else SMOKE_RANKS  # processes of one rank each, or one that holds both
    with session(backend, world_size=size, timeout_s=TIMEOUT_S):
        init_parallel_state(dp_size=SMOKE_RANKS)
        add = shard_map(lambda x: all_reduce(x, "dp"), P("dp"), P())
        total = to_numpy(add(distribute(np.arange(1.0, 5.0, dtype="float32"), P("dp"))))
    return {"total": total.tolist(), "expected": [4.0, 6.0]}


def main(argv: Sequence[str]) -> None:
    """Answer one question, as JSON behind a mark: frameworks and modules print what they like. *Local.*"""
    question, backend, *modules = argv
    try:
        answer = {"report": report, "smoke": smoke}[question](backend, modules)
    except Exception as error:  # whatever it is, doctor tells it
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
