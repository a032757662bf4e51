"""What the DeepEP adapter decides before it calls the library: what it uses, refuses, pads and merges."""

import importlib.util
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.dispatch import deepep_library as library
from contraflow.dispatch.base import check_pairs
from contraflow.dispatch.deepep import PortDispatch, check_answers, check_inputs, merge_repeats, plain, with_dummy
from contraflow.dispatch.deepep_decode import together
from contraflow.dispatch.domains import Topology
from contraflow.dispatch.group import GroupLinks
from contraflow.dispatch.local import LocalDispatch
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.virtual import VirtualWorld
from contraflow.dispatch.wire import quantise
from contraflow.errors import DispatchError, WorkerDied
from tests.dispatch import gloo
from tests.dispatch.closed_form import Exact, Routing, differences, scaled
from tests.dispatch.port_twin import TwinPort

BUFFER = type("Buffer", (), {"low_latency_dispatch": None})


def module(**names: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**names)


@pytest.mark.parametrize(
    ("names", "low_latency", "api"),
    [
        ({"Buffer": BUFFER}, False, "buffer"),
        ({"Buffer": BUFFER, "ElasticBuffer": object}, False, "elastic"),
        ({"ElasticBuffer": object}, False, "elastic"),
        ({"Buffer": BUFFER, "ElasticBuffer": object}, True, "low_latency"),
    ],
)
def test_the_interface_follows_from_what_the_module_has(names: Any, low_latency: bool, api: str) -> None:
    assert library.choose_api(module(**names, __version__="0"), low_latency=low_latency) == api


@pytest.mark.parametrize(
    ("names", "low_latency", "said"),
    [
        ({"EPBuffer": object}, False, "this deep_ep has EPBuffer, but ElasticBuffer or Buffer is needed"),
        ({}, False, "no buffer"),
        ({"ElasticBuffer": object}, True, r"Buffer.low_latency_dispatch is needed"),
        ({"Buffer": object}, True, r"Buffer.low_latency_dispatch is needed"),
    ],
)
def test_a_module_without_a_known_interface_is_refused(names: Any, low_latency: bool, said: str) -> None:
    with pytest.raises(DispatchError, match=said):
        library.choose_api(module(**names), low_latency=low_latency)


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed here")
def test_a_missing_module_is_an_error_that_says_how_to_get_it() -> None:
    with pytest.raises(DispatchError, match=r"deep_ep .* is not installed; .* container image"):
        library.load()


@pytest.mark.parametrize("line", ["import no_such_library_at_all", "assert 1 == 2, 'NCCL of another version'"])
def test_a_module_that_does_not_load_is_an_error_with_its_reason(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_ep.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DispatchError, match=r"does not load .*(no_such_library_at_all|NCCL of another version)"):
        library.load()


@pytest.mark.parametrize(
    ("api", "topology", "experts", "max_tokens"),
    [
        ("buffer", Topology.even(2, 2), 256, 1),
        ("buffer", Topology.even(8, 8), 1024, 4096),
        ("buffer", Topology.even(160, 8), 320, 4096),
        ("low_latency", Topology.even(6, 6), 12, 508),
        ("low_latency", Topology.even(256, 8), 256, 128),
        ("elastic", Topology.even(3, 1), 3, 1),
        ("elastic", Topology.even(6, 3), 6, 8192),
    ],
)
def test_groups_that_the_library_serves_are_accepted(
    api: library.Api, topology: Topology, experts: int, max_tokens: int
) -> None:
    library.check_group(api, topology, experts, max_tokens)


@pytest.mark.parametrize(
    ("api", "topology", "experts", "max_tokens", "said"),
    [
        ("buffer", Topology.even(2, 2), 7, 9, "7 experts cannot be shared out evenly among 2 ranks"),
        ("elastic", Topology.even(2, 2), 0, 9, "0 experts"),
        ("buffer", Topology.even(2, 2), 4, 0, "max_tokens 0 must be at least 1"),
        ("buffer", Topology.even(3, 3), 6, 9, "no settings for 3 ranks"),
        ("buffer", Topology.even(40, 8), 40, 9, "no settings for 40 ranks"),
        ("low_latency", Topology.even(12, 12), 12, 9, "8 ranks a node, and 12 are no multiple"),
        ("buffer", Topology.even(4, 2), 4, 9, r"as one node with NVLink, but they are in domains \[0, 0, 1, 1\]"),
        ("buffer", Topology((0, 1) * 8), 16, 9, "start them node by node"),
        ("elastic", Topology((0, 1, 0, 1)), 4, 9, r"domain by domain, as many in each, not in domains \[0, 1, 0, 1\]"),
        ("elastic", Topology((0, 0, 1)), 3, 9, "as many in each"),
        ("buffer", Topology.even(2, 2), 258, 9, "129 experts a rank, but deep_ep.Buffer takes 128 on 2 ranks"),
        ("buffer", Topology.even(16, 8), 65 * 16, 9, "65 experts a rank, but deep_ep.Buffer takes 64 on 16 ranks"),
        ("low_latency", Topology.even(2, 2), 4, 509, "max_tokens 509 is too many for low latency, which takes 508"),
    ],
)
def test_groups_that_the_library_cannot_serve_are_refused_with_the_reason(
    api: library.Api, topology: Topology, experts: int, max_tokens: int, said: str
) -> None:
    with pytest.raises(DispatchError, match=said):
        library.check_group(api, topology, experts, max_tokens)


