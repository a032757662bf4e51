"""The arithmetic of one step: e epochs of m updates over one take, each update packed into micro-batches.

Takes samples by group, moves the weights, gives the numbers. A loss or gradient that is not finite undoes the whole
step. Does not fetch, publish, save or report. Shape letters: T packed tokens, N trained tokens.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from contraflow import config
from contraflow.algo.corrections import effective_share
from contraflow.algo.drift import log_ratio, ratio_report
from contraflow.errors import ConfigError, TrainingError
from contraflow.model.decoder import Decoder
from contraflow.telemetry import Account
from contraflow.train.batcher import pack, split
from contraflow.train.crediting import credited
from contraflow.train.crew import Crew, open_crew, open_passes
from contraflow.train.critic import Critic, ValueObjective
from contraflow.train.forward import Reading
from contraflow.train.look import Finding, look
from contraflow.train.objective import PolicyObjective, Seen, joined_rows
from contraflow.train.optimizer import Optimizer, apply_together
from contraflow.train.passes import Passes
from contraflow.train.routing import disagreement
from contraflow.train.update import Updated, Updater
from contraflow.types import Batch, Sample


class Numbers(NamedTuple):
    """What the updates of a step saw; means over the updates, zero when there were none. Named as in `StepReport`."""

    updates: int = 0
    loss: float = 0.0
    kl: float = 0.0
    balance: float = 0.0
    entropy: float = 0.0
    ratio_mean: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    behaviour_kl: float = 0.0
    ratio_effective: float = 0.0
    effective: float = 0.0
    corrected: dict[str, float] = {}  # noqa: RUF012
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    replayed_tokens: int = 0
    routes_differ: tuple[float, ...] = ()
    first_differs: tuple[float, ...] = ()
    expert_loads: tuple[tuple[int, ...], ...] = ()
    critic_updates: int = 0
    value_loss: float = 0.0
    value_clipped: float = 0.0
    critic_grad_norm: float = 0.0
    explained_variance: float = 0.0
    values_version: int = -1


class Outcome(NamedTuple):
    """How a step went. `fault` is empty when it was applied; otherwise `bad` is the update that was refused."""

    numbers: Numbers
    fault: str = ""
    bad: tuple[Batch, ...] = ()


class Beside(NamedTuple):
    """The models that a step asks beside the policy: the frozen one of the KL term, and the critic of PPO."""

    reference: Decoder | None = None
    critic: Critic | None = None


class TrainStep:
    """Invariant: `run` moves the weights by all updates of a step, or by none of them, bit for bit.

    `temperature` is the rollout's: behaviour log-probabilities are of the temperature-scaled softmax, and the ratio
    compares like with like. A critic's weights, too, are moved by all updates or by none. Every rank of a `crew` runs
    the same step, and gives the same outcome.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        account: Account,
        *,
        train: config.Train,
        loss: config.Loss,
        temperature: float,
        beside: Beside | None = None,
        crew: Crew | None = None,
    ) -> None:
        reference, critic = beside or Beside()
        if loss.kl_weight > 0 and reference is None:
            raise ConfigError(f"loss.kl_weight = {loss.kl_weight} needs a reference model, and none was given")
        if (critic is None) == (loss.advantages == "gae"):
            raise ConfigError(
                f"loss.advantages = {loss.advantages!r}: 'gae' needs a critic, and nothing else takes one"
            )
        self._optimizer = optimizer
        self._critic = critic
        self._account = account
        self._train = train
        self._loss = loss
        self._crew = crew or open_crew(decoder, None, account, temperature=temperature)
        self._frozen: dict[Finding, Passes] = {}
        if reference is not None and loss.kl_weight > 0:
            frozen = open_passes(reference, self._crew.team.mesh, account, Reading(temperature))
            self._frozen["reference"] = frozen
        if loss.old == "proximal" and train.epochs * train.updates > 1:  # of one update, it is the policy itself
            self._frozen["proximal"] = self._crew.passes
        several = train.epochs * train.updates > 1  # of one update, the first pass is its own
        self._kept_experts = decoder.config.experts if train.routing == "r2" and several else 0
        self._updater = Updater(decoder, optimizer, account, self._crew, balance_weight=loss.balance_weight)

    def run(self, by_group: Sequence[Sequence[Sample]], *, step: int, seed: int) -> Outcome:
        """Train on one take. Updates share the groups evenly, in an order drawn from (seed, step, epoch).

        An update with no credit to give, and no other loss, is left out: momentum alone must not move the weights.
        """
        train, done, critic = self._train, list[Updated](), self._critic
        objective = PolicyObjective(self._loss, step, self._crew.team.along)
        valuing = None if critic is None else ValueObjective(critic.section.clip)
        warming = critic is not None and step < critic.section.warmup_steps
        by_group = self._look(by_group, step)
        moved = [self._optimizer, *([] if critic is None else critic.optimizers)]
        before = [one.snapshot() for one in moved] if train.epochs * train.updates > 1 else []
        for epoch in range(train.epochs):
            for part in split(len(by_group), train.updates, seed=(seed, step, epoch)):
                chosen = [sample for index in part for sample in by_group[index]]
                policy = objective if self._teaches(chosen) and not warming else None
                if policy is None and (valuing is None or not chosen):
                    continue
                batches = self._pack(chosen)
                try:
                    _refuse_unsound(batches)
                    done += self._update(batches, policy, valuing)
                except TrainingError as fault:
                    for one, was in zip(moved, before, strict=False):
                        one.restore(was)
                    return Outcome(Numbers(), str(fault), tuple(batches))
        numbers = self._numbers(done, objective.seen) if done else Numbers()
        if critic is not None and valuing is not None:
            told = critic.numbers(valuing, [sample for group in by_group for sample in group], step)
            numbers = numbers._replace(**told._asdict())
        return Outcome(numbers)

    def _teaches(self, chosen: Sequence[Sample]) -> bool:
        loss = self._loss
        other_losses = max(loss.kl_weight, loss.balance_weight, loss.entropy_weight) > 0
        shared = self._critic is not None and self._critic.shared  # its values move the policy's trunk
        return any(shared or other_losses or bool(sample.advantages.any()) for sample in chosen)

    def _update(
        self, batches: Sequence[Batch], policy: PolicyObjective | None, values: ValueObjective | None
    ) -> list[Updated]:
        """One update of the policy, if it has an objective, and of the critic, if there is one; that of the policy."""
        critic = self._critic
        if critic is None or values is None:
            assert policy is not None, "an update has an objective"
            return [self._updater.update(batches, lambda batch, _, scored: policy(batch, scored))]
        critic.clear()
        parts = [part for part in (policy, values if critic.shared else None) if part is not None]
        measured = None
        if parts:
            measured = self._updater.measure(batches, lambda batch, _, scored: _sum([p(batch, scored) for p in parts]))
        if not critic.shared:
            critic.measure(batches, values)
        critic.gather()
        with self._account.charge("optimizer"):
            applied = apply_together([*([] if policy is None else [self._optimizer]), *critic.optimizers])
        values.norms.append(applied[-1].grad_norm)
        return [] if policy is None or measured is None else [measured.moved(applied[0])]

    def _look(self, by_group: Sequence[Sequence[Sample]], step: int) -> list[list[Sample]]:
        """All samples, with what the settings want to know before the first update, and their credit."""
        flat = [sample for group in by_group for sample in group]
        flat = look(
            flat,
            self._frozen,
            self._crew,
            device=self._updater.device,
            tokens_per_batch=self._train.tokens_per_batch,
            experts=self._kept_experts,
        )
        section = None
        if self._critic is not None:
            flat, section = self._critic.look(flat, version=step), self._critic.section
        each = iter(credited(flat, self._loss, section, version=step))
        return [list(islice(each, len(group))) for group in by_group]

    def _pack(self, chosen: Sequence[Sample]) -> list[Batch]:
        with self._account.charge("batch"):
            return pack(
                chosen,
                tokens_per_batch=self._train.tokens_per_batch,
                reduction=self._loss.reduction,
                shares=self._crew.team.shares,
                constant=self._loss.constant_tokens,
            )

    def _numbers(self, done: Sequence[Updated], seen: Sequence[Seen]) -> Numbers:
        """Of all ranks together, on every rank."""
        team, names = self._crew.team, list(self._loss.corrections)
        nothing = torch.zeros((), device=self._updater.device)
        rows_xN = team.joined(joined_rows(seen, len(names), nothing))
        logprobs_N, behaviour_N, entropy_N, low_N, high_N, weights_N, *touched = rows_xN
        kl = team.total(torch.stack([nothing, *[part.kl for part in seen]]).sum())
        ratios = ratio_report(logprobs_N, behaviour_N, low_N, high_N)
        loads = [update.loads_ME for update in done if update.loads_ME is not None]
        return Numbers(
            updates=len(done),
            loss=_mean(update.loss for update in done),
            kl=float(kl) / len(done),
            balance=_mean(update.balance for update in done),
            entropy=float(entropy_N.mean()),
            ratio_mean=ratios.mean,
            ratio_low=ratios.low,
            ratio_high=ratios.high,
            clipped_low=ratios.clipped_low,
            clipped_high=ratios.clipped_high,
            behaviour_kl=ratios.kl,
            ratio_effective=effective_share(log_ratio(logprobs_N, behaviour_N).exp()),
            effective=effective_share(weights_N),
            corrected={name: float(row_N.mean()) for name, row_N in zip(names, touched, strict=True)},
            grad_norm=_mean(update.applied.grad_norm for update in done),
            learning_rate=done[-1].applied.learning_rate,
            **disagreement([update.differing_M3 for update in done])._asdict(),
            expert_loads=tuple(tuple(row) for row in torch.stack(loads).sum(0).tolist()) if loads else (),
        )


def _refuse_unsound(batches: Sequence[Batch]) -> None:
    """Raise TrainingError for what would make a loss infinite, or, worse, a finite one of an infinite ratio's clip."""
    for name, why, columns in (
        ("a value", ", so the critic has diverged", [batch.values for batch in batches]),
        ("an advantage", ", so a reward was not finite", [batch.advantages for batch in batches]),
        ("a behaviour log-probability", "", [batch.behaviour for batch in batches]),
    ):
        for column_T in columns:
            bad = np.zeros(0) if column_T is None else column_T[~np.isfinite(column_T)]
            if bad.size:
                raise TrainingError(f"{name} is {bad[0]}{why}")


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
