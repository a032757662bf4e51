import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.errors import TrainingError
from contraflow.train.batcher import Credit, group_credit, pack, samples, split
from contraflow.types import Chosen, Sample, Version

HUGE = 1 << 30


def sample(length: int, trained: int, *, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    mask = np.arange(length) >= length - trained
    return Sample(
        tokens=rng.integers(0, 99, length, dtype=np.int32),
        mask=mask,
        behaviour=rng.random(length, np.float32),
        advantages=np.where(mask, np.float32(seed + 1), np.float32(0)),
        versions=np.where(mask, np.int32(seed), np.int32(-1)),
    )


shapes = st.lists(st.tuples(st.integers(2, 30), st.integers(1, 29)), min_size=0, max_size=30)


def build(pairs: list[tuple[int, int]]) -> list[Sample]:
    return [sample(length, min(trained, length - 1), seed=i) for i, (length, trained) in enumerate(pairs)]


def test_every_token_of_an_episode_carries_its_advantage_and_prompts_carry_none(make_group, make_episode, choose):
    group = make_group([make_episode(6, reward=1.0), make_episode(5, reward=0.0, seed=1)])
    ((good, bad),) = samples([group], choose([group]), Credit("grpo"))
    assert good.mask.tolist() == [False, False, True, True, True, True]
    assert good.advantages.tolist() == [0, 0, 1, 1, 1, 1]
    assert bad.advantages.tolist() == [0, 0, -1, -1, -1]
    assert good.behaviour.tolist() == group.episodes[0].logprobs.tolist()
    assert good.versions.tolist() == [-1, -1, 0, 0, 0, 0]


def test_failed_episodes_are_left_out_and_do_not_move_the_baseline(make_group, make_episode, choose):
    episodes = [make_episode(4, reward=1.0), make_episode(4, reward=math.nan, error="grader raised"), make_episode(4)]
    group = make_group(episodes)
    assert group_credit(group, Credit("dr_grpo")).tolist() == [0.5, 0.0, -0.5]
    ((first, last),) = samples([group], choose([group]), Credit("dr_grpo"))
    assert (first.advantages[-1], last.advantages[-1]) == (0.5, -0.5)


def test_a_group_with_one_usable_episode_has_no_credit_to_give(make_group, make_episode, choose):
    group = make_group([make_episode(4, reward=1.0), make_episode(4, error="engine refused")])
    ((only,),) = samples([group], choose([group]), Credit("grpo"))
    assert not only.advantages.any()
    assert only.mask.sum() == 2


def test_tokens_below_the_floor_are_masked_and_still_count_in_the_baseline(make_group, make_episode):
    old = make_episode(6, reward=1.0, versions=(3,))
    mixed = make_episode(6, reward=0.0, versions=(3, 4), seed=1)
    group = make_group([old, mixed])
    ((left,),) = samples([group], [Chosen(0, 1, Version(1, 4))], Credit("dr_grpo"))
    assert left.mask.tolist() == [False, False, False, False, True, True]
    assert left.versions.tolist() == [-1, -1, -1, -1, 4, 4]
    assert left.advantages.tolist() == [0, 0, 0, 0, -0.5, -0.5]


def test_a_newer_line_is_above_any_floor_of_an_older_one(make_group, make_episode):
    group = make_group([make_episode(4, versions=(3,)), make_episode(4, versions=(3,))])
    assert len(samples([group], [Chosen(0, 1, Version(0, 9))], Credit("grpo"))[0]) == 2
    assert samples([group], [Chosen(0, 1, Version(2, 0))], Credit("grpo")) == [[]]


def test_a_sample_ends_with_its_last_trained_token(make_group, make_episode, choose):
    episode = make_episode(6)
    trained = episode.trained.copy()
    trained[4:] = False
    trailing = type(episode)(**{f: getattr(episode, f) for f in episode.__struct_fields__} | {"trained": trained})
    ((cut,),) = samples([g := make_group([trailing])], choose([g]), Credit("grpo"))
    assert cut.tokens.tolist() == episode.tokens[:4].tolist()


def test_the_first_token_of_an_episode_is_never_trained(make_group, make_episode, choose):
    ((promptless,),) = samples([g := make_group([make_episode(3, prompt=0)])], choose([g]), Credit("grpo"))
    assert promptless.mask.tolist() == [False, True, True]
    lone = make_group([make_episode(1, prompt=0)])
    assert samples([lone], choose([lone]), Credit("grpo")) == [[]]


def test_groups_that_were_not_taken_are_refused(make_group, make_episode):
    group = make_group([make_episode(4)], index=7)
    with pytest.raises(TrainingError, match=r"\(7, 1\).*\(7, 2\)"):
        samples([group], [Chosen(7, 2, Version(0, 0))], Credit("grpo"))


def test_nothing_gives_nothing():
    assert samples([], [], Credit("grpo")) == []
    assert pack([], tokens_per_batch=8, reduction="token") == []
    assert split(0, 3, seed=(0,)) == []


def test_first_fit_by_falling_length_worked_by_hand():
    batches = pack(
        [sample(n, 1, seed=i) for i, n in enumerate([3, 7, 2, 5, 3])], tokens_per_batch=10, reduction="token"
    )
    assert [np.diff(b.starts).tolist() for b in batches] == [[7, 3], [5, 3, 2]]
    assert [b.versions[b.mask].tolist() for b in batches] == [[1, 0], [3, 4, 2]]
    assert batches[0].positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]


