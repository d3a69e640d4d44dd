"""What SLURM tells a task of a step about its world: rank, size, and where the tasks can meet.

What it says about nodes is read in `node_variables`, torchrun's variables in `environment`.
"""

import re
from collections.abc import Mapping

from dualmesh.errors import LaunchError, listed

TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
"""How many tasks run: of the step, else of the job."""
HOSTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST")
FIRST_PORT, PORT_PAIRS = 57344, 4096
"""The meeting place has an even port, so that the next one is free for another framework's."""

_HOST = re.compile(r"(?P<start>[^\[,]+)(?:\[(?P<first>[0-9]+)[^\]]*\](?P<end>[^,\[]*))?")


def is_step(variables: Mapping[str, str]) -> bool:
    """Tell whether this process is one of several tasks that srun started; an allocation alone is none. *Pure.*"""
    tasks = _first(variables, TASKS)
    return bool(variables.get("SLURM_PROCID")) and tasks.isdecimal() and int(tasks) > 1


def read_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's four variables as a task of a step would have them; MASTER_* win where they are set. *Pure.*

    The tasks meet on the first host of the step, at a port made from the job's and the step's number.

    Raises:
        LaunchError: A number, or the step's hosts, are missing or malformed.

    >>> step = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-08,11]"}
    >>> read_slurm(step)["MASTER_ADDR"], read_slurm(step)["MASTER_PORT"]
    ('gpu07', '57358')
    """
    rank = variables["SLURM_PROCID"]
    if not rank.isdecimal():
        raise LaunchError(f"init_distributed: SLURM_PROCID={rank!r} is no integer.", name="SLURM_PROCID")
    return {
        "RANK": rank,
        "WORLD_SIZE": _first(variables, TASKS),
        "MASTER_ADDR": variables.get("MASTER_ADDR") or _host(variables),
        "MASTER_PORT": variables.get("MASTER_PORT") or str(_port(variables)),
    }


def first_host(hosts: str) -> str:
    """Return the first of the hosts that SLURM writes short: "gpu[07-08,11],cpu3" begins with "gpu07". *Pure.*

    Raises:
        LaunchError: The text is no such list.
    """
    match = _HOST.match(hosts.strip())
    if match is None or "[" in hosts[match.end() : match.end() + 1]:
        raise LaunchError(
            f"init_distributed: SLURM's hosts are {hosts!r}, which name none; {listed(HOSTS)} say them in the form "
            f"'gpu[07-08,11]'. Or set MASTER_ADDR.",
            hosts=hosts,
        )
    return f"{match['start']}{match['first'] or ''}{match['end'] or ''}"


def _host(variables: Mapping[str, str]) -> str:
    hosts = _first(variables, HOSTS)
    if not hosts:
        raise LaunchError(
            f"init_distributed: SLURM_PROCID={variables['SLURM_PROCID']!r} is one of several tasks, but hosts are "
            f"missing: {listed(HOSTS)} say where they could meet. Set MASTER_ADDR.",
            missing=HOSTS,
        )
    return first_host(hosts)


def _port(variables: Mapping[str, str]) -> int:
    job, step = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "0")
    if not job.isdecimal() or not step.isdecimal():
        raise LaunchError(
            f"init_distributed: SLURM_PROCID={variables['SLURM_PROCID']!r} is one of several tasks, but SLURM_JOB_ID="
            f"{job!r} and SLURM_STEP_ID={step!r} give no port where they could meet. Set MASTER_PORT.",
            job=job,
            step=step,
        )
    return FIRST_PORT + (int(job) + int(step)) % PORT_PAIRS * 2


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((variables[name] for name in names if variables.get(name)), "")
