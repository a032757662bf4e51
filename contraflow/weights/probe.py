"""The second proof of a version: what computes with it must give the log-probabilities that the trainer gave.

Takes a decoder and prompts, gives a probe; takes a probe and an engine's answer, refuses it or says nothing. Weights
that are packed, sharded or quantised cannot be hashed back, and right bytes can still be loaded wrong. Does not move
or load weights. Shape letters: T tokens of all prompts, N of them predicting one, D width.
"""

from collections.abc import Sequence

import numpy as np
import torch

from contraflow.errors import CarrierError, ConfigError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.types import Float32, Int32, Probe


def probe_prompts(vocab: int, *, prompts: int, tokens: int, seed: int) -> tuple[Int32, ...]:
    """`prompts` rows of `tokens` token ids, uniform in [0, vocab): the same for the same seed, on any machine."""
    if vocab < 1 or prompts < 1 or tokens < 2:
        raise ConfigError(
            f"a probe of {prompts} prompts of {tokens} tokens over {vocab} ids proves nothing; "
            "weights.probe_prompts must be at least 1, weights.probe_tokens at least 2"
        )
    draws = np.random.Generator(np.random.PCG64(seed)).integers(0, vocab, size=(prompts, tokens), dtype=np.int32)
    return tuple(draws)


def make_probe(decoder: Decoder, prompts: Sequence[Int32], tolerance: float) -> Probe:
    """What `decoder` gives the tokens of `prompts`, packed into one forward; its mode and gradients are left alone.

    Raises: CarrierError if a log-probability is not finite: such weights must not be published.
    """
    return as_probe(prompts, probe_logprobs(decoder, prompts), tolerance)


def as_probe(prompts: Sequence[Int32], logprobs: tuple[Float32, ...], tolerance: float) -> Probe:
    """A probe of log-probabilities shaped as those of `probe_logprobs`. Raises: CarrierError as `make_probe`."""
    for row, values in enumerate(logprobs):
        if not np.isfinite(values).all():
            raise CarrierError(f"the model itself gives log-probabilities that are not finite, in probe prompt {row}")
    return Probe(tuple(prompts), logprobs, tolerance)


@torch.no_grad()
def probe_logprobs(decoder: Decoder, prompts: Sequence[Int32]) -> tuple[Float32, ...]:
    """Log-probability of token j + 1 given tokens [0, j], for every prompt: rows of fp32 `[len(prompt) - 1]`."""
    device = next(decoder.parameters()).device
    lengths = [len(prompt) for prompt in prompts]
    tokens_T = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(device)
    positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
    ends = np.cumsum(lengths)
    rows_N = torch.from_numpy(np.delete(np.arange(ends[-1]), ends - 1)).to(device)  # a prompt's last predicts nothing
    plan = PackedPlan.of([0, *ends.tolist()], device)
    training = decoder.training
    decoder.eval()
    try:
        hidden_ND = decoder(tokens_T, positions_T, plan)[rows_N]
        logprobs_N, _ = decoder.arithmetic.token_logprobs(hidden_ND, decoder.head, tokens_T[rows_N + 1])
    finally:
        decoder.train(training)
    return tuple(np.split(logprobs_N.cpu().numpy(), np.cumsum([length - 1 for length in lengths])[:-1]))


def check_probe(probe: Probe, logprobs: Sequence[Float32]) -> None:
    """Say nothing if `logprobs` (shaped as `probe.logprobs`) are the probe's to its tolerance.

    Raises: CarrierError with the largest difference, where it is, and the tolerance. NaN never passes, nor does a probe
    without a single log-probability.
    """
    wanted_shape, given_shape = [len(row) for row in probe.logprobs], [len(row) for row in logprobs]
    if wanted_shape != given_shape:
        raise CarrierError(f"the probe has rows of {wanted_shape} log-probabilities, the engine gave {given_shape}")
    if not sum(wanted_shape):
        raise CarrierError("the probe holds no log-probability, and so proves nothing")
    wanted, given = np.concatenate(probe.logprobs).astype(np.float64), np.concatenate(logprobs).astype(np.float64)
    finite = np.isfinite(wanted) & np.isfinite(given)
    difference = np.full(len(wanted), np.inf)
    difference[finite] = np.abs(wanted[finite] - given[finite])
    beyond = ~(finite & (difference <= probe.tolerance))  # so written that a NaN is beyond any tolerance, even inf
    if not beyond.any():
        return
    worst = int(np.where(beyond, difference, -1).argmax())
    ends = np.cumsum(wanted_shape)
    row = int(np.searchsorted(ends, worst, side="right"))
    token = worst - int(ends[row]) + wanted_shape[row] + 1  # entry j is of token j + 1
    raise CarrierError(
        f"the probe failed: largest difference {difference[worst]:.3g} at prompt {row}, token {token} (published "
        f"{wanted[worst]:.6g}, the engine gave {given[worst]:.6g}), tolerance {probe.tolerance:g}; "
        f"{int(beyond.sum())} of {len(beyond)} are beyond it"
    )
