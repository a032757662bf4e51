"""AdamW on fp32 master weights: warm-up then constant rate, gradient norm clipped, nothing applied that is not finite.

Takes a module whose gradients are filled, gives moved parameters; hands its moments out as named tensors for a
checkpoint, and takes them back. Does not compute gradients or decide when to move.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from contraflow.errors import CheckpointError, ModelError, TrainingError
from contraflow.parallel.data import local
from contraflow.parallel.spread import Spread
from contraflow.parallel.team import Team


class OptimizerSettings(Protocol):
    """What both recipe sections that train, `train` and `sft`, say about it."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup_updates(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def clip_norm(self) -> float: ...


class Applied(NamedTuple):
    """One update: gradient norm before clipping, and the learning rate used."""

    grad_norm: float
    learning_rate: float


class Snapshot(NamedTuple):
    """Copies of everything an update changes."""

    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    updates: int


def warmup(updates: int, *, learning_rate: float, warmup_updates: int) -> float:
    """Rate of the next update after `updates` applied ones: a linear rise over `warmup_updates`, then constant."""
    return learning_rate * min(1.0, (updates + 1) / max(warmup_updates, 1))


class Optimizer:
    """AdamW (arXiv 1711.05101); weight decay on matrices only.

    A model spread over ranks is moved by each rank where it holds it; the gradient's norm is that of the whole model,
    every element counted once, so all ranks clip alike and refuse alike.

    Invariant: parameters, moments and `updates` change together or not at all.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, spread: Spread | None = None) -> None:
        self._given = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._named = {name: p if spread is None else _held(p) for name, p in self._given.items()}
        self._spread = spread
        self._team = Team(None if spread is None else spread.mesh)
        if strange := [name for name, p in self._named.items() if p.dtype not in (torch.float32, torch.float64)]:
            raise ModelError(
                f"parameter {strange[0]!r} is not fp32: load the model with dtype=torch.float32 to train it"
            )
        self._settings = settings
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._named.values() if p.ndim >= 2]},
            {"params": [p for p in self._named.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.updates = 0

    def clear(self) -> None:
        """Forget gradients."""
        for parameter in (*self._given.values(), *self._named.values()):
            parameter.grad = None

    def apply(self) -> Applied:
        """Clip and apply the gradients; raises TrainingError, and changes nothing, when one is not finite."""
        return self.move(self.norm())

    def norm(self) -> Tensor:
        """Of the whole gradient, fp32: what `move` wants. Raises TrainingError when it is not finite."""
        for name, held in self._named.items():
            given = self._given[name]
            if given is not held:
                held.grad = None if given.grad is None else local(given.grad)
        norm = self._norm()
        if not torch.isfinite(norm):
            raise TrainingError(f"the gradient of {self._blame()} is not finite (norm {float(norm)})")
        return norm

    def move(self, norm: Tensor) -> Applied:
        """Clip and apply the gradients that `norm` is of."""
        settings = self._settings
        clip_grads_with_norm_([p for p in self._named.values() if p.grad is not None], settings.clip_norm, norm)
        rate = warmup(self.updates, learning_rate=settings.learning_rate, warmup_updates=settings.warmup_updates)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.updates += 1
        return Applied(float(norm), rate)

    def moments(self) -> dict[str, Tensor]:
        """AdamW's own state as `PARAMETER:KEY` tensors, not copied; empty before the first update."""
        return {
            f"{name}:{key}": value
            for name, parameter in self._named.items()
            for key, value in self._adamw.state.get(parameter, {}).items()
        }

    def load(self, moments: Mapping[str, Tensor], updates: int) -> None:
        """Go on from saved moments of what this rank holds (copied).

        Raises CheckpointError on a name or shape that is not this model's.
        """
        states: dict[Tensor, dict[str, Tensor]] = {}
        for label, value in moments.items():
            name, _, key = label.rpartition(":")
            parameter = self._named.get(name)
            if parameter is None or (value.ndim > 0 and value.shape != parameter.shape):
                raise CheckpointError(f"optimizer state {label!r} {tuple(value.shape)} does not fit this model")
            states.setdefault(parameter, {})[key] = value.detach().to(parameter.device, copy=True)
        self._adamw.state.clear()
        self._adamw.state.update(states)
        self.updates = updates

    def snapshot(self) -> Snapshot:
        """Everything an update changes, copied."""
        parameters = {name: p.detach().clone() for name, p in self._named.items()}
        return Snapshot(parameters, {k: v.clone() for k, v in self.moments().items()}, self.updates)

    def restore(self, before: Snapshot) -> None:
        """Go back to a snapshot, bit for bit."""
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(before.parameters[name])
        self.load(before.moments, before.updates)

    def _norm(self) -> Tensor:
        """Of the whole gradient, whichever ranks hold it."""
        grads = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        if self._spread is None or self._spread.mesh is None:
            return get_total_norm(grads.values())
        mine = get_total_norm([grad for name, grad in grads.items() if self._spread.counted(name)])
        return self._team.sum(mine.to(self._spread.mesh.device).double().square()).sqrt().float()

    def _blame(self) -> str:
        bad = (repr(n) for n, p in self._named.items() if p.grad is not None and not torch.isfinite(p.grad).all())
        return next(filter(None, self._team.words(next(bad, ""))), "all parameters together")


def apply_together(optimizers: Sequence[Optimizer]) -> list[Applied]:
    """Apply the gradients of all; raises TrainingError, and changes none, when any is not finite."""
    norms = [optimizer.norm() for optimizer in optimizers]
    return [optimizer.move(norm) for optimizer, norm in zip(optimizers, norms, strict=True)]


def _held(parameter: nn.Parameter) -> nn.Parameter:
    """The rank's part of a parameter as one of its own, in the same memory: AdamW need not know of meshes."""
    return nn.Parameter(local(parameter)) if isinstance(parameter, DTensor) else parameter
