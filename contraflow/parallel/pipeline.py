"""Pipeline parallelism: the layers of a decoder over ranks, and micro-batches through them in turn.

Takes a decoder of which this rank holds some stages, and the micro-batches of an update; runs them by one of torch's
schedules. What becomes of a stage's hidden states is the caller's: a loss, or something to remember. Does not know
losses, or who else holds the same stage.

Schedules want equal shapes, and micro-batches have different numbers of tokens. So what travels between stages is
padded to the longest micro-batch, and each stage cuts it again: a schedule carries the number of a micro-batch, and
every stage looks up tokens, positions and plan by it.

Shape letters: T tokens of a micro-batch, L of the longest, D width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F

from contraflow.config import Parallel
from contraflow.errors import ContraflowError
from contraflow.model.attention import Plan
from contraflow.model.decoder import Decoder
from contraflow.model.router import Given, RouterTape
from contraflow.parallel.experts import links
from contraflow.parallel.layout import Place, rank_stages, stage_layers, stages
from contraflow.parallel.mesh import Mesh


class Inputs(Protocol):
    """What a decoder is fed in one micro-batch. Every rank of a pipeline has the same."""

    @property
    def tokens_F(self) -> Tensor: ...

    @property
    def positions_F(self) -> Tensor: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def given(self) -> Given | None: ...


class Passed(NamedTuple):
    """One micro-batch behind one stage."""

    number: int  # of the micro-batch
    span: range  # the stage's layers
    hidden_TD: Tensor  # after the final norm, if the span ends with the last layer
    tape: RouterTape | None  # of the stage's routers; None if it has none


After = Callable[[Passed], Tensor]  # hidden states for the next stage; of the last a loss, if there is a backward pass


def spans(layers: int, parallel: Parallel, here: Place) -> list[range]:
    """Layers of each stage of a rank, in order."""
    by_stage = stage_layers(layers, stages(parallel))
    return [by_stage[stage] for stage in rank_stages(here.pp, parallel)]


class Elsewhere(nn.Module):
    """In place of a layer that another rank holds."""


def share_layers(decoder: Decoder, parallel: Parallel, here: Place) -> None:
    """Let go of what other stages hold: layers, the embedding unless first, final norm and head unless last.

    Names stay; those left are those of `layout.shards`.
    """
    kept = {layer for span in spans(decoder.config.layers, parallel, here) for layer in span}
    for layer in set(range(decoder.config.layers)) - kept:
        decoder.layers[layer] = Elsewhere()
    if here.pp > 0:
        decoder.register_parameter("embed", None)
    if here.pp < parallel.pp - 1:
        decoder.register_parameter("norm", None)
        decoder.register_parameter("lm_head", None)


def micro_batches(count: int, parallel: Parallel) -> int:
    """How many micro-batches the schedule wants where there are `count`; those that are missing are empty.

    1F1B fills the pipeline at least once. The interleaved schedule goes in rounds of at least pp micro-batches, as many
    rounds as there can be, and all rounds are alike.
    """
    if parallel.schedule == "1f1b":
        return max(count, parallel.pp)
    while count % max(count // parallel.pp, 1):
        count += 1
    return count


class Pipeline:
    """This rank's stages. Collective over all ranks of the mesh: each calls `run` with as many micro-batches."""

    def __init__(self, decoder: Decoder, mesh: Mesh) -> None:
        self._decoder = decoder
        self._parallel, self._here, self._group = mesh.parallel, mesh.here, mesh.pp
        self._links = links(mesh, mesh.pp)
        self._spans = spans(decoder.config.layers, mesh.parallel, mesh.here)

    def run(self, inputs: Sequence[Inputs], after: After, *, backward: bool) -> None:
        """Every micro-batch through every stage; `after` is called once for each of them and each stage of this rank.

        With `backward` gradients are added to the parameters: those of the loss that the last stage gives, and of what
        any stage adds to it by `add_loss`. `inputs` are as many as `micro_batches` says.

        Raises: WorkerDied, naming them, when other stages took no part; what `after` or the decoder raised, if it is
        an error of this package.
        """
        stages = [self._stage(place, inputs, after, backward) for place in range(len(self._spans))]
        schedule = self._schedule(stages, len(inputs), backward)
        numbers = torch.arange(len(inputs))
        given: dict[str, Any] = {"number": numbers, "return_outputs": False}
        if backward and self._here.pp == self._parallel.pp - 1:
            given["target"] = numbers  # not looked at, but without one there is no loss
        try:
            with torch.set_grad_enabled(backward):
                schedule.step(*([numbers] if self._here.pp == 0 else []), **given)
        except RuntimeError as fault:
            # torch wraps what a stage of this rank raises; what is not wrapped comes from sending or receiving.
            if fault.__cause__ is None:
                raise self._links.fallen("the pipeline", fault) from fault
            if isinstance(fault.__cause__, ContraflowError):
                raise fault.__cause__ from fault
            raise

    def _schedule(
        self, stages: list[PipelineStage], count: int, backward: bool
    ) -> Schedule1F1B | ScheduleInterleaved1F1B:
        made: dict[str, Any] = {"loss_fn": _itself if backward else None, "scale_grads": False}
        if len(stages) == 1:
            return Schedule1F1B(stages[0], count, **made)
        return ScheduleInterleaved1F1B(stages, count, **made)  # type: ignore[arg-type]

    def _stage(self, place: int, inputs: Sequence[Inputs], after: After, backward: bool) -> PipelineStage:
        """With shapes given, torch runs nothing to find them out: a pass more than others would be one too many."""
        index, count = rank_stages(self._here.pp, self._parallel)[place], stages(self._parallel)
        longest = max(1, *(given.tokens_F.numel() for given in inputs))  # all may be empty; what is sent may not
        between = torch.empty(
            longest, self._decoder.config.dim, dtype=self._decoder.compute_dtype, device="meta", requires_grad=True
        )
        number = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        return PipelineStage(
            _Stage(self._decoder, self._spans[place], inputs, after, longest),
            index,
            count,
            inputs[0].tokens_F.device,
            input_args=number if index == 0 else between,
            output_args=loss if backward and index == count - 1 else between,
            group=self._group,
        )


