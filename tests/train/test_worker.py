"""The trainer as the loop sees it: a real buffer, a real carrier, both runtimes."""

import asyncio
import dataclasses
import json
import math
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from contraflow import config
from contraflow.buffer.service import Buffer, make_buffer
from contraflow.errors import CheckpointError, ConfigError, ContraflowError, RoutesError
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import load_folder, save_folder
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.runtime.inline import InlineRuntime
from contraflow.telemetry import read_journal
from contraflow.train.worker import Place, Trainer, make_trainer
from contraflow.types import Take, Version
from contraflow.weights import open_carrier
from contraflow.weights.fetch import fetch
from contraflow.weights.probe import check_probe, probe_logprobs
from tests.train.cutting import saved

TRAIN = config.Train(learning_rate=1e-2, warmup_updates=2)
WEIGHTS = config.Weights(carrier="blob", chunk_bytes=4096)  # in the run folder, so nothing is left on the machine
P, LINE = 3, 0  # groups a step, and the line of a run's first history


@dataclasses.dataclass
class Bench:
    """A buffer with groups put into it, and a trainer beside it."""

    runtime: object
    folder: object
    place: Place
    buffer: object
    make_group: object
    make_episode: object
    trainer: object = None
    gang: object = None

    async def start(self, name="trainer", *, train=TRAIN, loss=None, weights=WEIGHTS, **place):
        gang = await self.runtime.start_gang(
            name,
            1,
            make_trainer,
            train=train,
            loss=loss or config.Loss(),
            weights=weights,
            place=msgspec.structs.replace(self.place, **place),
            buffer=self.buffer.address,
        )
        self.trainer, self.gang = gang.refs[0], gang
        return self.trainer

    async def save(self, step):
        return await saved(self.gang, step)

    async def pose(self, version):
        """P tickets whose engine serves `version`."""
        tickets = [await self.buffer.call(5, Buffer.admit, 1.0) for _ in range(P)]
        for ticket in tickets:
            await self.buffer.call(5, Buffer.started, ticket.group, ticket.attempt, Version(LINE, version))
        return tickets

    async def put(self, tickets, versions, *, spoil=lambda episode: episode):
        """Made-up episodes for each ticket, sampled by `versions` in equal shares."""
        for ticket in tickets:
            seeds = range(10 * ticket.group, 10 * ticket.group + 4)
            plain = [self.make_episode(8, reward=float(s % 2), seed=s, versions=versions, line=LINE) for s in seeds]
            episodes = [spoil(episode) for episode in plain]
            group = self.make_group(episodes, index=ticket.group, attempt=ticket.attempt, line=ticket.line)
            await self.buffer.call(5, Buffer.put, group)

    async def feed(self, step, **how):
        """Play P groups with the version of `step` and take them for it."""
        await self.put(await self.pose(step), (step,), **how)
        return await self.buffer.call(5, Buffer.take, step, 1.0)

    async def step(self, step, **how):
        return await self.train(await self.feed(step, **how))

    async def train(self, take):
        report = await self.trainer.call(20, Trainer.step, take)
        step = take.step
        await self.buffer.call(5, Buffer.trained, step, report.manifest.version)
        await self.buffer.call(5, Buffer.served, report.manifest.version)
        return report

    def weights(self, manifest):
        return {n: t.clone() for n, t in fetch(manifest, open_carrier(WEIGHTS, self.folder)).tensors.items()}


@pytest.fixture
def bench(tmp_path, model_folder, make_group, make_episode):
    """`await bench(runtime)` gives a Bench; `bench.run(body)` runs a coroutine on an inline runtime."""

    async def opened(runtime, name="run", buffer_section=None):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        buffer = await runtime.start(
            f"buffer-{name}",
            make_buffer,
            buffer=buffer_section or config.Buffer(groups_per_step=P, max_age=0),
            folder=str(folder),
            resume_step=None,
        )
        place = Place(
            model_folder=str(model_folder),
            run_folder=str(folder),
            seed=3,
            line=await buffer.call(5, Buffer.line),
            temperature=1.0,
            keep_episodes=2,
        )
        return Bench(runtime, folder, place, buffer, make_group, make_episode)

    return opened


def inline(body):
    async def whole():
        runtime = InlineRuntime(time.monotonic)
        try:
            return await body(runtime)
        finally:
            await runtime.close()

    return asyncio.run(whole())


