"""The rollout worker with a tiny random model: what it hands over is what the model itself says of the tokens."""

import asyncio

import numpy as np
import pytest
import torch

from contraflow import config
from contraflow.buffer.service import Buffer, make_buffer
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import load_folder, save_folder
from contraflow.model.router import RouterTape
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.rollout.worker import RolloutWorker, make_rollout_worker
from contraflow.runtime import open_runtime
from contraflow.types import Version
from contraflow.weights import open_carrier
from contraflow.weights.probe import make_probe, probe_logprobs, probe_prompts
from contraflow.weights.publish import publish

pytestmark = pytest.mark.usefixtures("fork_server")
CALL_S = 60.0
ENV = """
from contraflow.envs.base import Observation
from contraflow.types import Task

class ThreeTurns:
    \"\"\"Whatever the model says, it is answered twice.\"\"\"
    name = "three-turns"
    bounded = True

    def __init__(self, options): pass

    def task(self, split, index):
        return Task(key=f"{split}/{index}", prompt=f"{index}+1=", reference=str(index + 1))

    def open(self, task): return Answers()

class Answers:
    def __init__(self): self.turns = 0

    def step(self, action):
        self.turns += 1
        return Observation(f"[{self.turns}]=", self.turns == 3)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_char_tokenizer(folder, "0123456789+-*=[]")
    shape = {"vocab": tokenizer.size, "dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
    experts = {"experts": 4, "top_k": 2, "expert_ffn": 32, "ffn": 32, "renormalise": True}
    decoder = new_decoder(ModelConfig(family="qwen3_moe", **shape, **experts), seed=3, std=0.3)
    save_folder(decoder, folder)
    return folder


NATIVE = config.Engine(context_tokens=96, kv_tokens=4096, routes=True)


def play(run, model, *, kind, groups=4, engine=NATIVE):
    """Play some groups on version 0.0; gives them, a look at held-out tasks, and the worker's report."""
    (run / "mine.py").write_text(ENV)
    decoder, weights = load_folder(model), config.Weights()

    async def main():
        runtime = open_runtime(config.Runtime(kind=kind), run, preload=["contraflow.rollout.worker"])
        carrier = open_carrier(weights, run)
        carrier.claim()
        try:
            section = config.Buffer(groups_per_step=groups, no_signal="keep")
            buffer = await runtime.start("buffer", make_buffer, buffer=section, folder=str(run), resume_step=None)
            worker = await runtime.start(
                "rollout-0",
                make_rollout_worker,
                rollout=config.Rollout(episodes=4, max_new_tokens=60, max_turns=3),
                engine=engine,
                env=config.Env(name=f"{run}/mine.py:ThreeTurns"),
                reward=config.Reward(),
                weights=weights,
                model_folder=str(model),
                run_folder=str(run),
                seed=1,
                buffer=buffer.address,
                stepping="thread" if kind == "local" else "inline",
            )
            probe = make_probe(decoder, probe_prompts(decoder.config.vocab, prompts=2, tokens=8, seed=0), 1e-3)
            manifest = publish(
                decoder.state_dict(),
                version=Version(0, 0),
                parent=None,
                model=decoder.config.digest(),
                probe=probe,
                carrier=carrier,
                chunk_bytes=1 << 16,
            )
            assert (await worker.call(CALL_S, RolloutWorker.refresh, manifest)).served
            tickets = [await buffer.call(CALL_S, Buffer.admit, 1.0) for _ in range(groups)]
            await asyncio.gather(*(worker.call(CALL_S, RolloutWorker.run_group, ticket) for ticket in tickets))
            take = await buffer.call(CALL_S, Buffer.take, 0, 1.0)
            played = await buffer.call(CALL_S, Buffer.fetch, take.groups)
            look = await worker.call(CALL_S, RolloutWorker.evaluate, 0, 8)
            return played, look, await worker.call(CALL_S, RolloutWorker.report)
        finally:
            await runtime.close()
            carrier.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def inline(tmp_path_factory, model):
    return play(tmp_path_factory.mktemp("inline"), model, kind="inline")


def test_log_probabilities_and_experts_are_the_models_own(model, inline):
    groups, look, report = inline
    decoder = load_folder(model)
    episodes = [episode for group in groups for episode in group.episodes]
    assert max(len(episode.turns) for episode in episodes) == 6  # prompt, then three times the model, twice the env
    assert report.stops.keys() == {"stop", "length"}
    for episode in episodes:
        assert not episode.failed
        (own,) = probe_logprobs(decoder, [episode.tokens])
        trained = episode.trained[1:]
        assert np.abs(episode.logprobs[1:] - own)[trained].max() < 1e-4
        assert (episode.routes == routes_of(decoder, episode.tokens)).mean() > 0.999  # a near tie may fall either way
    assert (look.count, look.failed) == (8, 0)
    assert report.engine.shared_tokens > 0  # episodes of a group, and turns of an episode, share their beginnings
    assert report.engine.running == 0


def test_the_same_run_gives_the_same_episodes(tmp_path, model, inline):
    groups, look, _ = inline
    again, look_again, _ = play(tmp_path, model, kind="inline")
    for group, other in zip(groups, again, strict=True):
        for one, two in zip(group.episodes, other.episodes, strict=True):
            assert one.tokens.tolist() == two.tokens.tolist()
            assert one.logprobs.tolist() == two.logprobs.tolist()
    assert look == look_again


def test_in_a_process_of_its_own_with_the_engine_on_a_thread_the_tokens_are_the_same(tmp_path, model, inline):
    groups, _, _ = inline
    apart, _, report = play(tmp_path, model, kind="local")
    tokens = [[episode.tokens.tolist() for episode in group.episodes] for group in groups]
    assert [[episode.tokens.tolist() for episode in group.episodes] for group in apart] == tokens
    assert report.engine.seconds.keys() >= {"idle"}


def routes_of(decoder, tokens):
    """Experts of all tokens but the last, from one forward pass."""
    tokens_T = torch.from_numpy(tokens[:-1].astype(np.int64))
    tape = RouterTape()
    with torch.no_grad():
        decoder(tokens_T, torch.arange(len(tokens_T)), PackedPlan.of([0, len(tokens_T)], "cpu"), tape=tape)
    return tape.routes().numpy()