NODE, NODES = Topology.even(2, 2), Topology.even(16, 8)


@pytest.mark.parametrize(
    ("api", "topology", "dim", "fp8", "width"),
    [
        ("buffer", NODE, 72, False, 256),
        ("buffer", NODE, 2880, False, 3072),
        ("buffer", NODE, 2880, True, 3072),
        ("buffer", NODE, 2816, False, 2816),
        ("buffer", NODE, 2816, True, 3072),
        ("buffer", NODE, 7168, True, 7168),
        ("buffer", NODE, 7936, False, 7936),
        ("buffer", NODES, 8192, False, 8192),
        ("elastic", NODE, 16384, False, 16384),
        ("low_latency", NODE, 2049, False, 2560),
        ("low_latency", NODE, 8192, True, 8192),
    ],
)
def test_widths_are_padded_to_what_the_library_takes(
    api: library.Api, topology: Topology, dim: int, fp8: bool, width: int
) -> None:
    assert library.library_width(api, topology, dim, fp8=fp8) == width


@pytest.mark.parametrize(
    ("api", "dim", "said"),
    [("buffer", 8192, r"not in \[1, 7936\]"), ("low_latency", 8193, r"not in \[1, 8192\]"), ("elastic", 0, "width 0")],
)
def test_widths_that_the_library_does_not_take_are_refused(api: library.Api, dim: int, said: str) -> None:
    with pytest.raises(DispatchError, match=said):
        library.library_width(api, NODE, dim, fp8=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": 5}, "5 tokens, but the group agreed on at most 4; raise max_tokens on every rank"),
        ({"choices": 33}, r"33 experts a token is not in \[1, 32\]"),
        ({"choices": 0}, r"0 experts a token is not in \[1, 32\]"),
        ({"dtype": torch.float32}, "bfloat16, not torch.float32: ask for the wire bf16 or fp8"),
        ({"dtype": torch.float16}, "bfloat16, not torch.float16"),
    ],
)
def test_inputs_that_the_library_does_not_carry_are_refused(given: dict[str, Any], said: str) -> None:
    tokens, choices = given.get("tokens", 4), given.get("choices", 2)
    x = torch.zeros(tokens, 8, dtype=given.get("dtype", torch.bfloat16))
    ids, weights = torch.zeros(tokens, choices, dtype=torch.int64), torch.zeros(tokens, choices)
    check_pairs(x, ids, weights)
    with pytest.raises(DispatchError, match=said):
        check_inputs(x, ids, "same", 4, 32)


def test_other_dtypes_pass_where_rounding_was_asked_for() -> None:
    x, ids = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64)
    for wire in ("bf16", "fp8"):
        check_inputs(x, ids, wire, 4, 32)  # type: ignore[arg-type]
        check_answers(x, 8, wire)  # type: ignore[arg-type]
    with pytest.raises(DispatchError, match="rows of width 9"):
        check_answers(x, 9, "bf16")


