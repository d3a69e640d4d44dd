"""How processes find each other: torchrun, SLURM, JAX's own detection; who is missing or late is said."""

import os
import random
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

from dualmesh.errors import SessionError
from dualmesh.runtime import slurm
from tests.jax_backend.worker import fresh, in_jax
from tests.workers import free_port

SUM = """
import numpy as np
import dualmesh as dm
with dm.session("jax", local_devices=2, timeout_s=100.0) as session:
    state = dm.init_parallel_state(dp_size=4)
    total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
    said = f"{session.world_size} {session.local_ranks} {dm.to_numpy(total(np.arange(4.0))).tolist()}"
    heard = dm.host.all_gather(said)[::2]
    print("\\n".join(heard) if state.is_writer() else "", flush=True)
"""
FOUND = "4 (0, 1) [6.0]\n4 (2, 3) [6.0]"


def require_torch():
    """Skip where JAX is tested without torch, as in the cells of `tests/matrix.sh`; the whole suite has both."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")


def clean(**env):
    """Return an environment that says nothing about JAX, launchers or clusters, but `env`."""
    gone = ("XLA_", "JAX_", "SLURM_", "KUBERNETES_", "OMPI_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(gone)}
    return {**kept, "JAX_PLATFORMS": "cpu", **env}


def run(command, env):
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert ended.returncode == 0, ended.stderr
    return said_by(ended.stdout)


def said_by(output):
    """Return what a script printed, without what gloo says beside and between it."""
    return "\n".join(line for line in output.strip().splitlines() if line.startswith("4 "))


def test_torchruns_variables_start_jax_beside_torchruns_own_store(tmp_path):
    require_torch()
    script = tmp_path / "train.py"
    script.write_text(SUM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    assert run(launcher, clean()) == FOUND


BOTH = """
import numpy as np
import torch
import dualmesh as dm
with dm.session(("torch", "jax"), timeout_s=100.0) as session:
    state = dm.init_parallel_state(dp_size=2)
    x = torch.full((1,), 1.0 + session.local_ranks[0])
    total = np.asarray(dm.interop.to_jax(dm.ops.all_reduce(x, "dp")))
    there = state.on("jax")
    said = f"{session.world_size} {there.backend} {there.local_ranks} {total.tolist()}"
    print("4 " + said, flush=True)
"""


@pytest.mark.parametrize("launcher", ["SLURM", "SLURM, both frameworks", "Open MPI, detected by JAX"])
def test_the_launchers_variables_start_the_world(launcher):
    job = free_job()
    srun = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}
    mpi = {"OMPI_MCA_orte_hnp_uri": f"{job * 4096}.0;tcp://127.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2"}
    code, step, place = SUM, srun, ("SLURM_PROCID", "SLURM_LOCALID")
    if launcher == "SLURM, both frameworks":
        require_torch()
        code = BOTH
    if launcher.startswith("Open"):
        code = SUM.replace('dm.session("jax", ', 'dm.session("jax", init_method="auto", ')
        step, place = mpi, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env=clean(**step, **dict.fromkeys(place, str(task))),
        )
        for task in range(2)
    ]
    try:
        said = [said_by(task.communicate(timeout=240)[0]) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    expected = ["4 2 jax (0,) [3.0]", "4 2 jax (1,) [3.0]"] if code is BOTH else [FOUND, ""]
    assert said == expected


def free_job():
    """Return a job's number whose ports, SLURM's by our rule and Open MPI's by JAX's, nobody uses."""
    while True:
        job = random.randrange(10**6)
        pair = slurm.FIRST_PORT + job % slurm.PORT_PAIRS * 2
        if all(is_free(port) for port in (pair, pair + 1, job % 4096 + 61440)):
            return job


def is_free(port):
    with socket.socket() as server:
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_without_a_cluster_detection_says_what_to_set():
    code = """
import os
for name in [name for name in os.environ if name.startswith(("SLURM_", "KUBERNETES_", "OMPI_"))]:
    del os.environ[name]
import dualmesh as dm
try:
    dm.init_distributed("jax", init_method="auto")
except dm.errors.LaunchError as error:
    print(error)
"""
    assert "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in fresh(code)


def test_joining_after_jax_has_started_is_an_error_with_the_cure():
    code = """
import jax, dualmesh as dm
jax.devices()
try:
    dm.init_distributed("jax", rank=0, world_size=2, init_method="tcp://127.0.0.1:1")
except dm.errors.SessionError as error:
    print(error)
"""
    assert "before the first use of jax.devices" in fresh(code)


def test_another_number_of_local_devices_is_refused():
    code = f"""
import dualmesh as dm
try:
    dm.init_distributed("jax", rank=0, world_size=1, init_method="tcp://127.0.0.1:{free_port()}", local_devices=4)
except dm.errors.SessionError as error:
    print(error)
"""
    assert "4 ranks were asked for, but JAX has 2" in fresh(code, XLA_FLAGS="--xla_force_host_platform_device_count=2")


@in_jax(1)
@pytest.mark.parametrize(
    ("variables", "method", "expected"),
    [
        ({}, "tcp://host:7000", "host:7000"),
        ({"MASTER_ADDR": "host", "MASTER_PORT": "7000"}, "tcp://host:7000", "host:7001"),
        ({"MASTER_ADDR": "host", "MASTER_PORT": "7000"}, "tcp://other:7000", "other:7000"),
        ({"MASTER_ADDR": "host", "MASTER_PORT": "7000"}, "env://", "host:7001"),
        ({"JAX_COORDINATOR_ADDRESS": "named:9"}, "tcp://host:7000", "named:9"),
    ],
)
def test_jax_takes_the_port_after_the_one_that_torch_holds(variables, method, expected):
    from dualmesh.backend.backend import Launch
    from dualmesh_jax.launch import coordinator

    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        assert coordinator(Launch(rank=0, process_count=2, init_method=method)) == expected


def together(*calls):
    """Run calls in threads at once; return the text of each one's error, or None."""
    from concurrent.futures import ThreadPoolExecutor

    def said(call):
        try:
            return call()
        except SessionError as error:
            return str(error)

    with ThreadPoolExecutor(len(calls)) as threads:
        return [running.result() for running in [threads.submit(said, call) for call in calls]]


@in_jax(1)
def test_processes_that_do_not_come_are_named_to_those_that_came():
    from dualmesh_jax.rendezvous import meet

    address = f"127.0.0.1:{free_port()}"
    first, second = together(lambda: meet(address, 0, 4, 2.0), lambda: meet(address, 2, 4, 2.0))
    assert "processes 1, 3 of 4 did not come within 2 s" in first
    assert "processes 1, 3 did not come within 2 s" in second
    assert together(*(lambda rank=rank: meet(address, rank, 3, 20.0) for rank in range(3))) == [None] * 3
    (alone,) = together(lambda: meet(address, 1, 2, 1.0))
    assert f"process 1 did not reach process 0 at {address} within 1 s" in alone


@in_jax(1)
def test_a_taken_port_is_an_error_with_the_cure():
    from dualmesh_jax.rendezvous import meet

    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(SessionError, match=rf"cannot listen at 127.0.0.1:{port}.*JAX_COORDINATOR_ADDRESS"):
            meet(f"127.0.0.1:{port}", 0, 2, 5.0)