def test_a_sample_longer_than_the_budget_gets_its_own_batch():
    batches = pack([sample(n, 1) for n in (3, 50, 4)], tokens_per_batch=10, reduction="token")
    assert [np.diff(b.starts).tolist() for b in batches] == [[50], [4, 3]]


@settings(deadline=None)
@given(shapes, st.integers(1, 80), st.sampled_from(["token", "sequence"]))
def test_packing_keeps_every_sample_whole_once_and_inside_the_budget(pairs, budget, reduction):
    made = build(pairs)
    batches = pack(made, tokens_per_batch=budget, reduction=reduction)
    seen = []
    for batch in batches:
        bounds = list(zip(batch.starts[:-1], batch.starts[1:], strict=True))
        assert batch.tokens.size <= budget or len(bounds) == 1
        seen += [tuple(batch.tokens[a:b].tolist()) for a, b in bounds]
    assert sorted(seen) == sorted(tuple(s.tokens.tolist()) for s in made)
    assert sum(float(b.weights.sum(dtype=np.float64)) for b in batches) == pytest.approx(1.0 if made else 0.0)
    assert all(not b.weights[~b.mask].any() for b in batches)


@settings(deadline=None)
@given(shapes, st.integers(1, 80), st.sampled_from(["token", "sequence"]))
def test_a_token_weighs_the_same_whatever_it_is_packed_with(pairs, budget, reduction):
    made = build(pairs)

    def weights(batches):
        return sorted((b.versions[i], b.weights[i]) for b in batches for i in np.flatnonzero(b.mask))

    few = pack(made, tokens_per_batch=HUGE, reduction=reduction)
    assert len(few) <= 1
    assert weights(pack(made, tokens_per_batch=budget, reduction=reduction)) == weights(few)


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 1000))
def test_updates_share_the_groups_evenly_and_depend_on_the_seed_alone(count, parts, seed):
    shares = split(count, parts, seed=(seed, 5, 0))
    assert sorted(np.concatenate([*shares, np.zeros(0, int)]).tolist()) == list(range(count))
    assert all(part.size for part in shares)
    assert not shares or max(map(len, shares)) - min(map(len, shares)) <= 1
    again = split(count, parts, seed=(seed, 5, 0))
    assert [p.tolist() for p in again] == [p.tolist() for p in shares]


def test_a_negative_seed_is_as_good_as_any():
    assert split(9, 1, seed=(-1, 0, 0))[0].tolist() != split(9, 1, seed=(1, 0, 0))[0].tolist()


@given(lengths=st.lists(st.integers(2, 30), max_size=40), budget=st.integers(1, 80), shares=st.integers(2, 5))
def test_packing_for_several_ranks_is_even_and_keeps_every_sample_once(lengths, budget, shares):
    made = [sample(length, length - 1, seed=place) for place, length in enumerate(lengths)]
    batches = pack(made, tokens_per_batch=budget, reduction="token", shares=shares)
    assert len(batches) % shares == 0
    sizes = [batch.tokens.size for batch in batches]
    assert sizes == sorted(sizes, reverse=True)  # what is computed at the same time is alike
    assert all(batch.tokens.size <= budget or batch.starts.size == 2 for batch in batches)
    packed = [
        tuple(batch.tokens[start:end])
        for batch in batches
        for start, end in zip(batch.starts[:-1], batch.starts[1:], strict=True)
    ]
    assert sorted(packed) == sorted(tuple(one.tokens) for one in made)
    total = sum(float(batch.weights.sum()) for batch in batches)
    assert total == pytest.approx(1.0 if lengths else 0.0, rel=1e-5)
    if lengths and max(lengths) <= budget / 4:  # the fullest is at most the mean and one sample
        assert len(batches) <= shares * math.ceil(4 / 3 * sum(lengths) / budget / shares)


def test_with_fewer_samples_than_ranks_some_have_nothing():
    batches = pack([sample(5, 4)], tokens_per_batch=100, reduction="sequence", shares=3)
    assert [batch.starts.tolist() for batch in batches] == [[0, 5], [0], [0]]
    assert [batch.tokens.size for batch in batches] == [5, 0, 0]