class _Stage(nn.Module):
    """One stage over all micro-batches of an update."""

    def __init__(self, decoder: Decoder, span: range, inputs: Sequence[Inputs], after: After, longest: int) -> None:
        super().__init__()
        # Not as a submodule: torch would take away the gradients of what FSDP shards, each time it prepares a schedule.
        self._decode = decoder.__call__
        self._span, self._inputs, self._after, self._longest = span, inputs, after, longest
        mixtures = decoder.config.moe_layers
        self._rows = [row for row, layer in enumerate(mixtures) if layer in span]  # of the model's MoE layers

    def forward(self, x_LD: Tensor, *, number: Tensor) -> Tensor:
        index = int(number)
        given = self._inputs[index]
        tokens = given.tokens_F.numel()
        tape = None
        if self._rows:
            routes = given.given
            tape = RouterTape(None if routes is None else routes.rows(self._rows[0], self._rows[-1] + 1))
        x = x_LD[:tokens] if self._span.start else given.tokens_F
        hidden_TD: Tensor = self._decode(x, given.positions_F, given.plan, tape=tape, span=self._span)
        out = self._after(Passed(index, self._span, hidden_TD, tape))
        return out if out.ndim == 0 else F.pad(out, (0, 0, 0, self._longest - tokens))


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, whose backward pass is that of `loss` as well: both get to where they came from, the loss with weight 1."""
    out: Tensor = _AddLoss.apply(x, loss)  # type: ignore[no-untyped-call]
    return out


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def _itself(loss: Tensor, _: Tensor) -> Tensor:
    return loss
