"""Recorded experts on their way into the trainer: checked, carried by packing, taken, and compared."""

import asyncio
import math
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow import config
from contraflow.errors import ConfigError, RoutesError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.router import RouterTape
from contraflow.rollout.native import NativeEngine
from contraflow.telemetry import Account
from contraflow.train.batcher import Credit, pack, samples
from contraflow.train.forward import Reading, feed, score
from contraflow.train.optimizer import Optimizer
from contraflow.train.routing import check_routes, disagreement, known_routes, prepare_routers, replayed
from contraflow.train.step import Beside, TrainStep
from contraflow.types import Request, Sample, Version
from tests.train.conftest import DENSE, MIXTURE

MODEL = ModelConfig.from_hf(MIXTURE)  # 2 MoE layers, 2 of 4 experts a token
LAYERS, TOP, EXPERTS = 2, 2, 4


def random_routes(tokens: int, *, seed: int = 0, experts: int = EXPERTS) -> Any:
    """Different experts for every token and layer."""
    chance = np.random.default_rng(seed).random((tokens, LAYERS, experts))
    return chance.argsort(-1)[..., :TOP].astype(np.uint8)


def sample_of(length: int, *, seed: int = 0, routed: bool = True) -> Sample:
    rng = np.random.default_rng([length, seed])
    mask = np.arange(length) >= length // 2
    mask[0], mask[-1] = False, True
    return Sample(
        tokens=rng.integers(0, 32, length, dtype=np.int32),
        mask=mask,
        behaviour=np.where(mask, -math.log(32) + 0.1 * rng.normal(size=length), 0).astype(np.float32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        versions=np.where(mask, np.int32(0), np.int32(-1)),
        routes=random_routes(length - 1, seed=seed) if routed else None,
        routed=np.ones(length - 1, np.bool_) if routed else None,
    )


def own_routes(decoder: Decoder, sample: Sample) -> Any:
    tokens_L = torch.from_numpy(sample.tokens[:-1].astype(np.int64))
    tape = RouterTape()
    with torch.no_grad():
        decoder(tokens_L, torch.arange(len(tokens_L)), PackedPlan([0, len(tokens_L)]), tape=tape)
    return tape.routes().numpy()


def step_of(decoder: Decoder, *, loss: Any = None, **train: Any) -> tuple[TrainStep, Optimizer]:
    section = config.Train(**({"learning_rate": 1e-2, "warmup_updates": 0} | train))
    prepare_routers(decoder, section.routing, freeze=section.freeze_router)
    optimizer = Optimizer(decoder, section)
    step = TrainStep(
        decoder, optimizer, Account(lambda: 0.0), train=section, loss=loss or config.Loss(), temperature=1.0
    )
    return step, optimizer


def bits(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in decoder.named_parameters()}


# --- on the way ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=8),
    without=st.sets(st.integers(0, 7)),
    budget=st.integers(2, 30),
    shares=st.integers(1, 3),
)
def test_experts_stay_with_their_tokens_however_samples_are_packed(lengths, without, budget, shares) -> None:
    """Every token's expert is a function of the token and its place, so a row that went astray is seen."""
    made = []
    for place, length in enumerate(lengths):
        one = sample_of(length, seed=place, routed=place not in without)
        ids_L = (one.tokens[:-1] + 7 * np.arange(length - 1)) % 256
        if one.routes is not None:
            one = msgspec.structs.replace(one, routes=np.broadcast_to(ids_L[:, None, None], (length - 1, 2, 2)).copy())
        made.append(one)
    lacking = {one.tokens.tobytes() for one in made if one.routes is None}
    fed_tokens = 0
    for batch in pack(made, tokens_per_batch=budget, reduction="token", shares=shares):
        fed = feed(batch, torch.device("cpu"))
        sequences = [batch.tokens[a:b].tobytes() for a, b in zip(batch.starts[:-1], batch.starts[1:], strict=True)]
        known = np.concatenate([[], *[[s not in lacking] * (len(s) // 4 - 1) for s in sequences]]).astype(bool)
        fed_tokens += len(known)
        if fed.given is None:
            assert not known.any()
            continue
        assert fed.given.known_T.tolist() == known.tolist()
        wanted = (fed.tokens_F + 7 * fed.positions_F) % 256
        assert fed.given.layer(1)[known].tolist() == [[w, w] for w in wanted[known].tolist()]
    assert fed_tokens == sum(lengths) - len(lengths)


def test_the_experts_of_an_episode_go_as_far_as_its_last_trained_token(make_episode, make_group, choose) -> None:
    episode = make_episode(9, prompt=3, versions=(0,))
    trained = episode.trained.copy()
    trained[6:] = False  # what follows was said by the environment
    routes = random_routes(8)
    whole = msgspec.structs.replace(episode, trained=trained, routes=routes)
    group = make_group([whole, make_episode(9, seed=1)])
    ((one, other),) = samples([group], choose([group]), Credit())
    assert one.tokens.size == 6
    assert np.array_equal(one.routes, routes[:5])
    assert other.routes is None


def holey(length: int, holes: list[int]) -> Sample:
    one = sample_of(length)
    routes = one.routes.copy()
    routes[holes] = 0
    return msgspec.structs.replace(one, routes=routes, routed=None)


def test_what_comes_without_experts_is_routed_freely_or_left_out_or_refused_and_counted() -> None:
    groups = [[holey(6, []), holey(8, [0, 1, 2])], [msgspec.structs.replace(sample_of(5), routes=None, routed=None)]]
    own = replayed(groups, "r3", "own")
    assert (own.missing, own.dropped) == (3 + 4, 0)
    assert [[one.routed is not None for one in group] for group in own.by_group] == [[True, True], [False]]
    assert own.by_group[0][1].routed.tolist() == [False] * 3 + [True] * 4
    dropped = replayed(groups, "r3", "drop")
    assert (dropped.missing, dropped.dropped) == (7, 2)
    assert [[one.tokens.size for one in group] for group in dropped.by_group] == [[6], []]
    with pytest.raises(
        RoutesError, match=r"3 of 12 fed tokens of group 0 of the take .* train.missing_routes = 'refuse'"
    ):
        replayed(groups, "r3", "refuse")
    assert replayed([[holey(6, [])]], "r3", "refuse").missing == 0
    for routing in ("own", "r2"):
        free = replayed(groups, routing, "refuse")
        assert (free.missing, free.dropped) == (0, 0)
        assert all(one.routes is None for group in free.by_group for one in group)


def test_a_token_sent_to_one_expert_k_times_was_sent_nowhere() -> None:
    routes = np.array([[[0, 1], [2, 3]], [[0, 0], [0, 0]], [[3, 1], [2, 2]], [[1, 0], [0, 3]]], np.uint8)
    assert known_routes(routes).tolist() == [True, False, False, True]
    assert known_routes(routes[:, :, :1]).all()
    assert known_routes(routes[:0]).tolist() == []


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: r[:-1], r"shape \[6, 2, 2\].*due are \[7 fed tokens, 2 MoE layers, 2 different experts\] of 4"),
        (lambda r: np.concatenate([r, r[:1]]), r"shape \[8, 2, 2\]"),
        (lambda r: r[:, :1], r"shape \[7, 1, 2\]"),
        (lambda r: np.repeat(r, 2, 1), r"shape \[7, 4, 2\]"),
        (lambda r: r[:, :, :1], r"shape \[7, 2, 1\]"),
        (lambda r: r[0], r"shape \[2, 2\]"),
        (lambda r: r.astype(np.int32), r"type int32"),
        (lambda r: r.astype(np.float32), r"type float32"),
        (lambda r: put(r, (5, 1, 0), 4), r"name expert 4 for token 5 in MoE layer 1"),
        (lambda r: put(r.astype(np.uint16), (0, 0, 1), 65535), r"name expert 65535 for token 0 in MoE layer 0"),
    ],
)
def test_experts_of_another_model_or_length_are_refused_by_name(spoil, says, make_episode, make_group) -> None:
    fine = msgspec.structs.replace(make_episode(8), routes=random_routes(7))
    check_routes([make_group([fine, fine])], MODEL)
    bad = msgspec.structs.replace(fine, routes=spoil(random_routes(7)))
    with pytest.raises(RoutesError, match=f"the experts of episode 1 of group 17 .*{says}") as caught:
        check_routes([make_group([fine, bad], index=17)], MODEL)
    assert MODEL.digest() in str(caught.value)
    failed = msgspec.structs.replace(bad, error="the engine was lost")
    check_routes([make_group([failed])], MODEL)  # it is not trained


def put(routes, place, value):
    changed = routes.copy()
    changed[place] = value
    return changed


def test_an_expert_named_twice_among_others_is_refused(make_episode, make_group) -> None:
    three = ModelConfig.from_hf(MIXTURE | {"num_experts_per_tok": 3})
    routes = np.tile(np.array([0, 1, 2], np.uint8), (7, 2, 1))
    check_routes([make_group([msgspec.structs.replace(make_episode(8), routes=routes)])], three)
    twice = put(routes, (3, 1, 0), 2)
    with pytest.raises(RoutesError, match="name expert 2 twice for token 3 in MoE layer 1"):
        check_routes([make_group([msgspec.structs.replace(make_episode(8), routes=twice)])], three)


def test_a_model_without_experts_has_no_routes_to_replay_and_no_router_to_freeze() -> None:
    dense = new_decoder(ModelConfig.from_hf(DENSE), seed=0)
    for routing, freeze in (("r3", False), ("r2", False), ("own", True)):
        with pytest.raises(ConfigError, match="the model has no experts"):
            prepare_routers(dense, routing, freeze=freeze)
    prepare_routers(dense, "own", freeze=False)


# --- taken -----------------------------------------------------------------------------------------------------------


def rolled_out(decoder: Decoder, count: int = 12) -> list[Sample]:
    """What a native engine samples from the decoder, with the experts it records."""

    async def body() -> list[Sample]:
        section = config.Engine(context_tokens=64, kv_tokens=2048, max_sequences=16, block_tokens=4, routes=True)
        engine = NativeEngine(decoder, section, clock=time.perf_counter, stepping="inline", version=Version(0, 0))
        rng = np.random.default_rng(0)
        shared = rng.integers(0, 32, 9, dtype=np.int32)
        asked = [
            Request(
                id=str(i), prompt=shared[: 2 + i % 8], seed=i, max_new_tokens=3 + i % 9, group="g", want_routes=True
            )
            for i in range(count)
        ]
        told = await asyncio.gather(*(engine.generate(request) for request in asked))
        await engine.close()
        made = []
        for request, answer in zip(asked, told, strict=True):
            tokens = np.concatenate([request.prompt, answer.tokens])
            mask = np.arange(len(tokens)) >= len(request.prompt)
            behaviour = np.zeros(len(tokens), np.float32)
            behaviour[mask] = answer.logprobs
            assert answer.routes is not None
            made.append(
                Sample(
                    tokens=tokens,
                    mask=mask,
                    behaviour=behaviour,
                    advantages=np.where(mask, np.float32((-1.0) ** len(made)), np.float32(0)),
                    versions=np.where(mask, np.int32(0), np.int32(-1)),
                    routes=answer.routes,
                )
            )
        return made

    return asyncio.run(body())


def log_ratios(decoder: Decoder, made: list[Sample]) -> np.ndarray:
    """Largest of every sample."""
    found = []
    for one in made:
        (batch,) = pack([one], tokens_per_batch=999, reduction="token")
        fed = feed(batch, torch.device("cpu"))
        tape = RouterTape(fed.given)
        with torch.no_grad():
            scored = score(decoder, fed, Reading(), tape=tape)
        found.append(np.abs(scored.logprobs_N.numpy() - one.behaviour[one.mask]).max())
    return np.array(found)


def test_what_an_engine_recorded_is_what_the_trainer_would_choose_from_the_same_weights() -> None:
    """Prompts that share cached prefixes included; to the engine's log-probabilities as well."""
    decoder = new_decoder(MODEL, seed=1, std=0.2)
    made = rolled_out(decoder)
    (marked,) = replayed([made], "r3", "refuse").by_group
    assert log_ratios(decoder, marked).max() < 1e-4
    step, _ = step_of(decoder, routing="r3", learning_rate=1e-30)
    outcome = step.run([marked], step=0, seed=0)
    assert outcome.numbers.replayed_tokens == sum(one.tokens.size - 1 for one in made)
    assert outcome.numbers.routes_differ == outcome.numbers.first_differs == (0.0, 0.0)


def test_an_engine_of_other_routers_is_followed_by_replay_and_not_without_it() -> None:
    """An engine whose routers are rounded coarsely and whose other weights are the trainer's."""
    decoder, twin = (new_decoder(MODEL, seed=1, std=0.2) for _ in range(2))
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            if "router" in name:
                weight.copy_((weight / 0.1).round() * 0.1)
    made = rolled_out(twin)
    (marked,) = replayed([made], "r3", "refuse").by_group
    follows, free = log_ratios(decoder, marked), log_ratios(decoder, made)
    assert follows.mean() < free.mean() / 2
    step, _ = step_of(decoder, routing="r3", learning_rate=1e-30)
    numbers = step.run([marked], step=0, seed=0).numbers
    assert numbers.routes_differ == pytest.approx(counted_by_hand(decoder, marked, sorted), abs=1e-12)
    assert numbers.first_differs == pytest.approx(counted_by_hand(decoder, marked, lambda ids: ids[:1]), abs=1e-12)
    assert 0.01 < min(numbers.first_differs) < max(numbers.routes_differ) < 0.9


def counted_by_hand(decoder: Decoder, made: list[Sample], of: Any) -> list[float]:
    """Sample by sample, from what each router was shown: shares of tokens of which `of` differs, by layer."""
    seen: list[torch.Tensor] = []
    routers = [layer.mlp.router for layer in decoder.layers]
    hooks = [router.register_forward_hook(lambda m, x, _: seen.append(x[0] @ m.weight.T)) for router in routers]
    other, total = np.zeros(LAYERS), 0
    for one in made:
        seen.clear()
        (batch,) = pack([one], tokens_per_batch=999, reduction="token")
        fed = feed(batch, torch.device("cpu"))
        with torch.no_grad():
            decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=RouterTape(fed.given))
        for layer, logits in enumerate(seen):
            own = logits.argsort(-1, descending=True)[:, :TOP].tolist()
            other[layer] += sum(of(a) != of(b) for a, b in zip(own, one.routes[:, layer].tolist(), strict=True))
        total += one.tokens.size - 1
    for hook in hooks:
        hook.remove()
    return (other / total).tolist()


