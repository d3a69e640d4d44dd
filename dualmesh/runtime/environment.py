"""What launchers leave in the environment, read once and checked: torchrun's variables and dualmesh's own.

SLURM's are read in `slurm`; starting a world is in `session`.
"""

from collections.abc import Iterable, Mapping

from dualmesh.backend.backend import Launch
from dualmesh.errors import LaunchError, SpecError, closest, listed
from dualmesh.runtime import slurm
from dualmesh.topology.resolve import whole

DETECT = "auto"
"""The init_method that leaves it to the framework to find out about its cluster."""
PREFIX = "DUALMESH_"
OWN_NAMES = ("BACKEND", "CONFIG", "DEBUG", "ENV", "SPEC", "STRICT", "TIMEOUT_S", "TRANSFER_KEY")
"""What dualmesh's own variables are called after the prefix, beside the settings of a state; ENV is of its scripts."""
_SIZE = "_SIZE"
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Which torchrun sets: how often it has restarted its workers."""


def check_names(variables: Mapping[str, str], settings: Iterable[str]) -> None:
    """Refuse variables whose names are like one of dualmesh's own, and none. *Pure.*

    Args:
        variables: The environment.
        settings: The names of a state's settings, each of which a variable may give, sizes without their ending too.

    Raises:
        SpecError: The variable that is probably misspelt, and what it is like.
    """
    sizes = [name.upper() for name in settings]
    known = [*OWN_NAMES, *sizes, *(name.removesuffix(_SIZE) for name in sizes if name.endswith(_SIZE))]
    for variable, text in variables.items():
        name = variable.removeprefix(PREFIX)
        if not text or name == variable or name in known:
            continue
        like = closest(name, known)
        if like is not None or name.endswith(_SIZE):
            hint = f" Did you mean {PREFIX + like!r}?" if like is not None else ""
            raise SpecError(
                f"environment: {variable}={text!r} is no setting.{hint} Correct it, or unset it.", name=variable
            )


def launch_from(
    variables: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    local_devices: int | None = None,
    timeout_s: float | None = None,
) -> Launch:
    """Return this process' place in the world; arguments win over the launcher's variables. *Pure.*

    torchrun's RANK and WORLD_SIZE win over SLURM's: inside a SLURM task, torchrun's workers are not SLURM's tasks.

    Raises:
        LaunchError: Some of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set and some are not, or a value is no
            number, or the rank is not in the world.
    """
    if isinstance(init_method, str) and init_method == DETECT and rank is None:
        return Launch(world_size=world_size, init_method=DETECT, local_devices=local_devices, timeout_s=timeout_s)
    if rank is not None or init_method is not None:
        return _launch_of_caller(rank, world_size, init_method, local_devices, timeout_s)
    said = _said_by_launcher(variables)
    if not said:
        return Launch(world_size=world_size, local_devices=local_devices, timeout_s=timeout_s)
    processes = number_of(said, "WORLD_SIZE")
    rank = number_of(said, "RANK")
    _check_rank(rank, processes)
    return Launch(
        rank=rank,
        world_size=world_size,
        process_count=processes,
        local_rank=local_rank_of(variables, rank),
        init_method=f"tcp://{said['MASTER_ADDR']}:{number_of(said, 'MASTER_PORT')}",
        by_launcher=True,
        has_launchers_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=number_of(variables, RESTARTS, 0),
        has_own_device=_is_slurms(variables),
        local_devices=local_devices,
        timeout_s=timeout_s,
    )


def local_rank_of(variables: Mapping[str, str], rank: int) -> int:
    """Return which of its node's processes this one is; its rank where no launcher says. *Pure.*

    Raises:
        LaunchError: What the launcher says is no integer.
    """
    return number_of(variables, "SLURM_LOCALID" if _is_slurms(variables) else "LOCAL_RANK", rank)


def _is_slurms(variables: Mapping[str, str]) -> bool:
    """Tell whether SLURM launched this process, and not torchrun inside one of SLURM's tasks."""
    return not variables.get("RANK") and not variables.get("WORLD_SIZE") and slurm.is_step(variables)


def _said_by_launcher(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return torchrun's variables, as torchrun set them or as SLURM's say; nothing where there is no launcher. *Pure.*

    Raises:
        LaunchError: They are half set.
    """
    if _is_slurms(variables):
        return slurm.read_slurm(variables)
    found = [name for name in TORCHRUN if variables.get(name)]
    missing = [name for name in TORCHRUN if name not in found]
    if found and missing:
        raise LaunchError(
            f"init_distributed: {listed(found)} set, but {listed(missing)} missing. Set all of {listed(TORCHRUN)} "
            f"(torchrun does), or unset them for a single process.",
            found=tuple(found),
            missing=tuple(missing),
        )
    return variables if found else {}


def _launch_of_caller(
    rank: int | None,
    world_size: int | None,
    init_method: str | None,
    local_devices: int | None,
    timeout_s: float | None,
) -> Launch:
    if rank is None or world_size is None or (init_method is None and whole(world_size) not in (0, 1)):
        raise LaunchError(
            f"init_distributed: rank={rank!r}, world_size={world_size!r}, init_method={init_method!r}. Give all three, "
            f"for example rank=0, world_size=4, init_method='tcp://127.0.0.1:29500'.",
            rank=rank,
            world_size=world_size,
            init_method=init_method,
        )
    numbers = whole(rank), whole(world_size)
    if None in numbers:
        raise LaunchError(
            f"init_distributed: rank={rank!r}, world_size={world_size!r}. Both must be integers.",
            rank=rank,
            world_size=world_size,
        )
    _check_rank(rank, world_size)
    return Launch(rank, None, world_size, rank, init_method, local_devices=local_devices, timeout_s=timeout_s)


def _check_rank(rank: int, processes: int) -> None:
    if not 0 <= rank < processes:
        raise LaunchError(
            f"init_distributed: rank {rank} is not in a world of {processes}. Ranks are 0..{processes - 1}.",
            rank=rank,
            world_size=processes,
        )


def number_of(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a launcher's variable as an integer. *Pure.*

    Raises:
        LaunchError: It is none, or is not set and there is no default.
    """
    value = variables.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise LaunchError(f"init_distributed: {name}={value!r} is no integer.", name=name, value=value) from None
