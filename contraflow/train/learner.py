"""One trainer rank apart from its process: groups in, a published version out; cuts on demand.

Takes the recipe's training sections and a `Place`; gives step reports, manifests and checkpoints. Of several ranks each
does the same with its part of the model, and rank 0 reports, publishes and saves for all. Everything here is
synchronous and runs in one thread. Does not fetch groups or answer calls: that is worker.py.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from contraflow import config
from contraflow.algo.drift import age_report
from contraflow.algo.repetition import repeated_share
from contraflow.cuts import CutSpace
from contraflow.model.decoder import Decoder
from contraflow.model.folder import read_config
from contraflow.model.invariant import open_invariant
from contraflow.model.tokenizer import Tokenizer
from contraflow.parallel.data import at_rest, local
from contraflow.parallel.devices import DTYPES, device_of
from contraflow.parallel.loan import Loan
from contraflow.parallel.mesh import Mesh
from contraflow.parallel.spread import Spread, load_spread
from contraflow.telemetry import Account, Journal
from contraflow.train.batcher import Credit, samples
from contraflow.train.checkpoint import Cut, Snapshot, load
from contraflow.train.crew import open_crew
from contraflow.train.critic import Critic
from contraflow.train.critic_cut import Opened, load_critic, new_critic
from contraflow.train.float8 import raised_experts
from contraflow.train.lab import Bench, Lab
from contraflow.train.optimizer import Optimizer
from contraflow.train.publishing import open_publishing
from contraflow.train.records import episode_records, write_aside
from contraflow.train.report import Mismatch, StepReport
from contraflow.train.routing import Replayed, check_routes, prepare_routers, replayed
from contraflow.train.step import Beside, Outcome, TrainStep
from contraflow.types import Episode, Group, Manifest, Take, Version
from contraflow.weights.probe import as_probe, probe_prompts


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where and for whom a trainer works."""

    model_folder: str  # the run's starting model, and the reference of the KL term
    run_folder: str
    seed: int
    line: int
    temperature: float  # the rollout's
    keep_episodes: int  # groups a step written to RUN/episodes.jsonl
    resume: str | None = None  # the name of a cut to go on from
    writer: str = "alone"  # of cuts: no other start of any run has this name
    proof: config.Compute = "float32"  # the engines' precision, and so that of the log-probabilities they must give
    bitwise: bool = False  # whether engines compute batch-invariantly, and so must the trainer
    critic: config.Critic | None = None  # of PPO, where `loss.advantages` is `gae`
    bench: Bench | None = None  # of looks at where log-ratios come from; None: there are none
    longest: int = 0  # tokens that a sample may have: a batch holds at least one, whatever its budget
    threaded: bool = False  # heavy work in a thread, so that calls are answered meanwhile; off where runs must repeat


