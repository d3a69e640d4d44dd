import pytest

from dualmesh._support.waits import timeout_s
from dualmesh.errors import LaunchError
from dualmesh.runtime.environment import launch_from, local_rank_of

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_nothing_set_is_one_process():
    launch = launch_from({})
    assert (launch.rank, launch.process_count, launch.init_method) == (0, 1, None)


def test_torchruns_variables_are_read():
    launch = launch_from(TORCHRUN)
    assert (launch.rank, launch.process_count, launch.local_rank) == (3, 4, 1)
    assert launch.init_method == "tcp://10.0.0.1:29500"


def test_arguments_win_over_variables():
    launch = launch_from(TORCHRUN, rank=0, world_size=2, init_method="tcp://127.0.0.1:1")
    assert (launch.rank, launch.process_count, launch.init_method) == (0, 2, "tcp://127.0.0.1:1")


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set_variables_are_refused_by_name(missing):
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(LaunchError, match=f"but {missing} missing"):
        launch_from(variables)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "4.0"), ("MASTER_PORT", "http"), ("LOCAL_RANK", "-")]
)
def test_malformed_variables_are_refused_with_the_value(name, value):
    with pytest.raises(LaunchError, match=f"{name}='{value}' is no integer"):
        launch_from({**TORCHRUN, name: value})


@pytest.mark.parametrize("rank", ["4", "-1"])
def test_rank_outside_the_world_is_refused(rank):
    with pytest.raises(LaunchError, match=rf"rank {rank} is not in a world of 4. Ranks are 0\.\.3"):
        launch_from({**TORCHRUN, "RANK": rank})


@pytest.mark.parametrize(
    "given",
    [
        {"rank": 0},
        {"rank": 1, "world_size": 2},
        {"init_method": "tcp://127.0.0.1:1"},
        {"init_method": "x", "world_size": 2},
    ],
)
def test_half_given_arguments_are_refused(given):
    with pytest.raises(LaunchError, match="Give all three"):
        launch_from({}, **given)


def test_timeout_comes_from_the_argument_the_variable_or_is_60():
    assert timeout_s(5, {"DUALMESH_TIMEOUT_S": "7"}) == 5.0
    assert timeout_s(None, {"DUALMESH_TIMEOUT_S": "7"}) == 7.0
    assert timeout_s(None, {}) == 60.0


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", ""])
def test_timeouts_that_are_no_time_are_refused(value):
    with pytest.raises(LaunchError, match=r"DUALMESH_TIMEOUT_S='.*' is no time"):
        timeout_s(None, {"DUALMESH_TIMEOUT_S": value})


SRUN = {"SLURM_JOB_ID": "4100", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("cpu3", "cpu3"), ("gpu[07-08,11],cpu3", "gpu07"), ("a,b", "a"), ("r1-n[3].x,r2", "r1-n3.x"), ("n[9-10]", "n9")],
)
def test_tasks_of_a_step_meet_on_its_first_host(hosts, first):
    launch = launch_from({**SRUN, "SLURM_STEP_NODELIST": hosts})
    place = (launch.rank, launch.process_count, launch.local_rank, launch.init_method, launch.by_launcher)
    assert place == (3, 8, 1, f"tcp://{first}:{57344 + 2 * 4}", True)
    assert launch.has_own_device


def test_steps_of_one_job_meet_at_different_ports_and_master_variables_win():
    step = {**SRUN, "SLURM_STEP_NODELIST": "a"}
    ports = {launch_from({**step, "SLURM_STEP_ID": str(number)}).init_method for number in range(3)}
    assert ports == {"tcp://a:57352", "tcp://a:57354", "tcp://a:57356"}
    launch = launch_from({**step, "MASTER_ADDR": "b", "MASTER_PORT": "7"})
    assert (launch.init_method, launch.rank) == ("tcp://b:7", 3)


def test_torchruns_workers_in_a_task_are_not_slurms_and_one_task_or_an_allocation_is_no_world():
    launch = launch_from({**SRUN, **TORCHRUN, "SLURM_STEP_NODELIST": "a"})
    assert (launch.rank, launch.process_count) == (int(TORCHRUN["RANK"]), int(TORCHRUN["WORLD_SIZE"]))
    assert not launch.has_own_device
    found = [local_rank_of(variables, 5) for variables in ({}, {"LOCAL_RANK": "2"}, SRUN, {**SRUN, "RANK": "3"})]
    assert found == [5, 2, 1, 5]
    for variables in ({**SRUN, "SLURM_NTASKS": "1"}, {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "8"}):
        assert launch_from(variables).process_count == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_NODELIST": ""}, "hosts are missing"),
        ({"SLURM_STEP_NODELIST": "n[x]"}, r"hosts are 'n\[x\]'"),
        ({"SLURM_JOB_ID": "seven"}, "SLURM_JOB_ID='seven'"),
        ({"SLURM_PROCID": "8"}, "rank 8 is not in a world of 8"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID='x'"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
    ],
)
def test_what_slurm_says_wrongly_is_refused_by_name(changed, said):
    with pytest.raises(LaunchError, match=said):
        launch_from({**SRUN, "SLURM_STEP_NODELIST": "a", **changed})