def spoiled(episode, **fields):
    return msgspec.structs.replace(episode, **fields)


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_step_trains_publishes_the_next_version_and_reports(bench, model_folder):
    async def body(runtime):
        here = await bench(runtime)
        await here.start()
        first = await here.trainer.call(5, Trainer.publish, 0)
        assert (first.version, first.parent) == (Version(LINE, 0), None)
        assert equal(here.weights(first), load_folder(model_folder).state_dict())
        report = await here.step(0)
        assert report.manifest.version == Version(LINE, 1)
        assert report.manifest.parent == Version(LINE, 0)
        assert not equal(here.weights(report.manifest), here.weights(first))
        assert (report.applied, report.fault, report.updates) == (True, "", 1)
        assert (report.groups, report.episodes, report.failed) == (P, 4 * P, 0)
        assert (report.reward, report.parts) == (0.5, {"correct": 0.5})
        assert report.trained_tokens == 6 * 4 * P
        assert (report.age_mean, report.age_max) == (0.0, 0)
        assert report.grad_norm > 0
        assert report.entropy > 0
        assert np.array(report.expert_loads).sum(1).tolist() == [2 * 7 * 4 * P] * 2
        json.dumps(msgspec.to_builtins(report, enc_hook=np.ndarray.tolist), allow_nan=False)
        told = await here.trainer.call(5, Trainer.report)
        assert (told.doing, told.steps, told.refused, told.updates) == ("wait", 1, 0, 1)
        assert {"wait", "fetch", "batch", "forward", "backward", "optimizer", "publish"} <= told.seconds.keys()

    inline(body)


def test_a_published_version_carries_the_proof_of_its_own_weights(bench, model_folder):
    async def body(runtime):
        here = await bench(runtime)
        await here.start()
        await here.trainer.call(5, Trainer.publish, 0)
        manifest = (await here.step(0)).manifest
        twin = load_folder(model_folder)
        twin.load_state_dict(here.weights(manifest))
        check_probe(manifest.probe, probe_logprobs(twin, manifest.probe.prompts))

    inline(body)


def test_only_the_newest_versions_stay_on_the_carrier(bench):
    async def body(runtime):
        here = await bench(runtime)
        await here.start()
        for n in range(7):
            await here.trainer.call(5, Trainer.publish, n)
        assert open_carrier(WEIGHTS, here.folder).versions() == [Version(LINE, n) for n in (3, 4, 5, 6)]

    inline(body)


def test_sampled_episodes_are_written_for_the_report(bench):
    async def body(runtime):
        here = await bench(runtime)
        await here.start()
        for step in range(2):
            await here.step(step)
        return read_journal(here.folder / "episodes.jsonl")

    records = inline(body)
    assert [(r["step"], r["group"]) for r in records] == [(0, 0), (0, 2), (1, 3), (1, 5)]


def test_the_same_seed_gives_the_same_weights(bench):
    async def body(runtime):
        ends = []
        for name in ("one", "two"):
            here = await bench(runtime, name)
            await here.start(f"trainer-{name}", train=config.Train(updates=2, epochs=2))
            for step in range(3):
                manifest = (await here.step(step)).manifest
            ends.append(manifest.digests)
        assert ends[0] == ends[1]

    inline(body)


def recorded(episode, *, layers=2, hole=0):
    """The episode with experts that an engine might have recorded, none for its first `hole` tokens."""
    chance = np.random.default_rng(episode.seed).random((episode.tokens.size - 1, layers, 4))
    routes = chance.argsort(-1)[..., :2].astype(np.uint8)
    routes[:hole] = 0
    return spoiled(episode, routes=routes)


def test_recorded_experts_are_replayed_and_told(bench):
    async def body(runtime):
        here = await bench(runtime)
        await here.start(train=TRAIN.model_copy(update={"routing": "r3", "missing_routes": "own"}))
        report = await here.step(0, spoil=lambda episode: recorded(episode, hole=2))
        assert (report.applied, report.replayed_tokens, report.routes_missing) == (True, 5 * 4 * P, 2 * 4 * P)
        assert len(report.routes_differ) == len(report.first_differs) == 2
        assert 0.3 < min(report.routes_differ) <= max(report.routes_differ) < 1  # of random ones
        json.dumps(msgspec.to_builtins(report, enc_hook=np.ndarray.tolist), allow_nan=False)

    inline(body)


