"""A trainer of several ranks, as the loop sees it: it reports, publishes, saves and refuses as one rank does."""

import asyncio
import math
import time

import msgspec
import numpy as np
import pytest
import torch

from contraflow import config
from contraflow.buffer.service import Buffer, make_buffer
from contraflow.errors import ConfigError, WorkerDied
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import copy_companions, load_folder, save_folder
from contraflow.runtime.local import LocalRuntime
from contraflow.train import lab
from contraflow.train.worker import Place, Trainer, make_trainer
from contraflow.types import Version
from contraflow.weights import open_carrier
from contraflow.weights.fetch import fetch
from contraflow.weights.probe import check_probe, probe_logprobs
from tests.train.cutting import saved

pytestmark = [
    pytest.mark.usefixtures("fork_server"),
    pytest.mark.timeout(300),  # several processes; on a busy machine they wait for each other
]
WEIGHTS = config.Weights(carrier="blob", chunk_bytes=4096)
LOSS = config.Loss(kl_weight=0.1, balance_weight=0.01)
LOOK = lab.Bench(tokens=30, versions=3, temperature=1.5, keeps_cache=True, seed=3, tokens_per_batch=40)
CALL_S = 60
GROUPS = 3


class Bench:
    """A buffer with takes of made-up groups, and trainers of any layout started beside it, one after the other."""

    def __init__(self, runtime, folder, model, make_group, make_episode):
        self.runtime, self.folder, self.model = runtime, folder, str(model)
        self.make_group, self.make_episode = make_group, make_episode
        self.started = 0

    async def open(self):
        section = config.Buffer(groups_per_step=GROUPS, max_age=2)
        self.buffer = await self.runtime.start(
            "buffer", make_buffer, buffer=section, folder=str(self.folder), resume_step=None
        )

    async def take(self, step, *, spoil=lambda episode: episode):
        tickets = [await self.buffer.call(5, Buffer.admit, 1.0) for _ in range(GROUPS)]
        for ticket in tickets:
            await self.buffer.call(5, Buffer.started, ticket.group, ticket.attempt, Version(0, 0))
            seeds = range(10 * ticket.group, 10 * ticket.group + 4)
            lengths = [4 + seed % 5 for seed in seeds]
            episodes = [
                spoil(self.make_episode(n, reward=float(s % 2), seed=s, line=0))
                for n, s in zip(lengths, seeds, strict=True)
            ]
            group = self.make_group(episodes, index=ticket.group, attempt=ticket.attempt, line=ticket.line)
            await self.buffer.call(5, Buffer.put, group)
        return await self.buffer.call(5, Buffer.take, step, 1.0)

    async def start(self, ranks=None, looks=False, **parallel):
        layout = config.Parallel(**parallel)
        self.started += 1
        run = self.folder / f"trainer{self.started}"
        run.mkdir()
        place = Place(
            model_folder=self.model,
            run_folder=str(run),
            seed=3,
            line=0,
            temperature=1.5,
            keep_episodes=2,
            threaded=True,
            bench=LOOK if looks else None,
        )
        return await self.runtime.start_gang(
            f"trainer{self.started}",
            ranks or layout.ranks,
            make_trainer,
            train=config.Train(learning_rate=1e-3, updates=2, tokens_per_batch=40, parallel=layout),
            loss=LOSS,
            weights=WEIGHTS,
            place=place,
            buffer=self.buffer.address,
        )


def weights(folder, manifest):
    return {n: t.clone() for n, t in fetch(manifest, open_carrier(WEIGHTS, folder)).tensors.items()}


@pytest.fixture
def bench(tmp_path, model_folder, make_group, make_episode):
    """`bench(body)` runs a coroutine on a Bench whose workers are processes."""
    wide, narrow = tmp_path / "wide", load_folder(model_folder).config.to_hf()
    save_folder(new_decoder(ModelConfig.from_hf(narrow | {"num_key_value_heads": 2}), seed=2, std=0.1), wide)
    copy_companions(model_folder, wide)
    (tmp_path / "run").mkdir()

    def run(body):
        async def whole():
            runtime = LocalRuntime(tmp_path, preload=("torch", "contraflow.train.worker"), stop_s=2.0)
            here = Bench(runtime, tmp_path / "run", wide, make_group, make_episode)
            try:
                await here.open()
                return await body(here)
            finally:
                await runtime.close()

        return asyncio.run(whole())

    return run


