"""The plan of a version's way: for any two layouts all that is wanted arrives once, in bounds, and equals slicing."""

import math
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.config import Parallel
from contraflow.errors import CarrierError, ConfigError
from contraflow.model.families import ModelConfig
from contraflow.parallel.layout import place
from contraflow.parallel.pieces import Piece, at, dtypes, served, shapes, take, trained
from contraflow.weights.reshard import ALIGNMENT, Plan, plan

MOE = ModelConfig(
    family="qwen3_moe", vocab=11, dim=16, layers=3, heads=4, kv_heads=4, head_dim=4, ffn=12, experts=8, top_k=2,
    expert_ffn=8, dense_layers=(1,), attention_bias=True,
)  # fmt: skip
WHOLE = shapes(MOE)
WIRE = dtypes(MOE, torch.bfloat16)
Parts = list[dict[str, Piece]]


@st.composite
def trainers(draw: st.DrawFn) -> Parallel:
    dp, tp, cp, pp = draw(st.sampled_from([1, 2, 3])), *(draw(st.sampled_from([1, 2])) for _ in range(3))
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if (dp * tp * cp) % e == 0]))
    return Parallel(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep)


@st.composite
def engines(draw: st.DrawFn) -> Parallel:
    dp, tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if (dp * tp) % e == 0]))
    return Parallel(dp=dp, tp=tp, ep=ep)


def parts(trainer: Parallel, engine: Parallel) -> tuple[Parts, Parts]:
    return trained(MOE, trainer), served(MOE, engine)


def planned(trainer: Parallel, engine: Parallel, bucket_bytes: int) -> Plan:
    return plan(*parts(trainer, engine), WIRE, bucket_bytes=bucket_bytes)


LAYOUTS = given(trainer=trainers(), engine=engines(), bucket_bytes=st.sampled_from([50, 512, 4096, 1 << 20]))


@settings(max_examples=15)
@LAYOUTS
def test_what_arrives_is_each_ranks_slice_of_the_whole_and_every_element_is_written_once(
    trainer: Parallel, engine: Parallel, bucket_bytes: int
) -> None:
    whole = {name: torch.arange(math.prod(shape)).view(shape) for name, shape in WHOLE.items()}
    sources, targets = parts(trainer, engine)
    own = [{name: take(whole[name], piece) for name, piece in rank.items()} for rank in sources]
    got = [{name: torch.full(piece.shape, -1) for name, piece in rank.items()} for rank in targets]
    for bucket in planned(trainer, engine, bucket_bytes).buckets:
        for piece in bucket.slices:
            sent = own[bucket.source][piece.name][at(piece.there)]
            for target, box in zip(bucket.targets, piece.here, strict=True):
                assert (got[target][piece.name][at(box)] == -1).all()  # not written before
                got[target][piece.name][at(box)] = sent
    for rank, found in zip(targets, got, strict=True):
        for name, piece in rank.items():
            assert torch.equal(found[name], take(whole[name], piece)), name


@settings(max_examples=15)
@LAYOUTS
def test_buckets_keep_to_their_size_and_their_slices_do_not_overlap(
    trainer: Parallel, engine: Parallel, bucket_bytes: int
) -> None:
    for bucket in planned(trainer, engine, bucket_bytes).buckets:
        end = 0
        for piece in bucket.slices:
            assert piece.start >= end
            assert piece.start % ALIGNMENT == 0
            assert math.prod(hi - lo for lo, hi in piece.there) * WIRE[piece.name].itemsize == piece.nbytes
            end = piece.start + piece.nbytes
        assert 0 < end == bucket.nbytes <= bucket_bytes