def test_samples_without_experts_are_left_out_where_the_recipe_says_so(bench):
    async def body(runtime):
        here = await bench(runtime)
        await here.start(train=TRAIN.model_copy(update={"routing": "r3", "missing_routes": "drop"}))
        report = await here.step(0, spoil=lambda episode: recorded(episode, hole=int(episode.seed % 4 == 3)))
        assert (report.replayed_tokens, report.routes_missing, report.routes_dropped) == (7 * 3 * P, P, P)
        assert (report.episodes, report.trained_tokens) == (4 * P, 6 * 3 * P)

    inline(body)


@pytest.mark.parametrize(
    ("missing", "spoil", "says"),
    [
        ("own", lambda episode: recorded(episode, layers=3), "the experts of episode 0 of group 0 are of shape"),
        ("refuse", lambda episode: recorded(episode, hole=1), "train.missing_routes = 'refuse'"),
    ],
)
def test_experts_that_cannot_be_replayed_end_the_step_before_it_begins(bench, missing, spoil, says):
    async def body(runtime):
        here = await bench(runtime)
        trainer = await here.start(train=TRAIN.model_copy(update={"routing": "r3", "missing_routes": missing}))
        before = here.weights(await trainer.call(5, Trainer.publish, 0))
        with pytest.raises(RoutesError, match=says):
            await here.step(0, spoil=spoil)
        assert equal(here.weights(await trainer.call(5, Trainer.publish, 1)), before)

    inline(body)


def test_a_run_with_frozen_routers_goes_on_from_a_cut_of_its_own(bench):
    async def body(runtime):
        here = await bench(runtime)
        train = TRAIN.model_copy(update={"freeze_router": True})
        await here.start(train=train)
        router = "layers.1.mlp.router.weight"
        first = here.weights(await here.trainer.call(5, Trainer.publish, 0))
        await here.step(0)
        cut = await here.save(1)
        await here.start("again", train=train, resume=cut)
        now = here.weights(await here.trainer.call(5, Trainer.publish, 1))
        assert torch.equal(now[router], first[router])
        assert not torch.equal(now["layers.1.mlp.down"], first["layers.1.mlp.down"])

    inline(body)


def test_compiled_blocks_teach_the_same(bench):
    async def body(runtime):
        reports = []
        for compile_ in ("none", "blocks"):
            here = await bench(runtime, name=compile_)
            await here.start(f"trainer-{compile_}", train=TRAIN.model_copy(update={"compile": compile_}))
            await here.trainer.call(5, Trainer.publish, 0)
            reports.append(await here.step(0))
        plain, compiled = reports
        assert compiled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
        assert compiled.entropy == pytest.approx(plain.entropy, rel=1e-5)

    with torch.compiler.set_stance("force_eager"):  # the pieces as they are written: compiling takes a minute
        inline(body)


@pytest.mark.parametrize("critic", [None, config.Critic(warmup_steps=1), config.Critic(trunk="shared")])
def test_a_resumed_run_goes_on_bit_for_bit(bench, critic):
    async def body(runtime):
        here = await bench(runtime)
        train = config.Train(updates=2, epochs=2, learning_rate=1e-2)
        of = {"train": train, "critic": critic, "loss": config.Loss(advantages="gae" if critic else "grpo")}
        await here.start(**of)
        for step in range(2):
            await here.step(step)
        cut = await here.save(2)
        take = await here.feed(2)
        straight = await here.trainer.call(20, Trainer.step, take)
        await runtime.stop("trainer")
        await here.start("resumed", resume=cut, line=LINE + 1, **of)
        start = await here.trainer.call(5, Trainer.publish, 2)
        assert start.version == Version(LINE + 1, 2)
        again = await here.trainer.call(20, Trainer.step, take)
        assert again.manifest.version == Version(LINE + 1, 3)
        assert again.manifest.digests == straight.manifest.digests
        for name in ("loss", "learning_rate", "value_loss", "critic_grad_norm", "explained_variance", "values_version"):
            assert getattr(again, name) == getattr(straight, name)
        warmed = 4 if critic is not None and critic.warmup_steps else 0
        assert (await here.trainer.call(5, Trainer.report)).updates == 12 - warmed
        assert (again.critic_updates, again.values_version) == ((4, 2) if critic else (0, -1))

    inline(body)