class Learner:
    """Invariant: `version n` is published from weights that contain exactly the steps below n of this line.

    With a `mesh` every method is collective, but for `close`; all ranks raise alike where a step is refused.
    """

    def __init__(
        self,
        account: Account,
        *,
        train: config.Train,
        loss: config.Loss,
        weights: config.Weights,
        place: Place,
        cuts: CutSpace,
        mesh: Mesh | None = None,
        engine: config.Engine | None = None,
    ) -> None:
        """`engine`: what versions are served by, which a carrier that sends parts must know; `cuts`: where cuts are."""
        self.account = account
        self.steps = self.refused = 0
        self._train, self._loss, self._weights, self._place = train, loss, weights, place
        self._credit = Credit(loss.advantages, loss.overlong, loss.truncated == "train")
        self._run = Path(place.run_folder)
        self._tokenizer = Tokenizer.load(Path(place.model_folder))
        self._section = (place.critic or config.Critic()) if loss.advantages == "gae" else None
        self._spread, self.optimizer, opened = _open(place, train, weights, cuts, mesh, self._section)
        decoder = self._spread.decoder
        _prepare(decoder, train, bitwise=place.bitwise)
        shared = None if opened is None or opened.trunk is not None else opened.head
        self._crew = open_crew(decoder, mesh, account, temperature=place.temperature, value=shared)
        self._critic = None
        if opened is not None and self._section is not None:
            if opened.trunk is not None:
                _prepare(opened.trunk.decoder, train, bitwise=False)  # no engine has values
            self._critic = Critic(
                self._section, opened.head, train=train, trunk=opened.trunk, crew=self._crew, account=account
            )
            opened.resume(self._critic)
        reference = _reference(place, train, weights, mesh) if loss.kl_weight > 0 else None
        self._step = TrainStep(
            decoder,
            self.optimizer,
            account,
            train=train,
            loss=loss,
            temperature=place.temperature,
            beside=Beside(reference, self._critic),
            crew=self._crew,
        )
        self._prompts = probe_prompts(
            decoder.config.vocab,
            prompts=weights.probe_prompts,
            tokens=weights.probe_tokens,
            seed=place.seed % 2**63,
        )
        self._lab = None if place.bench is None else Lab(decoder, place.bench, self._crew)
        self._loan = Loan(self._lent)
        self.moved_bytes = 0  # to the host and back, since the run began
        self.publishing = open_publishing(
            self._spread, self._crew.team, self._run, train=train, engine=engine or config.Engine(), weights=weights
        )
        self._journal = Journal(self._run / "episodes.jsonl") if self._crew.team.first else None

    def learn(self, take: Take, groups: Sequence[Group]) -> StepReport | None:
        """Train on the groups of a take and publish version `take.step + 1`; the report of it on rank 0.

        A step that could not be applied publishes the weights of before. Raises TrainingError when `groups` are not
        those of the take or a bad batch cannot be written aside, CarrierError or BlobError when publishing fails.
        """
        with self._crew.team.together(f"step {take.step}"), self._at_hand():
            return self._learn(take, groups)

    def publish(self, n: int) -> Manifest | None:
        """Publish the weights as they are, as version `n` of this line; its manifest on rank 0."""
        with self._crew.team.together(f"publishing version {n}"), self._at_hand():
            return self._publish(n)

    def snapshot(self, step: int) -> Snapshot:
        """A copy of what this rank adds to a cut of the state before step `step`; see `Snapshot`."""
        with self._crew.team.together(f"saving before step {step}"), self._at_hand():
            return self._snapshot(step)

    def close(self) -> None:
        """Remove the published versions and close the journal."""
        if self._journal is not None:
            self._journal.close()
        self.publishing.close()

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """What `train.offload` keeps on the host is on the device inside, and goes back to the host behind it."""
        if self._train.offload == "none":
            yield
            return
        with self.account.charge("reload"):
            self.moved_bytes += self._loan.take_back()
        yield  # what fails inside leaves it on the device: whoever looks at the failure finds the state whole
        with self.account.charge("offload"):
            self.moved_bytes += self._loan.lend()

    def _learn(self, take: Take, groups: Sequence[Group]) -> StepReport | None:
        before = self.account.seconds()
        with self.account.charge("batch"):
            if self._train.routing == "r3":
                check_routes(groups, self._spread.config)
            by_group = samples(groups, take.groups, self._credit)
            given = replayed(by_group, self._train.routing, self._train.missing_routes)
            mismatch = self._examine(take.step, groups)
            outcome = self._step.run(given.by_group, step=take.step, seed=self._place.seed)
        bad_batch = ""
        if self._journal is not None:
            with self.account.charge("record"):
                bad_batch = self._set_aside(take.step, outcome) if outcome.fault else ""
                self._record(self._journal, groups, take.step)
        manifest = self._publish(take.step + 1)
        self.steps += 1
        self.refused += bool(outcome.fault)
        if manifest is None:
            return None
        after = self.account.seconds()
        return _report(
            take.step,
            groups,
            given,
            outcome,
            manifest=manifest,
            bad_batch=bad_batch,
            mismatch=mismatch,
            seconds={cause: after[cause] - before.get(cause, 0.0) for cause in after},
        )

    def _publish(self, n: int) -> Manifest | None:
        with self.account.charge("publish"):
            decoder = self._spread.decoder
            with raised_experts(decoder) if self._weights.dtype == "float8" else nullcontext():
                logprobs = self._crew.probe_logprobs(decoder, self._prompts, DTYPES[self._place.proof])
            probe = as_probe(self._prompts, logprobs, self._weights.probe_tolerance)
            version = Version(self._place.line, n)
            if self._lab is not None:
                self._lab.keep(version)
            return self.publishing.publish(version, probe)

    def _examine(self, step: int, groups: Sequence[Group]) -> Mismatch | None:
        """The look before a step, where one is due: the decoder holds version `step`."""
        if self._lab is None or step % self._lab.every:
            return None
        with self.account.charge("mismatch"):
            return self._lab.examine(groups, Version(self._place.line, step))

    def _snapshot(self, step: int) -> Snapshot:
        cut = Cut(
            line=self._place.line,
            step=step,
            updates=self.optimizer.updates,
            seed=self._place.seed,
            model=self._spread.config.digest(),
            recipe=recipe_digest(self._train, self._loss, self._place.temperature, self._section),
        )
        companions = Path(self._place.model_folder)
        with self.account.charge("save"):
            return Snapshot(
                cut, spread=self._spread, optimizer=self.optimizer, companions=companions, critic=self._critic
            )

    def _lent(self) -> list[torch.Tensor]:
        """What goes to the host between steps, on this rank."""
        trained: list[tuple[torch.nn.Module, Optimizer]] = [(self._spread.decoder, self.optimizer)]
        if self._critic is not None:
            trained += self._critic.trained
        tensors = [moment for _, optimizer in trained for moment in optimizer.moments().values() if moment.ndim]
        if self._train.offload == "all":
            for model, _ in trained:
                at_rest(model)
                tensors += [local(weight) for weight in model.parameters()]
        return tensors

    def _set_aside(self, step: int, outcome: Outcome) -> str:
        path = self._run / "bad_batches" / f"line-{self._place.line}-step-{step}.npz"
        write_aside(path, outcome.bad, outcome.fault)
        return str(path)

    def _record(self, journal: Journal, groups: Sequence[Group], step: int) -> None:
        keep = self._place.keep_episodes
        for record in episode_records(groups, self._tokenizer, step=step, keep=keep, credit=self._credit):
            journal.write(record)


