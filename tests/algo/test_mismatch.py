"""The split is exact for every token, and its measures have the closed forms they claim."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow.algo.mismatch import Rescored, causes, extent

LOGPROB = st.floats(-18.0, 0.0, width=32)


@given(st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB, LOGPROB), max_size=20))
def test_the_causes_of_every_token_add_up_to_its_log_ratio(rows: list[tuple[float, ...]]) -> None:
    scored = Rescored(*torch.tensor(rows, dtype=torch.float64).reshape(-1, 4).unbind(1))
    parts = torch.stack(causes(scored)).sum(0)
    torch.testing.assert_close(parts, scored.now_N - scored.behaviour_N, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cause", [0, 1, 2])
def test_what_moves_one_score_shows_in_its_own_part(cause: int) -> None:
    rows = torch.full((4, 5), -2.0, dtype=torch.float64)
    rows[cause + 1 :] += 0.25
    sizes = [extent(part)["size"] for part in causes(Rescored(*rows))]
    assert sizes == [0.25 if place == cause else 0.0 for place in range(3)]


def test_extent_of_known_parts() -> None:
    told = extent(torch.tensor([0.5, -0.5], dtype=torch.float64))
    assert told["size"] == told["largest"] == 0.5
    assert told["k1"] == pytest.approx(0.0)
    assert told["k3"] == pytest.approx(math.cosh(0.5) - 1)
    up, down = math.exp(0.5), math.exp(-0.5)
    assert told["effective"] == pytest.approx((up + down) ** 2 / (2 * (up**2 + down**2)))


def test_extent_of_no_tokens_is_no_mismatch() -> None:
    assert extent(torch.zeros(0)) == {"size": 0.0, "largest": 0.0, "k1": 0.0, "k3": 0.0, "effective": 1.0}