@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_critic_on_loan_to_the_host_between_steps_changes_nothing(bench, trunk, offload):
    async def body(runtime):
        digests = []
        for name, section in (("stays", TRAIN), ("goes", TRAIN.model_copy(update={"offload": offload}))):
            here = await bench(runtime, name)
            loss, critic = config.Loss(advantages="gae"), config.Critic(trunk=trunk)
            await here.start(f"trainer-{name}", train=section, loss=loss, critic=critic)
            reports = [await here.step(step) for step in range(2)]
            digests.append(reports[-1].manifest.digests)
        assert digests[0] == digests[1]

    inline(body)


@pytest.mark.parametrize(
    ("had", "wanted", "says"),
    [
        (None, config.Critic(), "holds no critic"),
        (config.Critic(trunk="shared"), config.Critic(), "a critic with trunk = 'shared'"),
        (config.Critic(), config.Critic(trunk="shared"), "a critic with trunk = 'own'"),
    ],
)
def test_a_cut_without_the_critic_that_is_asked_for_is_refused(bench, had, wanted, says):
    async def body(runtime):
        here = await bench(runtime)
        gae = config.Loss(advantages="gae")
        await here.start(loss=gae if had else config.Loss(), critic=had)
        cut = await here.save(0)
        await runtime.stop("trainer")
        with pytest.raises(CheckpointError, match=says):
            await here.start("resumed", resume=cut, loss=gae, critic=wanted)

    inline(body)


def test_an_empty_take_publishes_the_same_weights_again(bench):
    async def body(runtime):
        here = await bench(runtime)
        await here.start()
        first = await here.trainer.call(5, Trainer.publish, 0)
        report = await here.trainer.call(5, Trainer.step, Take(step=0, groups=()))
        assert (report.applied, report.updates, report.trained_tokens, report.groups) == (True, 0, 0, 0)
        assert report.manifest.version == Version(LINE, 1)
        assert report.manifest.digests == first.digests

    inline(body)


def test_equal_rewards_teach_nothing_and_still_end_in_a_version(bench):
    async def body(runtime):
        here = await bench(runtime, buffer_section=config.Buffer(groups_per_step=P, max_age=0, no_signal="keep"))
        await here.start()
        first = await here.trainer.call(5, Trainer.publish, 0)
        report = await here.step(0, spoil=lambda episode: spoiled(episode, reward=1.0))
        assert (report.applied, report.updates, report.reward) == (True, 0, 1.0)
        assert report.trained_tokens == 6 * 4 * P
        assert report.manifest.digests == first.digests

    inline(body)


@pytest.mark.parametrize("field", ["reward", "logprobs"])
def test_a_batch_with_nan_is_set_aside_and_the_version_holds_the_weights_of_before(bench, field):
    def poison(episode):
        if field == "reward":
            return spoiled(episode, reward=math.nan if episode.reward else 0.0)
        return spoiled(episode, logprobs=np.where(episode.trained, np.float32(math.nan), np.float32(0)))

    async def body(runtime):
        here = await bench(runtime)
        await here.start()
        good = await here.step(0)
        bad = await here.step(1, spoil=poison)
        assert (bad.applied, bad.updates, bad.loss) == (False, 0, 0.0)
        assert ("reward" if field == "reward" else "behaviour") in bad.fault
        assert bad.manifest.version == Version(LINE, 2)
        assert bad.manifest.digests == good.manifest.digests
        with np.load(bad.bad_batch) as stored:
            assert str(stored["fault"]) == bad.fault
            assert np.isnan(stored["0.advantages" if field == "reward" else "0.behaviour"]).any()
        json.dumps(msgspec.to_builtins(bad, enc_hook=np.ndarray.tolist), allow_nan=False)
        assert (await here.step(2)).applied
        told = await here.trainer.call(5, Trainer.report)
        assert (told.steps, told.refused, told.updates) == (3, 1, 2)

    inline(body)