def recipe_digest(
    train: config.Train, loss: config.Loss, temperature: float, critic: config.Critic | None = None
) -> str:
    """Of the settings that decide the training arithmetic; how often to save, where and on how many ranks do not."""
    saving = {"checkpoint_every", "keep_checkpoints", "checkpoint_url", "checkpoint_deadline_s"}
    incidental = {"offload", "step_deadline_s", "parallel", "device"} | saving
    text = f"{train.model_dump_json(exclude=incidental)}{loss.model_dump_json()}{temperature!r}"
    text += "" if critic is None else critic.model_dump_json()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _open(
    place: Place,
    train: config.Train,
    weights: config.Weights,
    cuts: CutSpace,
    mesh: Mesh | None,
    critic: config.Critic | None,
) -> tuple[Spread, Optimizer, Opened | None]:
    """The policy and its optimizer, and what a critic is made of, if there shall be one."""
    folder, where = Path(place.model_folder), _where(place, train, weights)
    if place.resume is None:
        spread = load_spread(folder, mesh, **where)
        opened = None if critic is None else new_critic(critic, folder, spread, where)
        return spread, _new_optimizer(spread, train), opened
    model = read_config(folder).digest()
    loaded = load(cuts, place.resume, mesh, expected_model=model, **where)
    optimizer = _new_optimizer(loaded.spread, train)
    optimizer.load(loaded.moments, loaded.cut.updates)
    if critic is None:
        return loaded.spread, optimizer, None
    return loaded.spread, optimizer, load_critic(cuts, loaded.manifest, loaded.cut.critic, critic, loaded.spread, where)


def _prepare(decoder: Decoder, train: config.Train, *, bitwise: bool) -> None:
    if bitwise:
        decoder.compute_with(open_invariant(decoder.config))
    decoder.recompute = train.parallel.recompute == "layer"
    if train.compile == "blocks":
        decoder.fuse()


def _reference(place: Place, train: config.Train, weights: config.Weights, mesh: Mesh | None) -> Decoder:
    """The frozen model of the KL term."""
    frozen = load_spread(Path(place.model_folder), mesh, **_where(place, train, weights)).decoder
    if place.bitwise:
        frozen.compute_with(open_invariant(frozen.config))
    return frozen.requires_grad_(False)


def _new_optimizer(spread: Spread, train: config.Train) -> Optimizer:
    prepare_routers(spread.decoder, train.routing, freeze=train.freeze_router)
    return Optimizer(spread.decoder, train, spread)


def _where(place: Place, train: config.Train, weights: config.Weights) -> dict[str, Any]:
    """Arguments for `load_spread`; a mesh has its own device. The probe is one batch too."""
    most = max(train.tokens_per_batch, place.longest, weights.probe_prompts * weights.probe_tokens)
    return {"device": device_of(train.device), "compute": DTYPES[train.compute], "max_tokens": most}


def _report(
    step: int,
    groups: Sequence[Group],
    given: Replayed,
    outcome: Outcome,
    *,
    manifest: Manifest,
    bad_batch: str,
    mismatch: Mismatch | None,
    seconds: dict[str, float],
) -> StepReport:
    episodes = [episode for group in groups for episode in group.episodes]
    usable = [episode for episode in episodes if not episode.failed]
    versions = [sample.versions[sample.mask] for group in given.by_group for sample in group]
    versions_N = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *versions]))
    ages = age_report(versions_N, step)
    return StepReport(
        step=step,
        manifest=manifest,
        applied=not outcome.fault,
        fault=outcome.fault,
        bad_batch=bad_batch,
        groups=len(groups),
        episodes=len(usable),
        failed=len(episodes) - len(usable),
        reward=_mean([episode.reward for episode in usable]),
        parts=_part_means(usable),
        trained_tokens=versions_N.numel(),
        lengths=tuple(int(episode.trained.sum()) for episode in usable),
        repetition=_mean([repeated_share(episode.tokens[episode.trained]) for episode in usable]),
        age_mean=ages.mean,
        age_max=ages.high,
        mismatch=mismatch,
        seconds=seconds,
        routes_missing=given.missing,
        routes_dropped=given.dropped,
        **outcome.numbers._asdict(),
    )


def _part_means(episodes: Sequence[Episode]) -> dict[str, float]:
    names = sorted({name for episode in episodes for name in episode.parts})
    return {name: _mean([episode.parts[name] for episode in episodes if name in episode.parts]) for name in names}


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else 0.0
