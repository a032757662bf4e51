"""The laboratory against scores written out by hand, and planted causes that must show in their own column only."""

import msgspec
import numpy as np
import pytest
import torch

from contraflow.algo.mismatch import CAUSES
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.router import RouterTape
from contraflow.telemetry import Account
from contraflow.train.crew import open_crew
from contraflow.train.growing import GrowingPlan
from contraflow.train.lab import Bench, Lab
from contraflow.types import Span, Version


def bench(**changes) -> Bench:
    return Bench(tokens=10_000, versions=5, temperature=0.7, keeps_cache=True, seed=3)._replace(**changes)


def lab_of(decoder: Decoder, **changes) -> Lab:
    return Lab(decoder, bench(**changes), open_crew(decoder, None, Account(lambda: 0.0), temperature=0.7))


def moved(decoder: Decoder, seed: int, size: float = 0.05) -> None:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.add_(size * weight.std() * torch.randn(weight.shape, generator=noise))


@torch.no_grad()
def played(decoder: Decoder, episode, *, keeps: bool, versions, round_to=None):
    """The episode with the log-probabilities of an engine: token by token, weights changing where spans do."""
    tokens_L = torch.from_numpy(episode.tokens.astype(np.int64))
    own = [weight.detach().clone() for weight in decoder.parameters()]
    found, plan, before = episode.logprobs.copy(), GrowingPlan(), None
    for span in episode.spans:
        for weight, kept in zip(decoder.parameters(), versions[span.version], strict=True):
            weight.copy_(kept if round_to is None else kept.to(round_to).float())
        begin = 0 if before is None else before - 1
        if not keeps or span.start != before:  # of another turn: others' tokens came in between
            begin, plan = 0, GrowingPlan()
        for place in [slice(begin, span.start), *(slice(at, at + 1) for at in range(span.start, span.end - 1))]:
            fed = torch.arange(place.start, place.stop)
            hidden = decoder(tokens_L[place], fed, plan)
            log_V = torch.log_softmax(decoder.logits(hidden[-1:]).double() / 0.7, -1)[0]
            found[place.stop] = log_V[tokens_L[place.stop]]
        before = span.end
    for weight, kept in zip(decoder.parameters(), own, strict=True):
        weight.copy_(kept)
    return msgspec.structs.replace(episode, logprobs=found)


@pytest.fixture
def planted(any_decoder, make_episode, make_group):
    """`look(...)`: what the laboratory says of episodes that a hand-written engine played."""

    def look(*, moves: float, keeps: bool = True, spans=(0,), round_to=None, seen_keeps=True, **changes):
        lab = lab_of(any_decoder, keeps_cache=seen_keeps, **changes)
        for n in range(3):
            lab.keep(Version(1, n))
            if n < 2 and moves:
                moved(any_decoder, n, moves)
        episodes = [make_episode(17 + place, seed=place, prompt=3, versions=spans) for place in range(6)]
        answers = [played(any_decoder, e, keeps=keeps, versions=lab.kept, round_to=round_to) for e in episodes]
        before = [weight.clone() for weight in any_decoder.parameters()]
        told = lab.examine([make_group(answers)], Version(1, 2))
        assert all(torch.equal(a, b) for a, b in zip(before, any_decoder.parameters(), strict=True))
        return told

    return look


def sizes(told) -> dict[str, float]:
    return {name: told.parts[name]["size"] for name in CAUSES}


def test_passes_over_a_growing_cache_are_one_pass(any_decoder: Decoder) -> None:
    tokens_L = torch.randint(0, 32, (23,), generator=torch.Generator().manual_seed(1))
    whole = any_decoder(tokens_L, torch.arange(23), PackedPlan([0, 23]))
    plan = GrowingPlan()
    cuts = [slice(0, 1), slice(1, 9), slice(9, 10), slice(10, 23)]
    parts = [any_decoder(tokens_L[cut], torch.arange(cut.start, cut.stop), plan) for cut in cuts]
    torch.testing.assert_close(torch.cat(parts), whole, atol=2e-5, rtol=1e-4)


def test_rounded_engine_weights_are_numerics_alone(planted) -> None:
    told = sizes(planted(moves=0.0, spans=(0, 1, 2), round_to=torch.bfloat16))
    assert told["numerics"] > 1e-4
    assert max(told["cache"], told["staleness"]) < 1e-2 * told["numerics"]


def test_old_versions_in_full_precision_are_staleness_alone(planted) -> None:
    told = sizes(planted(moves=0.2, spans=(0,)))
    assert told["staleness"] > 1e-2
    assert max(told["cache"], told["numerics"]) < 1e-3 * told["staleness"]


def test_a_cache_kept_through_a_refresh_is_cache_where_versions_are_told_apart(planted) -> None:
    told = planted(moves=0.2, spans=(1, 2))
    assert told.refreshed > 0
    assert told.parts["cache"]["size"] > 1e-3
    assert told.parts["numerics"]["size"] < 1e-3 * told.parts["cache"]["size"]


