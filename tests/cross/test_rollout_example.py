"""The rollout example: a JAX sampler writes with a torch trainer's weights, in one program and as two worlds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dualmesh._support.ports import free_port
from dualmesh.testing import assert_same

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "rollout.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STEPS = ["--steps", "16", "--every", "8"]
ENV = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


def started(folder, *arguments, launch=()):
    command = [sys.executable, *launch, str(EXAMPLE), *STEPS, "--out", str(folder), *arguments]
    return subprocess.Popen(command, env={**os.environ, **ENV}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(folder, worlds):
    if worlds == "one program":
        running = [started(folder, launch=TORCHRUN)]
    else:
        meet = ["--meet", f"tcp://localhost:{free_port()}"]
        running = [
            started(folder, "--role", "trainer", *meet, launch=TORCHRUN),
            started(folder, "--role", "sampler", *meet),
        ]
    said = [process.communicate(timeout=200)[0].decode() for process in running]  # who fails may not be who is to blame
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)
    facts = {**json.loads((folder / "trainer.json").read_text()), **json.loads((folder / "sampler.json").read_text())}
    return facts, *(dict(np.load(folder / f"{role}.npz")) for role in ("trainer", "sampler"))


def written(weights, count):
    """Return what the model writes, by numpy in float64."""
    weights = {name: x.astype(np.float64) for name, x in weights.items()}
    window, found = list(b" import "[-8:]), []
    for _ in range(count):
        scores = np.tanh(weights["embed"][window].reshape(-1) @ weights["inner"]) @ weights["outer"]
        found.append(int(scores.argmax()))
        window = [*window[1:], found[-1]]
    return "import " + bytes(found).decode("latin-1")


@pytest.mark.parametrize("worlds", ["one program", "two worlds"])
def test_the_sampler_writes_with_the_weights_that_the_trainer_has(worlds, tmp_path):
    """The losses fall, the last weights arrive bit for bit, and the text is what numpy writes with them."""
    facts, sent, arrived = run(tmp_path, worlds)
    assert facts["losses"][-1] < facts["losses"][0] - 0.5
    assert_same("weights", sent, arrived, rtol=0)
    assert list(facts["texts"]) == ["8", "16"]
    assert facts["texts"]["16"] == written(sent, 40)