def test_failed_episodes_are_counted_and_not_trained(bench):
    async def body(runtime):
        here = await bench(runtime)
        await here.start()
        broken = {0, 5}

        def break_some(episode):
            return spoiled(episode, error="the grader raised") if episode.seed % 10 in broken else episode

        report = await here.step(0, spoil=break_some)
        assert (report.episodes, report.failed) == (3 * P, P)
        assert report.trained_tokens == 6 * 3 * P

    inline(body)


def test_ages_are_those_of_the_tokens(bench):
    async def body(runtime):
        here = await bench(runtime, buffer_section=config.Buffer(groups_per_step=P, max_age=2))
        await here.start()
        early = await here.pose(0)
        await here.step(0)  # with three more groups
        await here.put(early, (0, 1))
        report = await here.train(await here.buffer.call(5, Buffer.take, 1, 1.0))
        assert (report.age_mean, report.age_max) == (0.5, 1)

    inline(body)


def test_groups_that_were_not_taken_are_refused_before_anything_moves(bench):
    async def body(runtime):
        here = await bench(runtime)
        await here.start()
        take = await here.feed(0)
        wrong = msgspec.structs.replace(take.groups[0], attempt=7)
        with pytest.raises(ContraflowError, match="7"):
            await here.trainer.call(5, Trainer.step, Take(step=0, groups=(wrong, *take.groups[1:])))
        assert (await here.trainer.call(20, Trainer.step, take)).applied

    inline(body)


def test_a_kl_run_keeps_its_reference_over_a_resume(bench):
    async def body(runtime):
        here = await bench(runtime)
        loss = config.Loss(kl_weight=0.1)
        await here.start(loss=loss)
        assert (await here.step(0)).kl == pytest.approx(0, abs=1e-7)  # the policy is still the reference
        cut = await here.save(1)
        await runtime.stop("trainer")
        await here.start("resumed", loss=loss, resume=cut)
        assert (await here.step(1)).kl > 1e-4

    inline(body)


def test_a_checkpoint_of_another_model_and_a_gang_of_two_are_refused(bench, tmp_path, model_folder):
    async def body(runtime):
        here = await bench(runtime)
        await here.start()
        cut = await here.save(0)
        await runtime.stop("trainer")
        other, tree = tmp_path / "other", load_folder(model_folder).config.to_hf()
        save_folder(new_decoder(ModelConfig.from_hf(tree | {"num_hidden_layers": 1}), seed=0), other)
        build_char_tokenizer(other, "0123456789+-=")
        with pytest.raises(CheckpointError, match="the recipe's model"):
            await here.start("second", resume=cut, model_folder=str(other))
        with pytest.raises(ConfigError, match="2 ranks"):
            await runtime.start_gang(
                "pair",
                2,
                make_trainer,
                train=TRAIN,
                loss=config.Loss(),
                weights=WEIGHTS,
                place=here.place,
                buffer=here.buffer.address,
            )

    inline(body)


def test_a_threaded_trainer_answers_while_it_trains_and_computes_the_same(bench):
    async def body(runtime):
        ends, seen = [], set()
        for name, threaded in (("alone", False), ("beside", True)):
            here = await bench(runtime, name)
            await here.start(f"trainer-{name}", train=config.Train(epochs=20), threaded=threaded)
            take = await here.feed(0)
            working = asyncio.ensure_future(here.trainer.call(60, Trainer.step, take))
            while not (await asyncio.wait({working}, timeout=0.005))[0]:  # without a pause, asking starves the thread
                seen.add((name, (await here.trainer.call(5, Trainer.report)).doing))
            ends.append((await working).manifest.digests)
        assert ends[0] == ends[1]
        assert seen & {("beside", "forward"), ("beside", "backward")}
        assert not seen & {("alone", "forward"), ("alone", "backward")}

    inline(body)


def test_weights_travel_in_the_dtypes_that_an_engine_in_bf16_holds(bench):
    async def body(runtime):
        b = await bench(runtime)
        whole = config.Weights(carrier="blob", dtype="bfloat16")
        trainer = await b.start(weights=whole)
        manifest = await trainer.call(20, Trainer.publish, 0)
        found = fetch(manifest, open_carrier(whole, b.folder)).tensors
        wanted = load_folder(Path(b.place.model_folder), dtype=torch.bfloat16).state_dict()
        assert equal(found, wanted)
        assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in wanted.items()}
        assert found["lm_head"].dtype == torch.float32
        await trainer.call(20, Trainer.close)

    inline(body)