def through_rows(ids_TK: torch.Tensor, weights_TK: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
    dispatch = LocalDispatch(8)
    rows = dispatch.dispatch(x_TD, ids_TK, weights_TK)
    expert_R = torch.searchsorted(rows.ends_E.long(), torch.arange(len(rows.x_RD)), right=True)
    return dispatch.combine(rows.x_RD * (rows.weights_R * (1.0 + expert_R))[:, None], rows.handle)


@settings(max_examples=50)
@given(
    ids=st.integers(0, 5).flatmap(
        lambda tokens: st.lists(st.lists(st.integers(-1, 7), min_size=4, max_size=4), min_size=tokens, max_size=tokens)
    )
)
def test_merging_repeats_changes_no_sum_and_no_gradient(ids: list[list[int]]) -> None:
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, 4)
    weights_TK = (1.0 + torch.arange(ids_TK.numel()) % 5).view(ids_TK.shape).requires_grad_()
    x_TD = torch.ones(len(ids_TK), 3)
    merged_TK, summed_TK = merge_repeats(ids_TK, weights_TK)
    named = [[e for e in row if e >= 0] for row in merged_TK.tolist()]
    assert all(len(set(row)) == len(row) for row in named)
    assert [set(row) for row in named] == [{e for e in row if e >= 0} for row in ids]
    outs = [through_rows(ids_TK, weights_TK, x_TD), through_rows(merged_TK, summed_TK, x_TD)]
    torch.testing.assert_close(*outs)
    grads = [torch.autograd.grad(out.sum(), weights_TK, allow_unused=True, materialize_grads=True)[0] for out in outs]
    torch.testing.assert_close(*grads)


def test_a_dummy_token_goes_to_distinct_experts_with_no_weight_and_lets_gradients_pass() -> None:
    x, ids, weights = torch.zeros(0, 4, requires_grad=True), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)
    one_x, one_id, one_weight = with_dummy(x, ids, weights, first=6, experts=8)
    assert one_id.tolist() == [[6, 7, 0]]
    assert one_weight.tolist() == [[0.0, 0.0, 0.0]]
    assert one_x.shape == (1, 4)
    assert torch.autograd.grad(one_x.sum(), x)[0].shape == (0, 4)
    assert with_dummy(x, ids, weights, first=1, experts=2)[1].tolist() == [[1, 0, -1]]


def test_received_fp8_values_are_their_blocks_times_their_scales() -> None:
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    values, scales = quantise(x)
    back = plain((values.flatten(1), scales), torch.float32)
    torch.testing.assert_close(back, x, rtol=2**-4, atol=1e-3)
    by_expert = plain((values.flatten(1).expand(2, 5, 512), scales.expand(2, 5, 4)), torch.bfloat16)
    assert by_expert.shape == (2, 5, 512)
    assert by_expert.dtype == torch.bfloat16
    assert plain((values.flatten(1)[:0], scales[:0]), torch.bfloat16).shape == (0, 512)  # keeps width and dtype


def test_places_that_came_are_brought_together_and_others_are_finite() -> None:
    x_LCD = torch.full((3, 4, 2), torch.nan)
    counts_L = torch.tensor([2, 0, 1], dtype=torch.int32)
    x_LCD[0, :2], x_LCD[2, 0] = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])
    rows = together(x_LCD, counts_L, most=5)
    assert rows.ends_E.tolist() == [2, 2, 3]
    assert rows.x_RD.tolist() == [[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]]
    assert rows.weights_R.tolist() == [1, 1, 1, 0, 0]
    back = LocalDispatch(3).combine(torch.where(rows.weights_R[:, None] > 0, rows.x_RD, torch.nan), rows.handle)
    assert torch.equal(back.view(3, 4, 2), x_LCD.nan_to_num(0.0))


def test_the_librarys_own_deadline_is_a_failure_of_this_package() -> None:
    for text in ("DeepEP error: CPU recv timeout", "Failed: EPException Dispatch CPU wait"):
        with pytest.raises(WorkerDied, match="a dispatch"), library.waiting("a dispatch"):
            raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="out of memory"), library.waiting("a dispatch"):
        raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("kind", ["deepep", "deepep_decode"])
def test_links_without_a_process_group_are_refused(kind: str) -> None:
    def work(links: Any) -> None:
        with pytest.raises(DispatchError, match="process group"):
            open_dispatch(kind, links, experts=4, max_tokens=3)

    VirtualWorld(NODE).run(work)


def test_a_capacity_below_the_maximum_is_refused() -> None:
    def work(links: Any) -> None:
        with pytest.raises(DispatchError, match="capacity 2 is below max_tokens 3"):
            open_dispatch("deepep", links, experts=4, max_tokens=3, capacity=2)

    VirtualWorld(NODE).run(work)


def without_the_module(store: Any, rank: int) -> list[str]:
    assert dist.group.WORLD is not None
    links = GroupLinks(dist.group.WORLD, store=store, deadline_s=20)
    said = []
    for max_tokens in (None, 4, 4 + rank):
        with pytest.raises(DispatchError) as caught:
            open_dispatch("deepep", links, experts=4, max_tokens=max_tokens)
        said.append(str(caught.value))
    return said


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed here")
def test_in_a_group_every_rank_is_told_the_same(tmp_path: Path) -> None:
    for unset, missing, unlike in gloo.run(without_the_module, 2, tmp_path):
        assert "deepep needs max_tokens" in unset
        assert "is not installed" in missing
        assert "disagree on max_tokens" in unlike


