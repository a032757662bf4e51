"""Where the ranks of a pool compute, and in what precision: the settings `device` and `compute`, as torch knows them.

Takes settings, a rank's number and how many GPUs there are; gives devices and dtypes. Does not start anything or move
tensors. Besides the devices of its tensors a thread has a current GPU, on which NCCL's gathers of objects and kernels
that are not torch's own work: every thread that computes must have that of its process.
"""

from collections.abc import Callable

import torch

from contraflow.config import Compute
from contraflow.errors import ConfigError

DTYPES: dict[Compute, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def first_gpu(setting: str) -> int | None:
    """The N of `cuda:N`, 0 for `cuda`, None for `cpu`."""
    kind, _, number = setting.partition(":")
    return int(number or 0) if kind == "cuda" else None


def device_of(setting: str, rank: int = 0) -> torch.device:
    """The device of a pool's rank: the CPU, or GPU N + rank for a setting of `cuda:N` (`cuda` is `cuda:0`).

    Counted round where the process sees fewer: on a cluster it sees its own only, or those of one of several machines.
    """
    first = first_gpu(setting)
    if first is None:
        return torch.device("cpu")
    return torch.device("cuda", (first + rank) % (torch.cuda.device_count() or first + rank + 1))


def worker_setting(setting: str, *, ranks: int, worker: int, visible: int) -> str:
    """The setting of one of several workers of `ranks` ranks each: every worker has the next `ranks` GPUs.

    When there are no more it begins again at the first: workers can share GPUs, ranks of one worker cannot (NCCL). The
    setting has passed `check_device`.
    """
    first = first_gpu(setting)
    if first is None:
        return setting
    sets = (visible - first) // ranks
    return f"cuda:{first + worker % sets * ranks}"


def check_device(key: str, setting: str, *, ranks: int, visible: int) -> None:
    """Raise ConfigError, naming the setting `key`, unless all GPUs that a worker's ranks want are among `visible`."""
    first = first_gpu(setting)
    if first is None or first + ranks <= visible:
        return
    taken = f"GPU {first}" if ranks == 1 else f"GPUs {first} to {first + ranks - 1}, one for each of {ranks} ranks"
    raise ConfigError(
        f"{key} = {setting!r} takes {taken}, numbered from 0: {first + ranks} needed, torch sees {visible}; lower the "
        f"number, use fewer ranks, or set {key} = 'cpu' (what torch sees is up to CUDA_VISIBLE_DEVICES and its build)"
    )


def visible_gpus(*settings: str) -> int:
    """How many GPUs torch sees; 0, without looking, where no setting asks for one."""
    return torch.cuda.device_count() if any(first_gpu(setting) is not None for setting in settings) else 0


def enter_device(device: torch.device) -> None:
    """Make a GPU the current one of this thread; nothing for the CPU. Raises: ConfigError if it does not answer."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.init()  # says what is wrong; what follows need not
        torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as fault:  # a build without CUDA asserts
        raise ConfigError(f"device {device} cannot be used: {str(fault).strip().splitlines()[0]}") from fault


def same_gpu() -> Callable[[], None]:
    """To be called in another thread: gives it this thread's current GPU, if this process uses any."""
    if not torch.cuda.is_initialized():
        return lambda: None
    current = torch.device("cuda", torch.cuda.current_device())
    return lambda: enter_device(current)
