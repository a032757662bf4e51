"""The probe: what the trainer gives is what the definition says, and what differs from it is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import CarrierError, ConfigError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.types import Float32, Int32, Probe
from contraflow.weights.probe import check_probe, make_probe, probe_logprobs, probe_prompts

CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab=50,
    dim=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=4,
    top_k=2,
    expert_ffn=16,
    renormalise=True,
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return new_decoder(CONFIG, seed=0, std=0.2)


def rows(*lengths: int) -> tuple[Int32, ...]:
    draws = np.random.default_rng(1)
    return tuple(draws.integers(0, CONFIG.vocab, length).astype(np.int32) for length in lengths)


def by_definition(decoder: Decoder, prompt: Int32) -> list[float]:
    """One token at a time, each with its own forward over all tokens before it, softmax in float64."""
    found = []
    for cut in range(1, len(prompt)):
        tokens_T = torch.from_numpy(prompt[:cut].astype(np.int64))
        hidden_TD = decoder(tokens_T, torch.arange(cut), PackedPlan.of([0, cut], "cpu"))
        found.append(torch.log_softmax(decoder.logits(hidden_TD)[-1].double(), -1)[int(prompt[cut])].item())
    return found


def test_prompts_are_a_function_of_the_seed() -> None:
    first, again, other = (probe_prompts(50, prompts=4, tokens=16, seed=seed) for seed in (7, 7, 8))
    assert [row.tolist() for row in first] == [row.tolist() for row in again]
    assert [row.tolist() for row in first] != [row.tolist() for row in other]
    assert all(row.dtype == np.int32 and row.shape == (16,) for row in first)
    assert min(row.min() for row in first) >= 0
    assert max(row.max() for row in first) < 50


@pytest.mark.parametrize(("vocab", "prompts", "tokens"), [(50, 0, 16), (50, 4, 1), (0, 4, 16)])
def test_prompts_that_would_prove_nothing_are_refused(vocab: int, prompts: int, tokens: int) -> None:
    with pytest.raises(ConfigError, match="proves nothing"):
        probe_prompts(vocab, prompts=prompts, tokens=tokens, seed=0)


@pytest.mark.parametrize("lengths", [(5,), (2, 9, 3), (16, 16, 16, 16), (4, 1, 2), (1, 3)])
def test_a_probe_holds_what_the_definition_gives(decoder: Decoder, lengths: tuple[int, ...]) -> None:
    prompts = rows(*lengths)
    probe = make_probe(decoder, prompts, 1e-3)
    assert [row.dtype for row in probe.logprobs] == [np.float32] * len(lengths)
    for row, prompt in zip(probe.logprobs, prompts, strict=True):
        assert row.shape == (len(prompt) - 1,)
        np.testing.assert_allclose(row, by_definition(decoder, prompt), atol=1e-5)
    check_probe(probe, probe_logprobs(decoder, prompts))


@pytest.mark.parametrize("training", [True, False])
def test_making_a_probe_leaves_mode_and_gradients_alone(training: bool) -> None:
    decoder = new_decoder(CONFIG, seed=0).train(training)
    make_probe(decoder, rows(4, 4), 1e-3)
    assert decoder.training is training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in decoder.parameters())


def test_weights_that_are_not_finite_are_not_published() -> None:
    decoder = new_decoder(CONFIG, seed=0)
    with torch.no_grad():
        decoder.head[3, 3] = float("nan")
    with pytest.raises(CarrierError, match="not finite, in probe prompt 0"):
        make_probe(decoder, rows(4, 4), 1e-3)


def test_every_single_tensor_made_wrong_is_seen(decoder: Decoder) -> None:
    """Each tensor of the model in turn shuffled: right bytes in the wrong places, the fault that no digest can see."""
    probe = make_probe(decoder, probe_prompts(CONFIG.vocab, prompts=4, tokens=16, seed=0), 1e-3)
    noise = torch.Generator().manual_seed(0)
    for name, tensor in decoder.state_dict().items():
        if bool((tensor == tensor.reshape(-1)[0]).all()):
            continue  # the norms of a new model are all ones
        held = tensor.clone()
        tensor.copy_(held.reshape(-1)[torch.randperm(held.numel(), generator=noise)].reshape(held.shape))
        with pytest.raises(CarrierError, match="the probe failed"):
            check_probe(probe, probe_logprobs(decoder, probe.prompts))
        tensor.copy_(held)
        assert name
    check_probe(probe, probe_logprobs(decoder, probe.prompts))


def a_probe(*logprobs: list[float], tolerance: float = 0.01) -> Probe:
    values = tuple(np.array(row, np.float32) for row in logprobs)
    return Probe(tuple(np.zeros(len(row) + 1, np.int32) for row in logprobs), values, tolerance)


def answer(*logprobs: list[float]) -> tuple[Float32, ...]:
    return tuple(np.array(row, np.float32) for row in logprobs)


def test_a_failed_probe_says_how_far_off_where_and_what_was_allowed() -> None:
    probe = a_probe([-1.0, -2.0], [], [-3.0, -4.0, -5.0])
    with pytest.raises(
        CarrierError,
        match=r"largest difference 0\.5 at prompt 2, token 2 \(published -4, the engine gave -4\.5\), tolerance 0\.01; "
        r"2 of 5 are beyond it",
    ):
        check_probe(probe, answer([-1.0, -2.02], [], [-3.0, -4.5, -5.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tolerance", [0.01, 1e30, math.inf, math.nan])
def test_what_is_not_finite_never_passes(value: float, tolerance: float) -> None:
    with pytest.raises(CarrierError, match=r"prompt 0, token 2"):
        check_probe(a_probe([-1.0, -2.0], tolerance=tolerance), answer([-1.0, value]))
    with pytest.raises(CarrierError, match="prompt 0"):
        check_probe(a_probe([value, -2.0], tolerance=tolerance), answer([value, -2.0]))


def test_an_answer_of_another_shape_is_refused() -> None:
    with pytest.raises(CarrierError, match=r"rows of \[2\] log-probabilities, the engine gave \[1\]"):
        check_probe(a_probe([-1.0, -2.0]), answer([-1.0]))
    with pytest.raises(CarrierError, match="rows of"):
        check_probe(a_probe([-1.0], [-2.0]), answer([-1.0]))


@pytest.mark.parametrize("probe", [a_probe(), a_probe([]), a_probe([], [])])
def test_a_probe_of_nothing_proves_nothing(probe: Probe) -> None:
    with pytest.raises(CarrierError, match="proves nothing"):
        check_probe(probe, probe.logprobs)


@given(
    values=st.lists(st.lists(st.floats(-20, 0, width=32), max_size=5), min_size=1, max_size=4),
    data=st.data(),
)
def test_an_answer_passes_if_and_only_if_every_difference_is_within_the_tolerance(
    values: list[list[float]], data: st.DataObject
) -> None:
    given_rows = [[value + data.draw(st.sampled_from([0, 0.005, -0.005, 0.02])) for value in row] for row in values]
    probe, found = a_probe(*values), answer(*given_rows)
    far = [abs(float(a) - float(b)) > 0.01 for x, y in zip(probe.logprobs, found, strict=True) for a, b in zip(x, y)]  # noqa: B905
    if far and not any(far):
        check_probe(probe, found)
    else:
        with pytest.raises(CarrierError):
            check_probe(probe, found)
