"""A group that one rollout worker begins and another finishes, by way of a real buffer: as if it had never moved."""

import asyncio
import time

import numpy as np
import pytest

from contraflow import config
from contraflow.buffer.service import Buffer, make_buffer
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import load_folder, save_folder
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.rollout.worker import RolloutWorker, make_rollout_worker
from contraflow.runtime.inline import InlineRuntime
from contraflow.types import StopReason, Version
from contraflow.weights import open_carrier
from contraflow.weights.probe import make_probe, probe_prompts
from contraflow.weights.publish import publish

CALL_S = 60.0
ENV = """
from contraflow.envs.base import Observation
from contraflow.types import Task

class TwoTurns:
    name = "two-turns"
    bounded = True
    def __init__(self, options): pass
    def task(self, split, index): return Task(key=f"{split}/{index}", prompt=f"{index}+1=", reference=str(index + 1))
    def open(self, task): return Session()

class Session:
    turns = 0
    def step(self, action):
        self.turns += 1
        return Observation(f"[{len(action)}]=", self.turns == 2)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_char_tokenizer(folder, "0123456789+-*=[]")
    shape = {"vocab": tokenizer.size, "dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
    experts = {"experts": 4, "top_k": 2, "expert_ffn": 32, "ffn": 32, "renormalise": True}
    save_folder(new_decoder(ModelConfig(family="qwen3_moe", **shape, **experts), seed=3, std=0.3), folder)
    return folder


class Pool:
    """A buffer and as many rollout workers as the scene starts."""

    def __init__(self, folder, model, runtime, carrier, rollout):
        self.folder, self.model, self.runtime, self.carrier, self.rollout = folder, model, runtime, carrier, rollout
        decoder = load_folder(model)
        probe = make_probe(decoder, probe_prompts(decoder.config.vocab, prompts=2, tokens=8, seed=0), 1e-3)
        self.manifest = publish(
            decoder.state_dict(),
            version=Version(0, 0),
            parent=None,
            model=decoder.config.digest(),
            probe=probe,
            carrier=carrier,
            chunk_bytes=1 << 16,
        )

    async def start_buffer(self):
        section = config.Buffer(groups_per_step=1, max_age=2, no_signal="keep")
        self.buffer = await self.runtime.start(
            "buffer", make_buffer, buffer=section, folder=str(self.folder), resume_step=None
        )

    async def worker(self, name):
        worker = await self.runtime.start(
            name,
            make_rollout_worker,
            rollout=self.rollout,
            engine=config.Engine(context_tokens=96, kv_tokens=4096, routes=True),
            env=config.Env(name=f"{self.folder}/mine.py:TwoTurns"),
            reward=config.Reward(parts={"partial": 1.0}),
            weights=config.Weights(),
            model_folder=str(self.model),
            run_folder=str(self.folder),
            seed=1,
            buffer=self.buffer.address,
            stepping="inline",
        )
        assert (await worker.call(CALL_S, RolloutWorker.refresh, self.manifest)).served
        return worker

    async def play(self, worker):
        ticket = await self.buffer.call(CALL_S, Buffer.admit, 1.0)
        return await worker.call(CALL_S, RolloutWorker.run_group, ticket)

    async def group(self):
        take = await self.buffer.call(CALL_S, Buffer.take, 0, 1.0)
        (group,) = await self.buffer.call(CALL_S, Buffer.fetch, take.groups)
        return group


def run(folder, model, scene, **rollout):
    folder.mkdir()
    (folder / "mine.py").write_text(ENV)

    async def main():
        runtime, carrier = InlineRuntime(time.monotonic), open_carrier(config.Weights(), folder)
        carrier.claim()
        try:
            keys = {"episodes": 4, "max_new_tokens": 50, "max_turns": 2, **rollout}
            pool = Pool(folder, model, runtime, carrier, config.Rollout(**keys))
            await pool.start_buffer()
            return await scene(pool)
        finally:
            await runtime.close()
            carrier.close()

    return asyncio.run(main())


async def undisturbed(pool):
    await pool.play(await pool.worker("rollout-0"))
    return await pool.group()


def moves(pauses):
    """Each worker is told to leave after so many looks at it; the last one finishes."""

    async def scene(pool):
        told = []
        for number, looks in enumerate(pauses):
            worker = await pool.worker(f"rollout-{number}")
            playing = asyncio.ensure_future(pool.play(worker))
            for _ in range(looks):
                await worker.call(CALL_S, RolloutWorker.report)
            await worker.call(CALL_S, RolloutWorker.drain, 0.0)
            told.append(await playing)
            if told[-1].given_up:
                await pool.buffer.call(CALL_S, Buffer.lost, 0, number + 1, told[-1].given_up)
        told.append(await pool.play(await pool.worker("rollout-last")))
        return told, await pool.group(), await pool.buffer.call(CALL_S, Buffer.counts)

    return scene


def same_but_for_rounding(one, two):
    for a, b in zip(one.episodes, two.episodes, strict=True):
        assert (a.seed, a.spans, a.turns, a.stop, a.parts) == (b.seed, b.spans, b.turns, b.stop, b.parts)
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert a.routes.shape == b.routes.shape
        assert (a.routes == b.routes).mean() > 0.99  # a near tie may fall either way


@pytest.mark.parametrize("pauses", [(12,), (8, 12), (20,), (16, 4, 3)])
def test_a_group_that_moves_between_workers_is_what_it_would_have_been(tmp_path, model, pauses):
    whole = run(tmp_path / "whole", model, undisturbed)
    told, group, counts = run(tmp_path / "moved", model, moves(pauses), continue_from=1)
    assert [summary.handed_back for summary in told] == [True] * len(pauses) + [False]
    assert counts.reposed == {"handed_back": len(pauses)}
    assert group.ticket.attempt == len(pauses) + 1
    same_but_for_rounding(whole, group)
    last = told[-1]
    assert 1 <= last.continued <= 4
    assert 0 < last.saved < last.tokens


@pytest.mark.parametrize("least", [0, 1000])
def test_what_is_not_worth_a_move_is_played_anew(tmp_path, model, least):
    told, _, counts = run(tmp_path / "moved", model, moves((5,)), continue_from=least)
    assert (told[0].handed_back, told[0].given_up, told[-1].continued) == (False, "drained", 0)
    assert counts.reposed == {"lost": 1}


def test_a_group_beyond_its_deadline_goes_on_from_where_it_was(tmp_path, model):
    """Each attempt has so little time that none could finish it from the start."""

    async def scene(pool):
        worker, told = await pool.worker("rollout-0"), []
        while not told or told[-1].handed_back:
            told.append(await pool.play(worker))
        return told, await pool.group()

    whole = run(tmp_path / "whole", model, undisturbed)
    told, group = run(tmp_path / "late", model, scene, overdue="continue", group_deadline_s=0.03, continue_from=1)
    assert len(told) > 1
    assert all(summary.cut > 0 for summary in told[:-1])
    assert {episode.stop for episode in group.episodes} <= {StopReason.STOP, StopReason.LENGTH}
    same_but_for_rounding(whole, group)
