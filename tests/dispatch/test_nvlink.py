"""The dispatch over NVLink: virtual ranks run its kernels, by Triton's interpreter or on one GPU; and what it refuses.

    TRITON_INTERPRET=1 python -m pytest tests/dispatch/test_nvlink.py     # with Triton, where there is no GPU

Between GPUs: python -m tests.dispatch.gpu_ranks --kind nvlink.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.dispatch.domains import Topology
from contraflow.dispatch.group import GroupLinks
from contraflow.dispatch.nvlink import row_bytes
from contraflow.dispatch.nvlink_memory import AGAIN, HOME, LINE, OUT, TAGS, Layout, Sizes, load_kernels, lost
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.virtual import VirtualLinks, VirtualWorld
from contraflow.dispatch.wire import decode, encode
from contraflow.errors import DispatchError, WorkerDied
from tests.dispatch import gloo
from tests.dispatch.closed_form import Exact, Routing, differences, scaled
from tests.dispatch.mixture import make_case
from tests.dispatch.nvlink_twin import CAN_RUN, TwinGround, TwinWorld

needs_kernels = pytest.mark.skipif(not CAN_RUN, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
ON_GPU = torch.cuda.is_available()  # where backward passes have one thread, and virtual ranks would wait for ever
pytestmark = [pytest.mark.gpu] if ON_GPU else []


def world_of(routing: Routing, **more: Any) -> TwinWorld:
    choices = routing.choices if routing.experts_of is None else len(routing.experts_of)
    given_ = {"most": max(routing.tokens), "dtype": routing.dtype, "wire": routing.wire, "fixed": routing.fixed} | more
    return TwinWorld(len(routing.tokens), experts=routing.experts, choices=choices, dim=routing.dim, **given_)


def over_twins(routing: Routing, calls: int = 1, **more: Any) -> list[list[str]]:
    """What differs from the closed form, by rank, in the last of several calls. On a GPU values alone."""
    ranks, world = len(routing.tokens), world_of(routing, **more)

    def work(links: VirtualLinks) -> list[str]:
        dispatch, held = world.open(links), routing.experts // ranks
        case = Exact.of(routing, links.rank)
        right = case.right() | {"grad experts": routing.grad_experts()[links.rank * held :][:held]}
        got: dict[str, Tensor] = {}
        for _ in range(calls):
            x, ids, weights = case.inputs(routing, world.device)
            scale_L = case.scale_E[links.rank * held :][:held].float().to(world.device).requires_grad_()
            got = {"out": scaled(dispatch, x, ids, weights, scale_L)}
            if not ON_GPU:
                grads = torch.autograd.grad(
                    got["out"],
                    (x, weights, scale_L),
                    case.pull.to(got["out"]),
                    allow_unused=True,
                    materialize_grads=True,
                )
                got |= dict(zip(("grad x", "grad weights", "grad experts"), grads, strict=True))
        dispatch.check()
        return differences(got, {name: right[name] for name in got})

    return world.run(work)


@needs_kernels
@pytest.mark.parametrize(
    "routing",
    [
        Routing("plain", (9, 5), dim=72),
        Routing("four ranks, one without tokens", (5, 3, 0, 2), dim=40),
        Routing("no tokens", (0, 0), dim=8),
        Routing("one token", (0, 1), dim=1, experts=2, choices=1),
        Routing("no token has an expert", (3, 5), dim=8, absent=1.0),
        Routing("all to one expert", (7, 4), dim=8, experts_of=(5, -1)),
        Routing("an expert twice", (5, 3), dim=8, experts_of=(6, 6, 1, -1, -1)),
        Routing("wider than a tile", (3, 2), dim=2880),
        Routing("fixed rows", (9, 5), dim=72, fixed=True),
        Routing("fixed rows, none", (0, 0), dim=8, fixed=True),
        Routing("fp8", (4, 3), wire="fp8"),
        Routing("fp8, fixed, of fp32", (4, 0), dim=200, wire="fp8", fixed=True, dtype=torch.float32),
        Routing("fp32 rounded on the way", (4, 3), dim=24, dtype=torch.float32, wire="bf16"),
        Routing("fp32", (4, 3), dim=3, dtype=torch.float32),
        Routing("fp16", (4, 3), dim=5, dtype=torch.float16),
        Routing("float64", (4, 3), dim=5, dtype=torch.float64),
        Routing("not contiguous", (6, 3), dim=24, strided=True),
    ],
    ids=lambda routing: routing.name,
)
def test_values_and_gradients_are_the_closed_form_bit_for_bit(routing: Routing) -> None:
    assert over_twins(routing) == [[]] * len(routing.tokens)


@needs_kernels
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_routing_gives_the_closed_form_bit_for_bit(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 3]))
    experts = ranks * data.draw(st.integers(1, 3))
    routing = Routing(
        "any",
        tokens=tuple(data.draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))),
        experts=experts,
        choices=data.draw(st.integers(1, min(experts, 5))),
        dim=data.draw(st.sampled_from([1, 3, 72])),
        absent=data.draw(st.sampled_from([0.0, 0.3])),
        popular=data.draw(st.sampled_from([0.0, 3.0])),
        fixed=data.draw(st.booleans()),
    )
    sizes = Sizes(sms=data.draw(st.integers(1, 3)), local=2, tile_bytes=data.draw(st.sampled_from([64, 1024])))
    assert over_twins(routing, sizes=sizes) == [[]] * ranks


@needs_kernels
def test_halves_take_turns_and_what_earlier_calls_left_does_no_harm() -> None:
    assert over_twins(Routing("again", (9, 5), dim=8), calls=3) == [[], []]


@needs_kernels
def test_slots_may_lie_beyond_32_bits() -> None:
    routing = Routing("far", (3, 2), dim=2048)
    most = 2**31 // routing.dim + 1  # elements before the slots of the second rank
    assert over_twins(routing, most=most) == [[], []]


@needs_kernels
def test_rows_are_sorted_by_expert_then_source_then_token_and_nothing_is_written_twice() -> None:
    case = make_case([6, 4], experts=4, choices=2, dim=1, seed=4, absent=0.3)
    world = TwinWorld(2, experts=4, choices=2, dim=1, most=6)

    def work(links: VirtualLinks) -> tuple[list[int], list[float]]:
        tagged = 100.0 * links.rank + torch.arange(len(case.x[links.rank])).float()[:, None]
        rows = world.open(links).dispatch(
            tagged.to(world.device), case.ids[links.rank].to(world.device), case.weights[links.rank].to(world.device)
        )
        return rows.counts_E.tolist(), rows.x_RD[:, 0].tolist()

    pairs = [
        (int(expert), 100.0 * rank + token)
        for rank, ids in enumerate(case.ids) for token, row in enumerate(ids) for expert in row
    ]  # fmt: skip
    for rank, (counts, tags) in enumerate(world.run(work)):
        right = [[tag for expert, tag in pairs if expert == 2 * rank + held] for held in (0, 1)]
        assert counts == [len(tags) for tags in right]
        assert tags == right[0] + right[1]


@pytest.mark.skipif(not ON_GPU, reason="Triton's interpreter loses a carry where e4m3 rounds up to a power of two")
@pytest.mark.parametrize("dim", [72, 300, 1500])
def test_rows_in_fp8_are_those_of_the_wire_bit_for_bit(dim: int) -> None:
    case = make_case([5, 4], experts=2, choices=1, dim=dim, seed=6, absent=0.0)
    case.x[0][1, :128] = 0.0
    world = TwinWorld(2, experts=2, choices=1, dim=dim, most=5, wire="fp8")

    def work(links: VirtualLinks) -> Tensor:
        x, ids, weights = (of[links.rank].to(world.device) for of in (case.x, case.ids, case.weights))
        return world.open(links).dispatch(x, ids, weights).x_RD.cpu()

    there = torch.cat([decode(encode(x, "fp8"), "fp8", dim, torch.float32) for x in case.x])
    ids = torch.cat(case.ids)[:, 0]
    for rank, rows in enumerate(world.run(work)):
        assert torch.equal(rows, there[ids == rank])


@needs_kernels
def test_two_dispatches_in_flight_do_not_mix() -> None:
    cases = [make_case(tokens, experts=4, choices=2, dim=4, seed=seed) for tokens, seed in (([6, 4], 4), ([1, 5], 5))]
    world = TwinWorld(2, experts=4, choices=2, dim=4, most=6)

    def work(links: VirtualLinks) -> list[Tensor]:
        dispatch = world.open(links)
        rows = [dispatch.dispatch(*(of[links.rank].to(world.device) for of in (c.x, c.ids, c.weights))) for c in cases]
        return [dispatch.combine(r.x_RD * r.weights_R[:, None], r.handle).cpu() for r in reversed(rows)]

    for rank, outs in enumerate(world.run(work)):
        for case, out in zip(reversed(cases), outs, strict=True):
            share = torch.where(case.ids[rank] >= 0, case.weights[rank], 0.0).sum(1, keepdim=True)
            torch.testing.assert_close(out, case.x[rank] * share, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_bad_calls_are_refused_before_anything_is_written() -> None:
    world = TwinWorld(2, experts=2, choices=1, dim=3, most=4)

    def work(links: VirtualLinks) -> None:
        dispatch, x = world.open(links), torch.ones(1, 3, device=world.device)
        one, weight = torch.ones(1, 1, dtype=torch.int64, device=world.device), torch.ones(1, 1, device=world.device)
        with pytest.raises(DispatchError, match="5 tokens, but the group agreed on at most 4"):
            dispatch.dispatch(x.expand(5, 3), one.expand(5, 1), weight.expand(5, 1))
        with pytest.raises(
            DispatchError, match=r"width 3, torch.bfloat16, 1 experts each, but memory was opened for 3"
        ):
            dispatch.dispatch(x.bfloat16(), one, weight)
        rows = dispatch.dispatch(x, one, weight)
        with pytest.raises(DispatchError, match="rows of width 3"):
            dispatch.combine(rows.x_RD[:, :2], rows.handle)
        with pytest.raises(DispatchError, match="ask for the wire bf16"):
            dispatch.combine(rows.x_RD.half(), rows.handle)
        assert torch.equal(dispatch.combine(rows.x_RD, rows.handle), x)
        with pytest.raises(DispatchError, match="before"):
            dispatch.combine(rows.x_RD, rows.handle)

    world.run(work)


def ground_of(world: TwinWorld, rank: int, looks: int) -> TwinGround:
    links: Any = VirtualLinks(world.world, rank)
    return TwinGround(
        links, looks, layout=world.layout, experts=2, own=world.memory[rank], sizes=world.sizes,
        addresses=[memory.data_ptr() for memory in world.memory],
    )  # fmt: skip


@needs_kernels
def test_a_rank_that_does_not_come_is_named_and_later_meetings_do_not_wait() -> None:
    world = TwinWorld(3, experts=3, choices=1, dim=1, most=1)
    here, other = ground_of(world, 0, 5), ground_of(world, 2, 5)
    other.ring(OUT)
    here.meet_alone(OUT)
    assert here.told()[1] == [0, 1, 0]
    fault = lost(here.told()[1], (7, 8, 9), 0, 2.5)
    assert isinstance(fault, WorkerDied)
    assert fault.worker == "rank 8"
    assert "within 2.5 s of rank 7" in str(fault)
    here.meet_alone(HOME)
    assert here.told()[1] == [0, 1, 0]  # kept, though rank 2 is late now too


@needs_kernels
def test_a_rank_in_another_call_is_told_from_one_that_is_missing() -> None:
    world = TwinWorld(2, experts=2, choices=1, dim=1, most=1)
    here, other = ground_of(world, 0, 5), ground_of(world, 1, 5)
    other.ring(HOME)
    here.meet_alone(OUT)
    fault = lost(here.told()[1], (0, 1), 0, 1.0)
    assert isinstance(fault, DispatchError)
    assert "rank 1 is in another call than rank 0: a rank skipped or repeated a layer" in str(fault)


@needs_kernels
def test_a_rank_that_is_a_call_ahead_does_not_touch_what_others_still_read() -> None:
    world = TwinWorld(2, experts=2, choices=1, dim=4, most=3)
    here, ahead = ground_of(world, 0, 5), ground_of(world, 1, 5)
    ids = torch.zeros(3, 1, dtype=torch.int64, device=world.device)  # all to the expert of rank 0

    def send(ground: TwinGround, value: float) -> None:
        x, weights = torch.full((3, 4), value, device=world.device), torch.full((3, 1), value, device=world.device)
        ground.push(x, ids, weights, torch.float32)
        ground.ring(OUT)

    send(here, 1.0)
    send(ahead, 2.0)
    here.meet_alone(OUT)
    ahead.meet_alone(OUT)
    send(ahead, 9.0)
    ends, row, came = here.group()
    x, weights = torch.zeros(6, 4, device=world.device), torch.zeros(6, device=world.device)
    here.spread(x, weights, row, came, torch.float32)
    assert ends.tolist() == [6]
    assert x[:, 0].tolist() == weights.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


@needs_kernels
def test_a_meeting_that_all_came_to_leaves_no_fault() -> None:
    world = TwinWorld(2, experts=2, choices=1, dim=1, most=1)
    here, other = ground_of(world, 0, 5), ground_of(world, 1, 5)
    for tag in (OUT, HOME, AGAIN):
        other.ring(tag)
        here.meet_alone(tag)
        other.meet_alone(tag)
        assert here.told()[1] == other.told()[1] == [0, 0]
    assert lost([0, 0], (0, 1), 0, 1.0) is None


@given(ranks=st.integers(1, 32), most=st.integers(1, 10**5), choices=st.integers(1, 16), row=st.integers(1, 10**5))
def test_sections_are_aligned_and_do_not_overlap(ranks: int, most: int, choices: int, row: int) -> None:
    layout = Layout(ranks, most, choices, row)
    starts = [0, layout.tokens_at, layout.ids_at, layout.weights_at, layout.rows_at, layout.half]
    pairs = ranks * most * choices
    needed = [8 * ranks, 4 * ranks, 4 * pairs, 4 * pairs, ranks * most * row]
    for start, end, size in zip(starts, starts[1:], needed, strict=False):
        assert end % LINE == 0
        assert size <= end - start < size + LINE


@pytest.mark.parametrize(
    ("dim", "dtype", "wire", "least"),
    [(7168, torch.bfloat16, "same", 14336), (3, torch.float64, "same", 24), (256, torch.float32, "bf16", 512),
     (256, torch.float32, "fp8", 512), (1, torch.bfloat16, "fp8", 132)],
)  # fmt: skip
def test_a_slot_holds_a_token_and_an_answer(dim: int, dtype: torch.dtype, wire: Any, least: int) -> None:
    assert row_bytes(dim, dtype, wire) == -(-least // LINE) * LINE


def test_kinds_of_calls_fit_their_signal() -> None:
    assert len({OUT, HOME, AGAIN}) == 3
    assert max(OUT, HOME, AGAIN) < TAGS


def test_links_without_a_process_group_are_refused() -> None:
    def work(links: Any) -> None:
        with pytest.raises(DispatchError, match="process group"):
            open_dispatch("nvlink", links, experts=4, max_tokens=3)

    VirtualWorld(Topology.even(2, 2)).run(work)


def on_hosts_without_a_gpu(store: Any, rank: int) -> list[str]:
    assert dist.group.WORLD is not None
    links = GroupLinks(dist.group.WORLD, store=store, deadline_s=20)
    apart = GroupLinks(dist.group.WORLD, topology=Topology.even(2, 1), store=store, deadline_s=20)
    said = []
    for reach, given_ in (
        (links, {"max_tokens": None}),
        (links, {"max_tokens": 4 + rank}),
        (links, {"max_tokens": 4, "experts": 5}),
        (apart, {"max_tokens": 4}),
        (links, {"max_tokens": 4}),
    ):
        with pytest.raises(DispatchError) as caught:
            open_dispatch("nvlink", reach, **({"experts": 4} | given_))  # type: ignore[arg-type]
        said.append(str(caught.value))
    return said


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_in_a_group_every_rank_is_told_the_same(tmp_path: Path) -> None:
    for unset, unlike, uneven, apart, bare in gloo.run(on_hosts_without_a_gpu, 2, tmp_path):
        assert "nvlink needs max_tokens" in unset
        assert "disagree on max_tokens" in unlike
        assert "5 experts cannot be shared out evenly among 2 ranks" in uneven
        assert "one domain, not 2 in 2" in apart
        assert "needs a CUDA device" in bare


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed here")
def test_without_triton_it_says_where_that_comes_from() -> None:
    with pytest.raises(DispatchError, match="needs Triton, which is not installed; it comes with torch's CUDA wheels"):
        load_kernels()
