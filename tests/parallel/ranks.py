"""Runs a function on every rank of a mesh, each a gloo process, for tests whose claim is about processes.

One fork server imports torch once for all tests, so a rank costs a fork.
"""

import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from contraflow.config import Parallel
from contraflow.parallel.mesh import open_mesh
from tests.processes import forking

Work = Callable[..., Any]  # (mesh, *given) -> what can be pickled
DEADLINE_S = 90


def _main(work: Work, parallel: Parallel, rank: int, file: str, given: tuple[Any, ...], answer: Connection) -> None:
    torch.set_num_threads(1)
    try:
        with open_mesh(parallel, rank=rank, init_method=f"file://{file}") as mesh:
            # Bytes: tensors would need their process to be alive still.
            answer.send((pickle.dumps(work(mesh, *given)), ""))
    except Exception:  # noqa: BLE001 - told to the test
        answer.send((b"", traceback.format_exc()))


def run(work: Work, parallel: Parallel, folder: Path, *given: Any, silent: tuple[int, ...] = ()) -> list[Any]:
    """Answers by rank, None of `silent` ranks, which need not give one; raises what the first rank to fail raised."""
    file = folder / f"store-{len(list(folder.iterdir()))}"
    pipes, processes = dict[int, Connection](), []
    for rank in range(parallel.ranks):
        here, there = forking().Pipe(duplex=False)
        process = forking().Process(
            target=_main, args=(work, parallel, rank, str(file), given, there), daemon=True, name=f"rank {rank}"
        )
        process.start()
        there.close()
        processes.append(process)
        if rank not in silent:
            pipes[rank] = here
    found: dict[int, Any] = {}
    try:
        while len(found) < len(pipes):
            awaited = {pipe: rank for rank, pipe in pipes.items() if rank not in found}
            ready = wait(list(awaited), timeout=DEADLINE_S)
            assert ready, f"ranks {list(awaited.values())} gave no answer in {DEADLINE_S} s"
            for pipe in ready:
                answer, fault = pipe.recv()  # EOFError: it died
                assert not fault, f"rank {awaited[pipe]}:\n{fault}"
                found[awaited[pipe]] = pickle.loads(answer)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found.get(rank) for rank in range(parallel.ranks)]