@settings(max_examples=15)
@LAYOUTS
def test_no_rank_sends_or_receives_more_than_its_own_part(
    trainer: Parallel, engine: Parallel, bucket_bytes: int
) -> None:
    found = planned(trainer, engine, bucket_bytes)
    sources, targets = parts(trainer, engine)
    received, boxes = Counter[int](), Counter[tuple[object, ...]]()
    for bucket in found.buckets:
        received.update({target: sum(piece.nbytes for piece in bucket.slices) for target in bucket.targets})
        boxes.update((bucket.source, piece.name, piece.there) for piece in bucket.slices)
    assert set(boxes.values()) == {1} or engine.tp > 1  # a replica costs no second message
    for rank, held in enumerate(targets):
        assert received[rank] == sum(math.prod(piece.shape) * WIRE[name].itemsize for name, piece in held.items())
    for rank, source in enumerate(sources):
        own = {name: piece.shape for name, piece in source.items()}
        mine = [p for b in found.buckets if b.source == rank for p in b.slices]
        assert all(hi <= size for p in mine for (_, hi), size in zip(p.there, own[p.name], strict=True))


@settings(max_examples=15)
@LAYOUTS
def test_ranks_that_hold_the_same_share_the_sending_evenly(
    trainer: Parallel, engine: Parallel, bucket_bytes: int
) -> None:
    found = planned(trainer, engine, bucket_bytes)
    sources, _ = parts(trainer, engine)
    sent = _sent(found)
    alike = defaultdict[str, list[int]](list)
    for rank, held in enumerate(sources):
        alike[str({name: piece.boxes for name, piece in held.items()})].append(sent[rank])
    for loads in alike.values():
        assert max(loads) - min(loads) <= bucket_bytes


@settings(max_examples=15)
@LAYOUTS
def test_experts_go_only_where_they_are_served_and_in_one_message_for_all_who_serve_them(
    trainer: Parallel, engine: Parallel, bucket_bytes: int
) -> None:
    for bucket in planned(trainer, engine, bucket_bytes).buckets:
        for piece in bucket.slices:
            if piece.name.endswith("mlp.gate_up") and ".1." not in piece.name and engine.ep > 1:
                places = {place(target, engine).ep for target in bucket.targets}
                assert len(places) == 1
                assert len(bucket.targets) == engine.ranks // engine.ep
            if piece.name == "embed":
                assert len(bucket.targets) == engine.ranks


def test_replicas_of_the_trainer_halve_what_each_sends() -> None:
    alone, twice = (planned(Parallel(tp=tp, dp=1), Parallel(), 64) for tp in (1, 2))
    assert max(_sent(twice).values()) <= sum(_sent(alone).values()) / 2 + 64


def _sent(found: Plan) -> Counter[int]:
    sent = Counter[int]()
    for bucket in found.buckets:
        sent[bucket.source] += sum(piece.nbytes for piece in bucket.slices)
    return sent


def test_the_plan_is_the_same_wherever_it_is_made_and_another_for_another_layout() -> None:
    same = [planned(Parallel(dp=2, ep=2), Parallel(tp=2), 512).digest() for _ in range(2)]
    other = planned(Parallel(tp=2), Parallel(tp=2), 512).digest()
    assert same[0] == same[1] != other


def test_all_sources_have_a_bucket_among_the_first() -> None:
    found = planned(Parallel(dp=3), Parallel(), 64)
    assert {bucket.source for bucket in found.buckets[:3]} == {0, 1, 2}


def test_what_nobody_holds_is_refused_by_name() -> None:
    sources, targets = parts(Parallel(pp=2), Parallel())
    with pytest.raises(CarrierError, match=r"'norm'.*no rank of the trainer"):
        plan(sources[:1], targets, WIRE, bucket_bytes=512)


def test_a_bucket_too_small_for_an_element_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bucket_bytes = 3"):
        planned(Parallel(), Parallel(), 3)


def test_a_tensor_of_one_number_and_one_of_none_are_planned_too() -> None:
    one, none = Piece((), (), (((), ()),), True), Piece((0, 4), (0, 4), (), True)
    found = plan(
        [{"a": one, "b": none}], [{"a": one, "b": none}], {"a": torch.float32, "b": torch.float32}, bucket_bytes=8
    )
    assert [(b.nbytes, b.slices[0].name) for b in found.buckets] == [(4, "a")]