def test_one_rank_is_a_local_dispatch() -> None:
    found = VirtualWorld(Topology.even(1, 1)).run(lambda links: open_dispatch("deepep", links, experts=4))
    assert isinstance(found[0], LocalDispatch)


PORTS: dict[str, dict[str, Any]] = {
    "as Buffer": {},
    "as ElasticBuffer": {"least_tokens": 1, "distinct_ids": True},
}


def over_twins(routing: Routing, ranks: int, **port: Any) -> list[list[str]]:
    """What differs from the closed form, by rank, when the adapter's composition runs over a port between threads."""
    width = library.library_width("elastic", Topology.even(ranks, ranks), routing.dim, fp8=routing.wire == "fp8")
    most = max(1, *routing.tokens)

    def work(links: Any) -> list[str]:
        held = routing.experts // ranks
        twin = TwinPort(
            links.exchange(range(ranks)), experts=routing.experts, width=width,
            fixed_rows=ranks * most if routing.fixed else 0, **port,
        )  # fmt: skip
        dispatch = PortDispatch(
            twin, first=links.rank * held, held=held, experts=routing.experts, width=width,
            wire=routing.wire,  # type: ignore[arg-type]
        )  # fmt: skip
        case = Exact.of(routing, links.rank)
        x, ids, weights = case.inputs(routing, "cpu")
        scale_L = case.scale_E[links.rank * held :][:held].float().requires_grad_()
        out = scaled(dispatch, x, ids, weights, scale_L)
        leaves = (x, weights, scale_L)
        grads = torch.autograd.grad(out, leaves, case.pull.to(out), allow_unused=True, materialize_grads=True)
        got = {"out": out, "grad x": grads[0], "grad weights": grads[1], "grad experts": grads[2]}
        right = case.right() | {"grad experts": routing.grad_experts()[links.rank * held :][:held]}
        return differences(got, right)

    return VirtualWorld(Topology.even(ranks, ranks)).run(work)


@settings(max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("port", PORTS)
def test_any_routing_gives_the_closed_form_bit_for_bit(port: str, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 4]))
    experts = ranks * data.draw(st.integers(1, 4))
    routing = Routing(
        "any",
        tokens=tuple(data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))),
        experts=experts,
        choices=data.draw(st.integers(1, min(experts, 8))),
        dim=data.draw(st.sampled_from([3, 72, 256, 300])),
        absent=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        popular=data.draw(st.sampled_from([0.0, 3.0])),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float32])),
        wire=data.draw(st.sampled_from(["bf16", "fp8"])),
        fixed=data.draw(st.booleans()),
        strided=data.draw(st.booleans()),
    )
    assert over_twins(routing, ranks, **PORTS[port]) == [[]] * ranks


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("fixed", [False, True])
def test_an_expert_named_twice_keeps_both_weights(port: str, fixed: bool) -> None:
    routing = Routing("twice", tokens=(5, 3), experts_of=(6, 6, 1, -1, -1), fixed=fixed)
    assert over_twins(routing, 2, **PORTS[port]) == [[], []]


@pytest.mark.parametrize("port", PORTS)
def test_a_handle_is_good_for_one_combine_and_rows_of_one_width(port: str) -> None:
    def work(links: Any) -> None:
        twin = TwinPort(links.exchange(range(2)), experts=2, width=256, **PORTS[port])
        dispatch = PortDispatch(twin, first=links.rank, held=1, experts=2, width=256, wire="same")
        x = torch.ones(1, 3, dtype=torch.bfloat16)
        rows = dispatch.dispatch(x, torch.tensor([[1]]), torch.ones(1, 1))
        with pytest.raises(DispatchError, match="rows of width 3"):
            dispatch.combine(rows.x_RD[:, :2], rows.handle)
        with pytest.raises(DispatchError, match=r"bfloat16, not torch\.float32"):
            dispatch.combine(rows.x_RD.float(), rows.handle)
        with pytest.raises(DispatchError, match=r"but dispatch gave out \d rows"):
            dispatch.combine(x.new_zeros(9, 3), rows.handle)
        assert torch.equal(dispatch.combine(rows.x_RD, rows.handle), x)
        with pytest.raises(DispatchError, match="before"):
            dispatch.combine(rows.x_RD, rows.handle)

    VirtualWorld(NODE).run(work)
