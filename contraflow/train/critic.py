"""The critic of PPO: asked before a step what states are worth, and trained with it.

Takes samples and packed micro-batches, gives values for credit, and gradients. Its head lies on a model of its own or
on the policy's; a small one, it is whole on every rank. Does not give credit, choose samples or move the policy.
Shape letters: L tokens of one episode, T packed tokens, N trained tokens, M MoE layers, K experts per token.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from contraflow import config
from contraflow.algo.value import explained_variance, value_loss
from contraflow.model.value import ValueHead
from contraflow.parallel.spread import Spread
from contraflow.telemetry import Account
from contraflow.train.batcher import packed
from contraflow.train.crew import Crew, open_passes
from contraflow.train.forward import Reading, Scored
from contraflow.train.look import by_sample
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from contraflow.types import Batch, Float32, Sample


class CriticNumbers(NamedTuple):
    """What a step's updates of the critic saw, as `StepReport` has it."""

    critic_updates: int = 0
    value_loss: float = 0.0
    value_clipped: float = 0.0
    critic_grad_norm: float = 0.0
    explained_variance: float = 0.0
    values_version: int = -1


class ValueObjective:
    """Callable on a micro-batch: its part of the value loss, by the tokens' shares in the update.

    Invariant: `losses` and `clipped` have one entry for every call.
    """

    def __init__(self, clip: float) -> None:
        self._clip = clip
        self.losses: list[Tensor] = []
        self.clipped: list[Tensor] = []  # fp32 [N]
        self.norms: list[float] = []  # one an update that was applied

    def __call__(self, batch: Batch, scored: Scored) -> Tensor:
        """A scalar."""
        columns = [_column(of_T, batch) for of_T in (batch.values, batch.returns, batch.weights)]
        old_N, returns_N, weights_N = (column_N.to(scored.values_N.device) for column_N in columns)
        loss, clipped_N = value_loss(scored.values_N, old_N, returns_N, weights_N, clip=self._clip)
        self.losses.append(loss.detach())
        self.clipped.append(clipped_N.float())
        return loss


