"""The main job: train one composite model with torch and with JAX, and prove that the two are the same run."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import composite
import numpy as np
import text
import topologies
from curves import draw

import dualmesh as dm

HERE = Path(__file__).parent
OUT = HERE / "out"
LIMIT = 1e-4
FALL = 0.25


class Parser(argparse.ArgumentParser):
    """Arguments whose faults take one sentence."""

    def error(self, message: str) -> None:
        """Print what is wrong and leave."""
        sys.exit(f"examples/run.sh: {message}")


def options() -> argparse.Namespace:
    """Return the checked options."""
    parser = Parser(prog="examples/run.sh", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="training steps (default 60)")
    parser.add_argument("--world-size", type=int, default=4, help="ranks: 1, 2, 4 or 8 (default 4)")
    parser.add_argument("--backend", choices=("torch", "jax", "both"), default="both", help="default both")
    parser.add_argument("--text", metavar="PATH", help="text to train on (default: the standard library's source)")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps {given.steps} is too few. Give at least 1.")
    try:
        topologies.specs(given.world_size)
        text.corpus(given.text)
    except ValueError as problem:
        parser.error(str(problem))
    return given


def trained(backend: str, given: argparse.Namespace) -> list[float]:
    """Run a trainer in processes of its own and return its loss curve."""
    curve = OUT / f"{backend}.json"
    curve.unlink(missing_ok=True)
    arguments = ["--steps", str(given.steps), "--curve", str(curve)]
    arguments += ["--text", given.text] if given.text else []
    launch = {
        "torch": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.world_size)],
        "jax": [],
    }[backend]
    arguments += ["--world-size", str(given.world_size)] if backend == "jax" else []
    command = [sys.executable, *launch, str(HERE / f"{backend}_trainer.py"), *arguments]
    threads = {"OMP_NUM_THREADS": "1"} if backend == "torch" else {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env={**os.environ, **threads}, timeout=900)
    if ended.returncode:
        sys.exit(f"examples/run.sh: the {backend} trainer failed with exit code {ended.returncode}; see above.")
    return json.loads(curve.read_text())


def numpy_loss(given: argparse.Namespace) -> float:
    """Return the first step's loss, computed by numpy in one process."""
    with dm.session(backend="sim", world_size=1):
        topologies.register(1)
        batch = text.batch(text.corpus(given.text), 0, size=topologies.BATCH, length=composite.LENGTH)
        parameters = {name: value.astype(np.float64) for name, value in composite.initial_parameters().items()}
        return float(composite.loss(parameters, *batch))


def compared(curves: dict[str, list[float]], reference: float) -> list[str]:
    """Print the curves side by side and return what is wrong with them."""
    problems = []
    print("\n step  " + "".join(f"{name:>12}" for name in curves))
    steps = len(next(iter(curves.values())))
    for step in sorted({*range(0, steps, 10), steps - 1}):
        print(f"{step + 1:5d}  " + "".join(f"{losses[step]:12.6f}" for losses in curves.values()))
    if len(curves) == 2:
        torch, jax = (np.array(losses) for losses in curves.values())
        difference = float(np.max(np.abs(torch - jax) / np.abs(torch)))
        print(f"\nlargest relative difference of the curves: {difference:.2e} (limit {LIMIT:.0e})")
        if not difference <= LIMIT:
            problems.append(f"the curves differ by {difference:.2e}, more than {LIMIT:.0e}")
    print(f"first step's loss by numpy, one process, float64: {reference:.6f}")
    for name, losses in curves.items():
        if not abs(losses[0] - reference) <= LIMIT * reference:
            problems.append(f"{name}'s first loss {losses[0]:.6f} is not numpy's {reference:.6f}")
        if steps >= 60 and not losses[-1] <= (1 - FALL) * losses[0]:
            problems.append(f"{name}'s loss fell from {losses[0]:.3f} to {losses[-1]:.3f} only, less than 25 percent")
    return problems


def main() -> None:
    """Run the job; leave with 1 when the two runs are not the same, or do not learn."""
    given = options()
    OUT.mkdir(exist_ok=True)
    for name, spec in topologies.specs(given.world_size).items():
        print(f"{name}\n{spec.resolve(given.world_size)}\n")
    backends = ("torch", "jax") if given.backend == "both" else (given.backend,)
    curves = {backend: trained(backend, given) for backend in backends}
    problems = compared(curves, numpy_loss(given))
    picture = draw(curves, OUT / "curves.png", given.world_size)
    print(f"picture: {picture.relative_to(Path.cwd()) if picture.is_relative_to(Path.cwd()) else picture}")
    if problems:
        sys.exit("examples/run.sh: " + "; ".join(problems) + ".")
    claim = "The same run on both frameworks" if len(curves) == 2 else f"{backends[0]} begins as numpy does"
    print(f"{claim}: passed.")


if __name__ == "__main__":
    main()
