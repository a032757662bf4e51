"""Runs a function on every rank of a mesh, each a gloo process, for tests whose claim is about processes.

One fork server imports torch once for all tests, so a rank costs a fork.
"""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from contraflow.config import Parallel
from contraflow.parallel.mesh import Mesh, open_mesh

Work = Callable[..., Any]  # (mesh, *given) -> what can be pickled
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["contraflow.train.staged", "torch.distributed.fsdp"])
DEADLINE_S = 90


def _main(work: Work, parallel: Parallel, rank: int, file: str, given: tuple[Any, ...], answer: Connection) -> None:
    torch.set_num_threads(1)
    try:
        with open_mesh(parallel, rank=rank, init_method=f"file://{file}") as mesh:
            # Bytes: tensors would need their process to be alive still.
            answer.send((pickle.dumps(work(mesh, *given)), ""))
    except Exception:  # noqa: BLE001 - told to the test
        answer.send((b"", traceback.format_exc()))


def run(work: Callable[[Mesh], Any] | Work, parallel: Parallel, folder: Path, *given: Any) -> list[Any]:
    """Answers by rank; raises what the first rank to fail raised."""
    file = folder / f"store-{len(list(folder.iterdir()))}"
    pipes, ranks = [], []
    for rank in range(parallel.ranks):
        here, there = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(
            target=_main, args=(work, parallel, rank, str(file), given, there), daemon=True, name=f"rank {rank}"
        )
        process.start()
        there.close()
        pipes.append(here)
        ranks.append(process)
    found: dict[int, Any] = {}
    try:
        while len(found) < len(pipes):
            ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in found], timeout=DEADLINE_S)
            assert ready, f"ranks {sorted(set(range(len(pipes))) - set(found))} gave no answer in {DEADLINE_S} s"
            for pipe in ready:
                rank = pipes.index(pipe)
                answer, fault = pipe.recv()
                assert not fault, f"rank {rank}:\n{fault}"
                found[rank] = pickle.loads(answer)
    finally:
        for process in ranks:
            process.join(timeout=5 if len(found) == len(pipes) else 0)
            process.kill()
    return [found[rank] for rank in range(len(pipes))]
