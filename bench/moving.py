"""From how many sampled tokens on it pays to move an unfinished group: sampled again, or fed through the buffer.

Takes lengths; gives a row each, and bench/results/moving.json. A group of 8 episodes of the shipped model, on the CPU
and in one process: the tokens sampled again by the native engine, against the move by a real buffer (payload and row
synced to disk, next ticket, payload back) and the same tokens prefilled.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.record import write
from contraflow.buffer.service import Buffer
from contraflow.config import Buffer as BufferSection
from contraflow.config import Engine
from contraflow.model.builtin import model_folder
from contraflow.model.folder import load_folder
from contraflow.rollout.native import NativeEngine
from contraflow.types import Episode, Group, Request, Span, StopReason, Task, Version

EPISODES, PROMPT = 8, 16
V0 = Version(0, 0)


def requests(tag: str, start: int, *, done: int, new: int, vocab: int) -> list[Request]:
    """A group's: one prompt for all, then `done` tokens that differ."""
    draws = np.random.default_rng(start)
    prompt = draws.integers(4, vocab, PROMPT)
    return [
        Request(
            id=f"{tag}-{start}-{place}",
            prompt=np.concatenate([prompt, draws.integers(4, vocab, done)]).astype(np.int32),
            seed=start * EPISODES + place,
            max_new_tokens=new,
            done=done,
            group=f"{tag}-{start}",
        )
        for place in range(EPISODES)
    ]


async def timed(engine: NativeEngine, asked: Sequence[Request]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(engine.generate(each) for each in asked))
    return time.perf_counter() - began


async def move(buffer: Buffer, tokens: int) -> float:
    """Seconds from a worker's hand-back of a group to another's having it."""
    ticket = await buffer.admit(1.0)
    await buffer.started(ticket.group, ticket.attempt, V0)
    count = PROMPT + tokens
    episode = Episode(
        seed=0,
        tokens=np.zeros(count, np.int32),
        trained=np.arange(count) >= PROMPT,
        logprobs=np.zeros(count, np.float32),
        spans=(Span(V0, PROMPT, count),),
        turns=(),
        stop=StopReason.ABORTED,
        reward=0.0,
        error="not finished",
    )
    task = Task(key="bench", prompt="", reference="")
    began = time.perf_counter()
    await buffer.hand_back(Group(ticket=ticket, task=task, episodes=(episode,) * EPISODES))
    again = await buffer.admit(1.0)
    assert await buffer.started(again.group, again.attempt, V0) is not None
    took = time.perf_counter() - began
    await buffer.lost(again.group, again.attempt, "bench")
    return took


async def measure(lengths: Sequence[int], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Medians over rounds; the three are measured in turn, so that load falls on all alike."""
    decoder = load_folder(model_folder("builtin:tiny-moe"))
    section = Engine(context_tokens=256, kv_tokens=8192)
    engine = NativeEngine(decoder, section, clock=time.perf_counter, stepping="thread", version=V0)
    buffer = Buffer(BufferSection(), folder, None, time.monotonic, threaded=True)
    vocab, rows = decoder.config.vocab, []
    for length in lengths:
        seen = []
        for turn in range(rounds + 1):
            start = 1000 * length + turn
            again = await timed(engine, requests("anew", start, done=0, new=length + 1, vocab=vocab))
            fed = await timed(engine, requests("moved", start, done=length, new=1, vocab=vocab))
            seen.append((again, fed, await move(buffer, length)))
        again_s, fed_s, move_s = (statistics.median(each) for each in zip(*seen[1:], strict=True))  # the first warms up
        rows.append(
            {
                "tokens": length,
                "sampled_again_ms": round(1e3 * again_s, 2),
                "fed_ms": round(1e3 * fed_s, 2),
                "buffer_ms": round(1e3 * move_s, 2),
                "move_pays": again_s > fed_s + move_s,
            }
        )
    await engine.close()
    await buffer.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(args.lengths, args.rounds, Path(folder)))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    write("moving", rows, episodes=EPISODES, prompt_tokens=PROMPT, rounds=args.rounds)


if __name__ == "__main__":
    main()
