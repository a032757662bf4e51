"""One packed forward pass: log-probabilities and values of a micro-batch's trained tokens, and nothing more.

Takes a decoder and a `Batch`, gives tensors on the decoder's device. The last token of each sequence is never fed, and
the vocabulary is looked at for trained tokens only. Does not know losses.
Shape letters: T packed tokens, F of them fed, S sequences, N trained tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from contraflow.model.attention import PackedPlan, Plan
from contraflow.model.decoder import Decoder
from contraflow.model.router import Given, RouterTape
from contraflow.model.value import ValueHead
from contraflow.parallel.context import ContextPlan, Exchange, held
from contraflow.types import Batch, Int64


class Fed(NamedTuple):
    """What goes into the decoder for a batch, and where its answers are."""

    tokens_F: Tensor  # int64
    positions_F: Tensor  # int64
    plan: Plan
    rows_N: Tensor  # int64: the fed token whose hidden state predicts each trained token
    targets_N: Tensor  # int64
    given: Given | None = None  # experts that the fed tokens shall go to


class Reading(NamedTuple):
    """What is read off the hidden state before each trained token."""

    temperature: float = 1.0  # of the softmax: what it was sampled with
    value: ValueHead | None = None
    policy: bool = True  # whether the vocabulary is looked at


class Scored(NamedTuple):
    """fp32, differentiable: of the temperature-scaled full softmax, and of the value head. Zeros where not read."""

    logprobs_N: Tensor
    entropy_N: Tensor
    values_N: Tensor


def feed(batch: Batch, device: torch.device, context: Exchange | None = None) -> Fed:
    """Lay a batch out for the decoder. Sequences have at least two tokens, and their first is not trained.

    With `context`, the ranks that share each sequence: this rank's tokens of a batch that `share` cut to its trained.
    """
    lengths_S = np.diff(batch.starts)
    keep_T = np.ones(batch.tokens.size, np.bool_)
    keep_T[batch.starts[1:] - 1] = False
    fed_F = np.flatnonzero(keep_T)
    starts = (batch.starts - np.arange(batch.starts.size)).tolist()
    sequence_T = np.repeat(np.arange(lengths_S.size), lengths_S)
    rows_N = np.flatnonzero(batch.mask) - 1 - sequence_T[batch.mask]
    here_F = np.arange(fed_F.size)
    plan: Plan
    if context is None:
        plan = PackedPlan.of(starts, device)
    else:
        plan = ContextPlan(starts, context, device)
        here_F = held(starts, context.size, context.place)
        fed_F, rows_N = fed_F[here_F], np.searchsorted(here_F, rows_N)
    tokens_F, positions_F, places_N, targets_N = (
        torch.from_numpy(x.astype(np.int64)).to(device)
        for x in (batch.tokens[fed_F], batch.positions[fed_F], rows_N, batch.tokens[batch.mask])
    )
    return Fed(tokens_F, positions_F, plan, places_N, targets_N, given=_given(batch, here_F, device))


def _given(batch: Batch, here_F: Int64, device: torch.device) -> Given | None:
    """The experts of the fed tokens at `here_F`, if the batch brings any."""
    if batch.routes is None or batch.routed is None:
        return None
    ids_FMK = batch.routes[here_F]
    bits_FMK = ids_FMK.view(np.int16) if ids_FMK.dtype == np.uint16 else ids_FMK  # torch knows too little of uint16
    return Given(torch.from_numpy(bits_FMK).to(device), torch.from_numpy(batch.routed[here_F]).to(device))


def fed_tokens(batch: Batch) -> int:
    """How many tokens of the batch `feed` lays out."""
    return batch.tokens.size - (batch.starts.size - 1)


def score(decoder: Decoder, fed: Fed, reading: Reading, *, tape: RouterTape | None = None) -> Scored:
    """What `reading` asks of every trained token under the decoder."""
    return score_hidden(decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=tape), decoder, fed, reading)


def score_hidden(hidden_FD: Tensor, decoder: Decoder, fed: Fed, reading: Reading) -> Scored:
    """The same from hidden states after the final norm; of the decoder only the head is needed."""
    hidden_ND = hidden_FD.index_select(0, fed.rows_N)
    nothing_N = hidden_ND.new_zeros(len(hidden_ND), dtype=torch.float32)
    values_N = nothing_N if reading.value is None else reading.value(hidden_ND)
    if not reading.policy:
        return Scored(nothing_N, nothing_N, values_N)
    how = {"split": decoder.split_head, "fuse": decoder.fused}
    found = decoder.arithmetic.token_logprobs(
        hidden_ND, decoder.head, fed.targets_N, temperature=reading.temperature, **how
    )
    return Scored(*found, values_N)