def test_nothing_is_said_where_nothing_was_replayed() -> None:
    assert disagreement([]) == disagreement([None]) == disagreement([torch.zeros(2, 3, dtype=torch.int64)])
    step, _ = step_of(new_decoder(MODEL, seed=1, std=0.2))
    assert step.run([[sample_of(6, routed=False)]], step=0, seed=0).numbers.routes_differ == ()


@pytest.mark.parametrize("old", ["behaviour", "proximal"])
def test_r2_keeps_the_choices_of_a_steps_first_pass_over_all_its_updates(old: str) -> None:
    """As if they had come with the samples; and of the second update some would have gone elsewhere."""
    made = [[sample_of(n, seed=n, routed=False) for n in (5, 9, 7)], [sample_of(n, routed=False) for n in (12, 4)]]
    kept, given = (new_decoder(MODEL, seed=1, std=0.2) for _ in range(2))
    known = [
        [
            msgspec.structs.replace(one, routes=(ids := own_routes(given, one)), routed=np.ones(len(ids), np.bool_))
            for one in group
        ]
        for group in made
    ]
    several: dict[str, Any] = {"epochs": 2, "updates": 2, "learning_rate": 0.1, "loss": config.Loss(old=old)}
    numbers = step_of(kept, routing="r2", **several)[0].run(made, step=0, seed=0).numbers
    wanted = step_of(given, routing="r3", **several)[0].run(known, step=0, seed=0).numbers
    assert all(torch.equal(a, b) for a, b in zip(bits(kept).values(), bits(given).values(), strict=True))
    assert numbers == wanted
    assert numbers.replayed_tokens == 2 * (37 - 5)
    assert max(numbers.routes_differ) > 0


