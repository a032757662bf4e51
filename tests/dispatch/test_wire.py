"""Tokens arrive as they were sent, up to the precision they travelled in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.dispatch import wire as w
from contraflow.dispatch.domains import Topology
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.spread import SpreadDispatch
from contraflow.dispatch.virtual import VirtualWorld
from tests.dispatch.mixture import Seen, check, make_case, run_rank


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 5),
    dim=st.integers(1, 300),
    wire=st.sampled_from(["same", "bf16", "fp8"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_values_come_back_within_their_precision(
    rows: int, dim: int, wire: w.Wire, dtype: torch.dtype, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, dim, generator=noise) * 10 ** (6 * torch.rand(rows, 1, generator=noise) - 3)).to(dtype)
    sent = w.encode(x, wire)
    assert sent.shape == (rows, w.value_bytes(dim, wire, dtype))
    back = w.decode(sent, wire, dim, dtype)
    assert back.dtype == dtype
    if wire == "same":
        assert torch.equal(back, x)
    elif wire == "bf16":
        torch.testing.assert_close(back.float(), x.float(), rtol=2**-8, atol=0)
    else:
        # e4m3 has 3 bits behind the point: half of 2^-3 of a value, or half a step of the block's smallest scale
        most = torch.nn.functional.pad(x.float(), (0, -dim % 128)).view(rows, -(-dim // 128), 128).abs().amax(-1)
        step = (most / 448 * 2**-9).repeat_interleave(128, 1)[:, :dim]
        extra = 2**-8 * x.float().abs() if dtype == torch.bfloat16 else 0
        assert ((back.float() - x.float()).abs() <= 2**-4 * x.float().abs() + step + extra).all()


def test_zeros_stay_zeros_and_the_largest_value_is_kept() -> None:
    x = torch.zeros(2, 256)
    x[1, 130] = -448.0 * 3
    assert torch.equal(w.decode(w.encode(x, "fp8"), "fp8", 256, torch.float32), x)


def test_ids_and_weights_are_exact_and_zero_bytes_mean_no_expert() -> None:
    ids = torch.tensor([[-1, 0, 383], [32765, 5, -1]])
    weights = torch.tensor([[0.1, 0.0, 1e-30], [3.4e38, 0.2, 0.3]])
    back_ids, back_weights = w.decode_meta(w.encode_meta(ids, weights), 3)
    assert torch.equal(back_ids, ids)
    assert torch.equal(back_weights, weights)
    none, zero = w.decode_meta(torch.zeros(1, w.meta_bytes(3), dtype=torch.uint8), 3)
    assert (none == -1).all()
    assert not zero.any()


@pytest.mark.parametrize("kind", ["per_expert", "all_to_all", "hierarchical"])
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_a_dispatch_in_lower_precision_is_the_dense_sum_of_the_rounded_tokens(kind: str, wire: w.Wire) -> None:
    case = make_case([6, 0, 9, 2], experts=8, choices=3, dim=136, seed=4)
    case.matrices = case.matrices / 136**0.5

    def work(links: Links) -> Seen:
        return run_rank(open_dispatch(kind, links, experts=8, wire=wire), case, links.rank, 4)

    seen = VirtualWorld(Topology.even(4, 2)).run(work)
    case.x = [w.decode(w.encode(x, wire), wire, 136, torch.float32) for x in case.x]
    check(case, seen, rtol=2e-2, atol=3e-2)  # answers and gradients travel as bf16


@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
def test_zero_rows_keep_width_and_dtype_in_every_precision(kind: str) -> None:
    def work(links: Links) -> None:
        for wire in ("same", "bf16", "fp8"):
            dispatch = open_dispatch(kind, links, experts=4, wire=wire)
            none = torch.zeros(0, 2, dtype=torch.int64)
            rows = dispatch.dispatch(torch.zeros(0, 130, dtype=torch.bfloat16), none, torch.zeros(0, 2))
            assert (rows.x_RD.shape, rows.x_RD.dtype) == ((0, 130), torch.bfloat16)
            assert dispatch.combine(rows.x_RD, rows.handle).shape == (0, 130)

    VirtualWorld(Topology.even(4, 2)).run(work)


def test_fp8_values_are_quantised_once_and_not_again_at_the_second_hop() -> None:
    case = make_case([6, 4, 9, 2], experts=8, choices=3, dim=256, seed=4)

    def work(links: Links) -> torch.Tensor:
        dispatch = open_dispatch("hierarchical", links, experts=8, wire="fp8")
        x, ids, weights = (of[links.rank] for of in (case.x, case.ids, case.weights))
        return dispatch.dispatch(x, ids, weights).x_RD

    arrived = torch.cat(VirtualWorld(Topology.even(4, 2)).run(work))
    sent = torch.cat([w.decode(w.encode(x, "fp8"), "fp8", 256, torch.float32) for x in case.x])
    assert {tuple(row) for row in arrived.tolist()} <= {tuple(row) for row in sent.tolist()}


def test_values_are_read_from_rows_of_any_stride() -> None:
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    sent = w.encode(x, "fp8")
    wide = torch.full((5, sent.shape[1] + 7), 255, dtype=torch.uint8)
    wide[:, 3:-4] = sent
    expected = w.decode(sent, "fp8", 200, torch.float32)
    assert torch.equal(w.decode(wide[:, 3:-4], "fp8", 200, torch.float32), expected)


def test_the_smallest_of_numbers_do_not_make_others_nan() -> None:
    x = torch.full((1, 256), 1e-44)
    x[0, 5] = 0.0
    assert w.decode(w.encode(x, "fp8"), "fp8", 256, torch.float32).isfinite().all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_beyond_two_to_the_31_bytes_arrive() -> None:
    rows, dim = 33_000, 1 << 14  # 2.2e9 bytes: offsets that 32 bits do not hold

    def work(links: Links) -> tuple[torch.Tensor, torch.Tensor]:
        dispatch = SpreadDispatch(links, experts=1, kind="all_to_all")
        x = torch.zeros(rows, dim)
        x[:, 0] = torch.arange(rows)
        x[:, -1] = -torch.arange(rows)
        arrived = dispatch.dispatch(x, torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1))
        home = dispatch.combine(arrived.x_RD, arrived.handle)
        return home[:, 0].clone(), home[:, -1].clone()

    ((first, last),) = VirtualWorld(Topology.even(1, 1), deadline_s=120).run(work)
    assert torch.equal(first, torch.arange(rows).float())
    assert torch.equal(last, -torch.arange(rows).float())
