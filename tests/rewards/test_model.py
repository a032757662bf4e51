"""The reward model as a part: in place, and from a process of its own that dies, comes back, and answers in batches."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from contraflow.config import check_recipe
from contraflow.config.preference import Scorer as Section
from contraflow.errors import ConfigError, ModelError, ScorerError
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.reward import RewardModel, Scale, load_reward_model, save_reward_model
from contraflow.model.tokenizer import Tokenizer, build_char_tokenizer
from contraflow.model.value import ValueHead
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.model import Asked, InPlace, Unasked
from contraflow.rewards.registry import open_mix
from contraflow.rewards.scorer import Scorer, make_scorer, open_model
from contraflow.runtime.local import LocalRuntime
from contraflow.types import StopReason, Task

TASK = Task(key="train/0", prompt="1+1=", reference="2")
SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 14,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def said(text, stop=StopReason.STOP):
    return Transcript((Said("prompt", TASK.prompt), Said("model", text)), stop)


def answers(count, seed=0):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("0123456789"), rng.integers(1, 20))) for _ in range(count)]


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "model"
    tokenizer = build_char_tokenizer(place, "0123456789+=")
    decoder = new_decoder(ModelConfig.from_hf(SHAPE), seed=0, std=0.3)
    head = ValueHead(16)
    with torch.no_grad():
        head.weight.copy_(torch.randn(16, generator=torch.Generator().manual_seed(0)))
    assert tokenizer.size == 14
    save_reward_model(RewardModel(decoder, head), Scale(mean=0.5, std=0.25), place)
    return place


def scorer_of(section):
    return Scorer(*open_model(section), Tokenizer.load(Path(section.folder)), section, digest="0" * 16)


def test_the_part_is_the_head_in_spreads_from_the_mean_and_clipped(folder):
    part = InPlace(Section(folder=str(folder), clip=1.0))
    model, _ = load_reward_model(folder)
    tokenizer = Tokenizer.load(folder)
    for text in answers(20):
        with torch.no_grad():
            value = float(model([[*tokenizer.encode(TASK.prompt + text), tokenizer.eos]]))
        assert part(TASK, said(text)) == pytest.approx(max(-1, min(1, (value - 0.5) / 0.25)), abs=1e-5)


def test_an_answer_that_was_cut_off_earns_the_least(folder):
    assert InPlace(Section(folder=str(folder), clip=3.0))(TASK, said("2", StopReason.LENGTH)) == -3.0


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_many_at_once_get_what_each_gets_alone_in_few_passes(folder, batch):
    section = Section(folder=str(folder), batch=batch, gather_s=0.05)
    alone = InPlace(section)

    async def ask():
        scorer = scorer_of(section)
        found = await asyncio.gather(*(scorer.score(said(text).turns) for text in answers(50)))
        return found, await scorer.report()

    found, report = asyncio.run(ask())
    assert found == pytest.approx([alone(TASK, said(text)) for text in answers(50)], abs=1e-5)
    assert (report.scored, report.passes) == (50, -(-50 // batch))


@pytest.mark.parametrize(("text", "why"), [("x", "cannot read it"), ("1" * 50, "a conversation of 55 tokens")])
def test_what_it_cannot_read_is_an_error_of_that_question_alone(folder, text, why):
    section = Section(folder=str(folder), max_tokens=40)

    async def ask():
        scorer = scorer_of(section)
        return await asyncio.gather(
            *(scorer.score(said(one).turns) for one in ("1", text, "2")), return_exceptions=True
        )

    first, second, third = asyncio.run(ask())
    assert isinstance(first, float)
    assert isinstance(third, float)
    with pytest.raises(ScorerError, match=why):
        raise second
    with pytest.raises(ScorerError, match=why):
        Unasked(section)(TASK, said(text))


def test_a_model_that_gives_no_number_is_an_error(folder):
    async def ask():
        scorer = scorer_of(Section(folder=str(folder)))
        scorer._model.head.bias.data.fill_(float("nan"))
        await scorer.score(said("1").turns)

    with pytest.raises(ScorerError, match="gave nan"):
        asyncio.run(ask())


def test_a_question_that_was_given_up_does_not_hold_up_others(folder):
    async def ask():
        scorer = scorer_of(Section(folder=str(folder), gather_s=0.05))
        lost = asyncio.ensure_future(scorer.score(said("1").turns))
        kept = asyncio.ensure_future(scorer.score(said("2").turns))
        await asyncio.sleep(0)
        lost.cancel()
        return await kept, (await scorer.report()).scored

    value, scored = asyncio.run(ask())
    assert isinstance(value, float)
    assert scored == 1


def test_a_part_without_a_reward_model_is_refused(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"reward\.model\.folder is empty"):
        open_mix(check_recipe({"reward": {"parts": {"model": 1.0}}}).reward)
    with pytest.raises(ConfigError, match="no such folder"):
        Unasked(Section(folder=str(tmp_path / "nowhere")))
    (folder / "reward.json").unlink()
    with pytest.raises(ModelError, match="no reward model"):
        Unasked(Section(folder=str(folder)))


def test_rewards_that_would_be_given_up_too_early_are_refused():
    with pytest.raises(ConfigError, match=r"reward\.model\.deadline_s = 20"):
        check_recipe({"reward": {"parts": {"model": 1.0}, "model": {"deadline_s": 20.0}}})


@pytest.mark.usefixtures("fork_server")
def test_two_workers_share_one_process_that_may_die_and_come_back(folder, tmp_path):
    section = Section(folder=str(folder), deadline_s=30.0)
    expected = InPlace(section)

    async def scene():
        runtime = LocalRuntime(tmp_path)
        try:
            first = await runtime.start("reward-model", make_scorer, section=section)
            digest = (await first.call(10, Scorer.report)).digest
            parts = [Asked(section, lambda address: refs[address], time.monotonic) for _ in range(2)]
            refs = {first.address: first}
            for part in parts:
                part.meet(first.address)
            with ThreadPoolExecutor(16) as threads:
                events = asyncio.get_running_loop()

                def ask(texts):
                    calls = [(parts[i % 2], text) for i, text in enumerate(texts)]
                    return [events.run_in_executor(threads, part, TASK, said(text)) for part, text in calls]

                before = await asyncio.gather(*ask(answers(20)))
                runtime.kill("reward-model")
                await runtime.next_death()
                waiting = ask(answers(10, seed=1))
                second = await runtime.start("reward-model", make_scorer, section=section)
                refs[second.address] = second
                for part in parts:
                    part.meet(second.address)
                after = await asyncio.gather(*waiting)
            assert (await second.call(10, Scorer.report)).digest == digest
            return before, after
        finally:
            await runtime.close()

    before, after = asyncio.run(scene())
    assert before == pytest.approx([expected(TASK, said(text)) for text in answers(20)], abs=1e-5)
    assert after == pytest.approx([expected(TASK, said(text)) for text in answers(10, seed=1)], abs=1e-5)


def test_a_process_that_stays_away_costs_the_question_and_says_so(folder):
    async def scene():
        part = Asked(Section(folder=str(folder), deadline_s=0.05), lambda address: None, time.monotonic)
        return await asyncio.to_thread(part, TASK, said("1"))

    with pytest.raises(ScorerError, match="was not there in time"):
        asyncio.run(scene())