def test_r2_of_one_update_is_the_routers_own_choice_and_costs_no_pass() -> None:
    made = [[sample_of(9, routed=False)]]
    one, other = (new_decoder(MODEL, seed=1, std=0.2) for _ in range(2))
    assert step_of(one, routing="r2")[0].run(made, step=0, seed=0).numbers.replayed_tokens == 0
    step_of(other)[0].run(made, step=0, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(bits(one).values(), bits(other).values(), strict=True))


def test_the_reference_of_the_kl_term_routes_as_it_likes() -> None:
    made = [[sample_of(9, seed=3)]]
    decoder, frozen = (new_decoder(MODEL, seed=1, std=0.2) for _ in range(2))
    section = config.Train(learning_rate=1e-30, warmup_updates=0, routing="r3")
    loss = config.Loss(kl_weight=1.0, kl_kind="k1")
    optimizer = Optimizer(decoder, section)
    step = TrainStep(
        decoder, optimizer, Account(lambda: 0.0), train=section, loss=loss, temperature=1.0, beside=Beside(frozen)
    )
    free = msgspec.structs.replace(made[0][0], routes=None, routed=None)
    gap = log_of(decoder, made[0][0]) - log_of(frozen, free)
    assert step.run(made, step=0, seed=0).numbers.kl == pytest.approx(float(gap.mean()), abs=1e-5)
    assert abs(gap.mean()) > 1e-4


def log_of(decoder: Decoder, one: Sample) -> torch.Tensor:
    (batch,) = pack([one], tokens_per_batch=999, reduction="token")
    fed = feed(batch, torch.device("cpu"))
    with torch.no_grad():
        return score(decoder, fed, Reading(), tape=RouterTape(fed.given)).logprobs_N


def test_a_frozen_router_stays_and_all_else_moves() -> None:
    decoder = new_decoder(MODEL, seed=1, std=0.2)
    before = bits(decoder)
    step, optimizer = step_of(decoder, freeze_router=True, loss=config.Loss(balance_weight=0.1))
    assert not any("router" in name for name in optimizer.moments())
    step.run([[sample_of(9, routed=False), sample_of(30, routed=False)]], step=0, seed=0)
    stayed = {name for name, weight in bits(decoder).items() if torch.equal(weight, before[name])}
    assert stayed == {"layers.0.mlp.router.weight", "layers.1.mlp.router.weight"}