def test_turns_are_followed_apart_even_when_a_later_one_begins_with_an_older_version(
    any_decoder: Decoder, make_episode, make_group
) -> None:
    lab = lab_of(any_decoder)
    for n in range(4):
        lab.keep(Version(1, n))
        moved(any_decoder, n, 0.2)
    lab.keep(Version(1, 4))
    whole, sampled = make_episode(20), [(1, 2, 6), (3, 6, 10), (0, 13, 16), (2, 16, 20)]
    spans = tuple(Span(Version(1, n), start, end) for n, start, end in sampled)
    trained = whole.trained & ~np.isin(np.arange(20), [10, 11, 12])
    played_out = played(
        any_decoder,
        msgspec.structs.replace(whole, spans=spans, trained=trained),
        keeps=True,
        versions=lab.kept,
    )
    told = lab.examine([make_group([played_out])], Version(1, 4))
    assert told.refreshed == 8
    assert told.parts["cache"]["size"] > 1e-3
    assert told.parts["numerics"]["size"] < 1e-3 * told.parts["cache"]["size"]


def test_a_cache_that_was_computed_anew_is_no_cause(planted) -> None:
    told = planted(moves=0.2, keeps=False, seen_keeps=False, spans=(0, 1, 2))
    assert (told.parts["cache"]["size"], told.refreshed) == (0.0, 0)
    assert told.parts["numerics"]["size"] < 1e-3 * told.parts["staleness"]["size"]


def test_an_engine_that_kept_what_it_should_have_computed_anew_is_found_in_numerics(planted) -> None:
    assert sizes(planted(moves=0.2, keeps=True, seen_keeps=False, spans=(0, 1, 2)))["numerics"] > 1e-3


def test_all_three_at_once_add_up_to_the_whole(planted) -> None:
    told = planted(moves=0.2, spans=(0, 1, 2), round_to=torch.bfloat16)
    assert sum(told.parts[name]["k1"] for name in CAUSES) == pytest.approx(told.parts["all"]["k1"], abs=1e-5)
    assert all(size > 1e-4 for size in sizes(told).values())


def test_only_the_newest_versions_are_kept_and_tokens_of_others_are_counted(
    any_decoder: Decoder, make_episode, make_group
) -> None:
    lab = lab_of(any_decoder, versions=2)
    for n in range(4):
        lab.keep(Version(1, n))
    assert sorted(lab.kept) == [Version(1, 2), Version(1, 3)]
    assert lab.nbytes == 2 * sum(weight.nbytes for weight in any_decoder.parameters())
    old, other_line = make_episode(9, versions=(1, 2)), make_episode(9, versions=(3,), line=0)
    told = lab.examine([make_group([old, other_line, make_episode(9, versions=(2, 3))])], Version(1, 3))
    assert (told.tokens, told.unknown, told.host_bytes) == (7, 14, lab.nbytes)


@pytest.mark.parametrize("tokens", [1, 30])
def test_a_look_takes_whole_episodes_until_there_are_tokens_enough(
    any_decoder: Decoder, make_episode, make_group, tokens: int
) -> None:
    lab = lab_of(any_decoder, tokens=tokens)
    lab.keep(Version(1, 0))
    groups = [make_group([make_episode(9, seed=place), make_episode(9, error="broken")]) for place in range(20)]
    assert lab.examine(groups, Version(1, 0)).tokens == 7 * -(-tokens // 7)


def test_nothing_to_look_at_is_no_mismatch(any_decoder: Decoder, make_episode, make_group) -> None:
    lab = lab_of(any_decoder)
    lab.keep(Version(1, 0))
    for groups in ([], [make_group([make_episode(9, error="broken")])]):
        told = lab.examine(groups, Version(1, 0))
        assert (told.tokens, told.parts["all"]["k3"], told.parts["all"]["effective"]) == (0, 0.0, 1.0)


def test_experts_that_the_engine_recorded_are_held_to_the_sampling_version(
    mixture: Decoder, make_episode, make_group
) -> None:
    lab = lab_of(mixture)
    lab.keep(Version(1, 0))
    episode = make_episode(12)
    tape = RouterTape()
    tokens_F = torch.from_numpy(episode.tokens[:-1].astype(np.int64))
    mixture(tokens_F, torch.arange(11), PackedPlan([0, 11]), tape=tape)
    own = tape.routes().numpy()
    away = own.copy()
    away[5:, 1] = (own[5:, 1] + 1) % 4  # of ten sampled tokens, seven are fed at or behind this place
    same, other = (
        lab.examine([make_group([msgspec.structs.replace(episode, routes=routes)])], Version(1, 0))
        for routes in (own, away)
    )
    assert (same.routed, same.routes_differ) == (10, (0.0, 0.0))
    assert other.routes_differ[0] == 0.0
    assert other.routes_differ[1] > 0.3