def numbers(report):
    skipped = {"manifest", "seconds", "bad_batch", "mismatch"}
    found = {k: v for k, v in msgspec.structs.asdict(report).items() if k not in skipped}
    if report.mismatch is None:
        return found
    looked = msgspec.structs.asdict(report.mismatch)
    parts = {f"{cause}.{k}": v for cause, part in looked.pop("parts").items() for k, v in part.items()}
    return found | {f"mismatch.{k}": v for k, v in (looked | parts).items()}


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == (pytest.approx(value, rel=2e-5, abs=1e-7) if isinstance(value, float) else value), name


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "ep": 2},
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "ep": 2, "recompute": "layer"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_report_publish_and_save_as_one(bench, layout):
    def spoil(episode):
        return msgspec.structs.replace(episode, reward=math.nan if episode.reward else 0.0)

    async def body(here):
        looks = "pp" not in layout
        trainers = [await here.start(looks=looks), await here.start(looks=looks, **layout)]
        folders = [here.folder / "trainer1", here.folder / "trainer2"]
        reports, published, cuts = ([], []), ([], []), []
        for trainer, folder, mine in zip(trainers, folders, published, strict=True):
            mine.append(weights(folder, (await trainer.call(CALL_S, Trainer.publish, 0))[0]))
        for step in range(3):
            take = await here.take(step, spoil=spoil if step == 2 else lambda episode: episode)
            for place, trainer in enumerate(trainers):
                report, *others = await trainer.call(CALL_S, Trainer.step, take)
                assert others == [None] * place
                reports[place].append(report)
                published[place].append(weights(folders[place], report.manifest))
                if step == 1:
                    cuts.append(await saved(trainer, 2))
            await here.buffer.call(5, Buffer.trained, step, Version(0, step + 1))
        for trainer in trainers:
            told = await trainer.call(CALL_S, Trainer.report)
            assert {(one.steps, one.refused, one.updates) for one in told} == {(3, 1, 4)}
        (wanted, found), (known, held), cut = reports, published, cuts[1]
        for one, two in zip(wanted, found, strict=True):
            close(numbers(two), numbers(one))
        assert [report.applied for report in found] == [True, True, False]
        assert [report.mismatch is not None for report in found] == [looks] * 3
        assert "a reward was not" in found[2].fault
        with np.load(found[2].bad_batch) as stored:
            assert np.isnan(stored["0.advantages"]).any()
        for one, two in zip(known, held, strict=True):
            assert max(float((two[n] - one[n]).norm() / one[n].norm()) for n in one) < 1e-5
        assert all(torch.equal(held[3][name], held[2][name]) for name in held[2])  # a refused step moves nothing
        await trainers[1].refs[0].call(CALL_S, Trainer.export, cut, str(here.folder / "exported"))
        twin = load_folder(here.folder / "exported")
        assert all(torch.equal(held[2][name], weight) for name, weight in twin.state_dict().items())
        probe = found[1].manifest.probe
        check_probe(probe, probe_logprobs(twin, probe.prompts))

    bench(body)


def test_a_rank_that_dies_ends_the_others_at_once_and_is_named(bench):
    async def body(here):
        take = await here.take(0)
        trainer = await here.start(dp=2, ep=2)
        began = time.monotonic()
        working = [asyncio.ensure_future(ref.call(CALL_S, Trainer.step, take)) for ref in trainer.refs[:1]]
        await asyncio.sleep(0.3)  # rank 0 is in an exchange that rank 1 never enters
        here.runtime.kill("trainer1-1")
        with pytest.raises(WorkerDied, match="trainer1-1"):
            await asyncio.gather(*working)
        assert (await here.runtime.next_death()).worker == "trainer1-1"
        assert time.monotonic() - began < 10

    bench(body)


def test_a_trainer_of_other_ranks_than_its_layout_is_refused(bench):
    async def body(here):
        with pytest.raises(ConfigError, match="of 1 ranks was started"):
            await here.start(ranks=1, dp=2)

    bench(body)