class Critic:
    """`trunk` is None where the head lies on the policy's: its passes then read values too, see `open_crew`.

    Invariant: the head's bits are the same on every rank. `optimizers` move all that is the critic's own.
    """

    def __init__(
        self,
        section: config.Critic,
        head: ValueHead,
        *,
        train: config.Train,
        trunk: Spread | None,
        crew: Crew,
        account: Account,
    ) -> None:
        """`crew` is the policy's."""
        self.section, self.head, self.trunk = section, head, trunk
        self._train, self._crew = train, crew
        settings = train.model_copy(update={"learning_rate": section.learning_rate})
        self.optimizers = [Optimizer(head, settings)]
        self._updater: Updater | None = None
        if trunk is None:
            head.pull = section.weight
            return
        reading = Reading(value=head, policy=False)
        self._crew = dataclasses.replace(crew, passes=open_passes(trunk.decoder, trunk.mesh, account, reading))
        self.optimizers.append(Optimizer(trunk.decoder, settings, trunk))
        self._updater = Updater(trunk.decoder, self.optimizers[1], account, self._crew)

    @property
    def shared(self) -> bool:
        """Whether values are read in the policy's passes, and trained in them."""
        return self.trunk is None

    @property
    def trained(self) -> list[tuple[nn.Module, Optimizer]]:
        """What `optimizers` move."""
        models: list[nn.Module] = [self.head, *([] if self.trunk is None else [self.trunk.decoder])]
        return list(zip(models, self.optimizers, strict=True))

    def look(self, samples: Sequence[Sample], *, version: int) -> list[Sample]:
        """Each sample with the values of its states, by the critic as it stands: that of `version`. Collective.

        A truncated one also has that of the state after its last token, if `critic.truncated` asks for it.
        """
        if not samples:
            return []
        free = [one if self.shared else msgspec.structs.replace(one, routes=None, routed=None) for one in samples]
        asked = [self._goes_on(sample) for sample in samples]
        longer = [_with_state_after(one) if more else one for one, more in zip(free, asked, strict=True)]
        nothing_S = np.zeros(len(samples), np.float32)  # nobody's share of a loss
        bins, batches = packed(longer, nothing_S, self._train.tokens_per_batch, self._crew.team.shares)
        mine, feds = self._crew.feeds(batches, self.head.weight.device)
        answers = [scored.values_N for scored in self._crew.passes.scored(feds)]
        found = list(samples)
        for place, values_L in by_sample(bins, batches, self._crew.everywhere(batches, mine, answers)):
            length, last = samples[place].tokens.size, float(values_L[-1]) if asked[place] else 0.0
            found[place] = msgspec.structs.replace(
                samples[place], values=values_L[:length], bootstrap=last, valued=version
            )
        return found

    def _goes_on(self, sample: Sample) -> bool:
        return sample.truncated and self.section.truncated == "bootstrap"

    def clear(self) -> None:
        """Forget gradients."""
        for optimizer in self.optimizers:
            optimizer.clear()

    def measure(self, batches: Sequence[Batch], objective: ValueObjective) -> None:
        """Leave gradients on a trunk of its own and on the head. Raises TrainingError as `Updater.update` does."""
        assert self._updater is not None, "a shared trunk is the policy's to measure"
        free = [msgspec.structs.replace(batch, routes=None, routed=None) for batch in batches]
        self._updater.measure(free, lambda batch, _, scored: objective(batch, scored))

    def gather(self) -> None:
        """Sum the head's gradient over the ranks, each of which has seen its share of the tokens."""
        for weight in self.head.parameters():
            weight.grad = self._crew.team.total(torch.zeros_like(weight) if weight.grad is None else weight.grad)

    def numbers(self, objective: ValueObjective, samples: Sequence[Sample], version: int) -> CriticNumbers:
        """Of all ranks together, on every rank; of the samples that the updates were made of."""
        updates = len(objective.norms)
        if not updates:
            return CriticNumbers(values_version=version)
        nothing = torch.zeros((), device=self.head.weight.device)
        loss = self._crew.team.total(torch.stack([nothing, *objective.losses]).sum())
        clipped_N = self._crew.team.joined(torch.cat([nothing[None][:0], *objective.clipped]))
        both = [[sample.values, sample.returns] for sample in samples]
        masks = [sample.mask for sample in samples]
        values_N, returns_N = (
            torch.from_numpy(np.concatenate([of[mask] for of, mask in zip(column, masks, strict=True)]))
            for column in zip(*both, strict=True)
        )
        return CriticNumbers(
            critic_updates=updates,
            value_loss=float(loss) / updates,
            value_clipped=float(clipped_N.mean()),
            critic_grad_norm=sum(objective.norms) / updates,
            explained_variance=explained_variance(values_N, returns_N),
            values_version=version,
        )


def _with_state_after(sample: Sample) -> Sample:
    """The sample, asked for one state more, that after its last token: it gets one token more, which is never fed, so
    what it is does not matter."""
    more: dict[str, Any] = {
        name: np.append(of, of.dtype.type(0))
        for name in ("tokens", "behaviour", "advantages", "versions", "proximal", "reference")
        if (of := getattr(sample, name)) is not None
    }
    if sample.routes is not None and sample.routed is not None:
        more["routes"] = np.concatenate([sample.routes, np.zeros_like(sample.routes[:1])])
        more["routed"] = np.append(sample.routed, False)
    return msgspec.structs.replace(sample, mask=np.append(sample.mask, True), **more)


def _column(of_T: Float32 | None, batch: Batch) -> Tensor:
    assert of_T is not None, "a step with a critic looks before it packs"
    return torch.from_numpy(of_T[batch.mask])
