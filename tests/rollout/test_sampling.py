"""The sampler against closed forms: the hash bit for bit, the draw by chi-square, the log-probabilities in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.rollout.sampling import invert_cdf, sample, sample_by_parts, stream_key, uniforms

INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix64(key: int, position: int) -> int:
    """The definition, in unbounded integers."""
    mask = (1 << 64) - 1
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(INT64, st.integers(0, 2**40))
def test_uniforms_equal_the_published_hash_to_24_bits(key: int, position: int) -> None:
    got = uniforms(np.array([key]), np.array([position]))
    assert got.dtype == np.float32
    assert got.item() == (splitmix64(key, position) >> 40) / 2**24


def test_the_first_outputs_for_key_zero_are_the_reference_ones() -> None:
    # From the reference implementation with state 0.
    assert [splitmix64(0, i) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.integers(-(2**80), 2**80))
def test_stream_keys_fit_int64_and_neighbours_differ_in_many_bits(seed: int) -> None:
    a, b = stream_key(seed), stream_key(seed + 1)
    assert -(2**63) <= a < 2**63
    assert ((a ^ b) & ((1 << 64) - 1)).bit_count() > 8


def test_seeds_beyond_64_bits_are_told_apart() -> None:
    assert stream_key(5) != stream_key(5 + 2**64)


def draw(logits_V: torch.Tensor, count: int, *, temperature: float = 1.0, seed: int = 7) -> torch.Tensor:
    """`count` draws from one distribution, one position each."""
    rows = logits_V.expand(count, -1)
    tokens, _ = sample(
        rows,
        scales_B=torch.full((count,), 1 / temperature),
        greedy_B=torch.zeros(count, dtype=torch.bool),
        uniforms_B=torch.from_numpy(uniforms(np.full(count, stream_key(seed)), np.arange(count))),
    )
    return tokens


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_frequencies_are_the_softmax_by_chi_square(temperature: float, seed: int) -> None:
    vocab, count = 32, 200_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    probability = torch.softmax(logits.double() / temperature, -1)
    seen = torch.bincount(draw(logits, count, temperature=temperature, seed=seed), minlength=vocab).double()
    chi_square = ((seen - count * probability) ** 2 / (count * probability)).sum().item()
    # 31 degrees of freedom: mean 31, deviation sqrt(62); 4.5 deviations would be a bug, not luck.
    assert chi_square < 31 + 4.5 * math.sqrt(62)


@pytest.mark.parametrize("step", [1, 2, 16])
def test_consecutive_positions_and_neighbouring_seeds_are_independent_by_chi_square(step: int) -> None:
    count, cells = 100_000, 8
    u = uniforms(np.full(count, stream_key(3)), np.arange(count))
    v = uniforms(np.array([stream_key(s) for s in range(count)]), np.full(count, 5))
    for series in (torch.from_numpy(u), torch.from_numpy(v)):
        pairs = (series[:-step] * cells).long() * cells + (series[step:] * cells).long()
        seen = torch.bincount(pairs, minlength=cells * cells).double()
        expected = len(pairs) / cells**2
        assert ((seen - expected) ** 2 / expected).sum().item() < 63 + 4.5 * math.sqrt(126)


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.full((40,), -torch.inf)
    logits[[3, 17, 31]] = torch.tensor([0.0, 1.0, -2.0])
    assert set(draw(logits, 100_000).tolist()) == {3, 17, 31}


@given(st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1 - 2**-23, 1 - 2**-24]))
def test_only_tokens_with_mass_are_drawn_even_at_the_ends_of_the_unit_interval(vocab: int, seed: int, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(64, vocab, generator=generator) ** 8
    mass[torch.rand(64, vocab, generator=generator) < 0.5] = 0
    mass[:, [0, -1]] = 0 if vocab > 2 else 1
    mass[:, vocab // 2] = 1
    mass /= mass.sum(-1, keepdim=True)  # adds up to 1 only nearly
    tokens, within = invert_cdf(mass, torch.full((64, 1), u))
    assert (mass.gather(-1, tokens) > 0).all()
    assert ((within >= 0) & (within < 1)).all()
    if u == 0:
        assert (tokens[:, 0] == (mass > 0).byte().argmax(-1)).all()


@pytest.mark.parametrize("vocab", [1, 2, 31, 50_000])
def test_log_probabilities_are_those_of_the_scaled_full_softmax(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator) * 3
    temperatures = torch.tensor([1.0, 0.7, 2.0, 1.0, 1.0, 1.0])
    tokens, logprobs = sample(
        logits,
        scales_B=1 / temperatures,
        greedy_B=torch.tensor([False, False, False, True, True, False]),
        uniforms_B=torch.rand(6, generator=generator),
    )
    exact = torch.log_softmax(logits.double() / temperatures[:, None].double(), -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=0)
    assert (tokens[3:5] == logits[3:5].argmax(-1)).all()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    rows = {
        "scales_B": torch.linspace(0.5, 2, 50),
        "greedy_B": torch.arange(50) % 7 == 0,
        "uniforms_B": torch.from_numpy(uniforms(np.arange(50) * 977, np.arange(50))),
    }
    together, _ = sample(logits, **rows)
    for i in range(50):
        alone, _ = sample(logits[i : i + 1], **{name: row[i : i + 1] for name, row in rows.items()})
        assert alone.item() == together[i].item()


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1000, 50_304])
def test_a_draw_by_parts_is_the_draw_from_the_whole(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(400, vocab, generator=generator) * 3
    rows = {
        "scales_B": 1 / torch.tensor([1.0, 0.7, 2.0, 1.0]).repeat(100),
        "greedy_B": torch.tensor([False, False, False, True]).repeat(100),
        "uniforms_B": torch.rand(400, generator=generator),
    }
    tokens, logprobs = sample_by_parts(logits, **rows)
    exact = torch.log_softmax(logits.double() * rows["scales_B"][:, None], -1)
    torch.testing.assert_close(logprobs.double(), exact.gather(-1, tokens[:, None])[:, 0], atol=2e-5, rtol=0)
    assert (tokens == logits.argmax(-1))[rows["greedy_B"]].all()
    # The uniform lies in the token's interval of the running sum, but for rounding.
    ends = exact.exp().cumsum(-1).gather(-1, tokens[:, None])[:, 0]
    starts = ends - exact.exp().gather(-1, tokens[:, None])[:, 0]
    u, drawn = rows["uniforms_B"].double(), ~rows["greedy_B"]
    assert ((starts - 1e-5 <= u) & (u <= ends + 1e-5))[drawn].all()


@given(st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1 - 2**-24]))
def test_a_draw_by_parts_never_gives_a_token_of_probability_zero(vocab: int, seed: int, u: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(32, vocab, generator=generator) * 8
    logits[torch.rand(32, vocab, generator=generator) < 0.9] = -torch.inf
    logits[:, vocab // 2] = 1.0
    tokens, logprobs = sample_by_parts(logits, scales_B=torch.ones(32), greedy_B=None, uniforms_B=torch.full((32,), u))
    assert (logits.gather(-1, tokens[:, None]) > -torch.inf).all()
    assert torch.isfinite(logprobs).all()


def test_a_row_without_numbers_gives_no_number_and_leaves_the_others_alone() -> None:
    logits = torch.zeros(3, 200)
    logits[1, 7] = torch.nan
    tokens, logprobs = sample_by_parts(logits, scales_B=torch.ones(3), greedy_B=None, uniforms_B=torch.full((3,), 0.25))
    assert tokens[0] == tokens[2] == 50
    assert torch.isfinite(logprobs).tolist() == [True, False, True]
    assert 0 <= tokens[1] < 200
