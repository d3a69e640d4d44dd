"""Asking frameworks, each in fresh processes that cannot hang this one: what they have, and do two ranks add up.

What runs there is in `probe`; what needs no framework is looked at in `diagnosis`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dualmesh._support.ports import free_port
from dualmesh.cli.diagnosis import Finding, halves
from dualmesh.cli.probe import MARK, SMOKE_RANKS
from dualmesh.errors import BackendImportError, counted, listed
from dualmesh.runtime.environment import TORCHRUN

EARLY = "importing {modules} starts {name}, which then cannot join other processes and cannot be given more devices"
EARLY_CURE = (
    "Call dm.init_distributed before anything that makes an array or asks for devices: jax.devices(), jnp.zeros at the "
    "top of a module, default arguments that are arrays"
)


def looked_at(
    names: Sequence[str], modules: Sequence[str], ranks_here: int | None, timeout_s: float, with_smoke: bool
) -> Iterator[Finding]:
    """Ask every framework at the same time; yield what was found, in order. *Local.*

    Args:
        names: The backends to ask.
        modules: What each fresh process imports first: the trainer's own modules.
        ranks_here: Ranks that this machine is to hold, or None.
        timeout_s: How long each answer may take, in seconds.
        with_smoke: Whether two ranks add up numbers.
    """
    with ThreadPoolExecutor(max(len(names), 1)) as pool:
        for findings in pool.map(lambda name: _ask(name, modules, ranks_here, timeout_s, with_smoke), names):
            yield from findings


def _ask(
    name: str, modules: Sequence[str], ranks_here: int | None, timeout_s: float, with_smoke: bool
) -> list[Finding]:
    (report,) = _answers([["report", name, *modules]], [dict(os.environ)], timeout_s)
    if "error" in report:
        if report["error"].startswith(BackendImportError.__name__):
            return [Finding(name, "problem", *halves(report["error"]))]
        return [Finding(name, "problem", report["error"], f"Mend `python -c 'import {', '.join([*modules, name])}'`")]
    found = list(_findings(name, report, modules, ranks_here))
    if with_smoke and not report["started_early"]:
        found.append(_smoke(name, report["holds_one_rank"], modules, timeout_s))
    return found


def _findings(
    name: str, report: Mapping[str, Any], modules: Sequence[str], ranks_here: int | None
) -> Iterator[Finding]:
    devices = counted(report["devices"], f"{report['platform']} device")
    talks = listed(report["communicates"])
    yield Finding(name, "ok", f"{name} {report['version']}: {devices}, communicates by {talks}")
    if report["problem"]:
        yield Finding(name, "problem", *report["problem"].split(". ", 1))
    for note in report["notes"]:
        yield Finding(name, "note", *note.split(". ", 1))
    if report["started_early"]:
        what = listed(modules) if modules else "what Python loads at its start (sitecustomize, .pth files)"
        yield Finding(f"{name} start", "problem", EARLY.format(modules=what, name=name), EARLY_CURE)
    if ranks_here is not None and not report["makes_devices"] and report["devices"] < ranks_here:
        fixed = report["platform"] == "cpu"
        cure = (
            f"Set XLA_FLAGS=--xla_force_host_platform_device_count={ranks_here}, or unset what fixes the number"
            if fixed
            else "Start fewer ranks on this machine, see CUDA_VISIBLE_DEVICES, or give --gpus-per-node"
        )
        yield Finding(
            f"{name} devices",
            "problem",
            f"{ranks_here} ranks are wanted on this machine, but {name} has {devices}",
            cure,
        )


def _smoke(name: str, holds_one_rank: bool, modules: Sequence[str], timeout_s: float) -> Finding:
    """Let two ranks add up numbers, on CPU: one device serves no two ranks."""
    env = {key: value for key, value in os.environ.items() if key not in (*TORCHRUN, "LOCAL_RANK")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(SMOKE_RANKS)}
    env.pop("XLA_FLAGS", None)
    places: list[dict[str, str]] = [env]
    if holds_one_rank:
        common = {"WORLD_SIZE": str(SMOKE_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [{**env, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(SMOKE_RANKS)]
    answers = _answers([["smoke", name, *modules]] * len(places), places, timeout_s)
    errors = dict.fromkeys(answer["error"] for answer in answers if "error" in answer)
    where = "2 processes" if holds_one_rank else "2 devices of one process"
    if errors:
        return Finding(f"{name} smoke test", "problem", f"{where} could not add up: {'; '.join(errors)}", "See above")
    if any(answer["total"] != answer["expected"] for answer in answers):
        return Finding(f"{name} smoke test", "problem", f"{where} add up wrongly: {answers}", f"Reinstall {name}")
    return Finding(f"{name} smoke test", "ok", f"{where} add up to {answers[0]['total']}")


def _answers(
    questions: Sequence[Sequence[str]], places: Sequence[Mapping[str, str]], timeout_s: float
) -> list[dict[str, Any]]:
    """Run one probe in each place, all at once; end those that do not answer in time."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "dualmesh.cli.probe", *question],
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for question, env in zip(questions, places, strict=True)
    ]
    return [_answer(process, timeout_s) for process in started]


def _answer(process: "subprocess.Popen[str]", timeout_s: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"no answer within {timeout_s:g} s"}
    lines = [line.removeprefix(MARK) for line in out.splitlines() if line.startswith(MARK)]
    if lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    said = err.strip().splitlines()
    return {"error": f"it ended with code {process.returncode}: {said[-1] if said else 'without a word'}"}
