"""The federated example: both frameworks learn along the same curves, and averaging matters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from dualmesh.testing import assert_same

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "federated.py"


def curve(backend, folder, every):
    path = folder / f"{backend}-{every}.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"] if backend == "torch" else []
    command = [sys.executable, *launch, str(EXAMPLE), "--backend", backend, "--steps", "12", "--every", str(every)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([*command, "--curve", str(path)], env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return np.array(json.loads(path.read_text()))


def test_two_unequal_federations_learn_along_the_same_curves_on_both_frameworks(tmp_path):
    torch, jax = (curve(backend, tmp_path, 4) for backend in ("torch", "jax"))
    assert torch.shape == (12, 2)
    assert_same("losses", torch, jax, places=("torch", "jax"), rtol=1e-5)
    assert (torch[-1] < torch[0]).all()
    assert abs(torch[:, 0] - torch[:, 1]).min() > 1e-4  # different text
    alone = curve("jax", tmp_path, 100)
    assert_same("losses before the first average", alone[:4], jax[:4], rtol=5e-7)
    assert (abs(alone[4:] - jax[4:]) > 1e-4).all()  # averages change what comes after
