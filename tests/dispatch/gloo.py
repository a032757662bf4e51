"""Runs a function in several gloo processes at once, for tests whose claim is about processes."""

import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import forking

Work = Callable[..., Any]  # (store, rank, *given) -> what can be pickled


def _main(work: Work, rank: int, world: int, file: str, given: tuple[Any, ...], answers: "SimpleQueue[Any]") -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(file, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        # Bytes: tensors in a queue would need their process to be alive still.
        answers.put((rank, pickle.dumps(work(store, rank, *given)), ""))
    except Exception:  # noqa: BLE001 - told to the test
        answers.put((rank, None, traceback.format_exc()))
    # No orderly end: a rank may be gone, and leaving must not wait for it.


def run(work: Work, world: int, folder: Path, *given: Any, silent: tuple[int, ...] = ()) -> list[Any]:
    """Answers by rank, None for `silent` ranks (which are not expected to give one); raises what a rank raised."""
    answers: SimpleQueue[Any] = forking().SimpleQueue()
    file = str(folder / "store")
    ranks = [
        forking().Process(target=_main, args=(work, rank, world, file, given, answers), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < world - len(silent):
            rank, answer, fault = answers.get()
            assert not fault, f"rank {rank}:\n{fault}"
            found[rank] = pickle.loads(answer)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [found.get(rank) for rank in range(world)]
