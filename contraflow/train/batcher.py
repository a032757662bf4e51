"""Groups become samples with credit, samples become packed micro-batches whose losses add up to one update.

Takes the groups of a take and what the window allows of them, gives `Sample`s by group and `Batch`es under a token
budget. Pure functions; nothing is drawn from a global source, and the same input gives the same packing.
Does not run a model. Shape letters: L tokens of one episode, T packed tokens, S sequences, G episodes of a group.
"""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from contraflow.algo.credit import AdvantageKind, group_scores, overlong_penalty
from contraflow.algo.loss import Reduction, token_shares
from contraflow.errors import TrainingError
from contraflow.types import (
    Batch,
    Bool,
    Chosen,
    Episode,
    Float32,
    Group,
    Int32,
    Int64,
    Routes,
    Sample,
    StopReason,
    Version,
)

N = TypeVar("N", bound=np.generic)


class Credit(NamedTuple):
    """How rewards become credit; see `config.Loss`."""

    kind: AdvantageKind = "grpo"
    overlong: tuple[int, int] = (0, 0)
    cut_off: bool = True  # whether episodes that the budget ended are trained


def samples(groups: Sequence[Group], chosen: Sequence[Chosen], credit: Credit) -> list[list[Sample]]:
    """Samples of each group, in the order of the groups; `chosen[i]` says what the window allows of `groups[i]`.

    Episodes that failed are left out; so are those with no trained token left. The baseline is that of all episodes
    that did not fail: an episode masked for its age, or cut off, still says how hard the task is. Where episodes are
    compared and fewer than two are left, every advantage is zero.
    Raises TrainingError when the groups are not those that were chosen.
    """
    expected = [(c.group, c.attempt) for c in chosen]
    got = [(g.ticket.group, g.ticket.attempt) for g in groups]
    if got != expected:
        raise TrainingError(f"the buffer gave groups (group, attempt) {got} where {expected} were taken")
    return [_group_samples(group, pick.floor, credit) for group, pick in zip(groups, chosen, strict=True)]


def group_credit(group: Group, credit: Credit) -> Float32:
    """What every episode of the group earned, `[G]`, as `group_scores` has it; 0 for those that failed."""
    usable = [i for i, episode in enumerate(group.episodes) if not episode.failed]
    rewards = torch.tensor([_reward(group.episodes[i], credit.overlong) for i in usable], dtype=torch.float64)
    credit_G = np.zeros(len(group.episodes), np.float32)
    credit_G[usable] = group_scores(rewards, kind=credit.kind).numpy()
    return credit_G


def _reward(episode: Episode, overlong: tuple[int, int]) -> float:
    begin, end = overlong
    return episode.reward - overlong_penalty(int(episode.trained.sum()), begin=begin, end=end)


def split(count: int, parts: int, *, seed: Sequence[int]) -> list[Int64]:
    """Shuffle `range(count)` and cut it into `parts` updates of sizes that differ by at most one; no update is empty.

    The order is a function of `seed` (run seed, step, epoch) alone, so a resumed run draws what the first would have.
    """
    order = np.random.default_rng([word % 2**64 for word in seed]).permutation(count)
    return [part for part in np.array_split(order, parts) if part.size]


class Packed(NamedTuple):
    """`bins[i]` are the places, among the samples, of the sequences of `batches[i]`, in order."""

    bins: list[list[int]]
    batches: list[Batch]


def pack(
    chosen: Sequence[Sample], *, tokens_per_batch: int, reduction: Reduction, shares: int = 1, constant: int = 1
) -> list[Batch]:
    """Pack one update's samples into micro-batches of at most `tokens_per_batch` tokens.

    First fit by falling length, ties in the given order; a sample longer than the budget gets a batch of its own.
    `weights` are shares of the whole update, so the sum of the micro-batch losses is the loss of one large batch; see
    `token_shares` for `reduction` and `constant`.

    For several `shares`, that compute at the same time and wait for each other, the number of micro-batches is a
    multiple of them, and micro-batches are as even as may be; some are empty when there are too few samples.
    """
    trained_S = np.array([np.count_nonzero(sample.mask) for sample in chosen], np.int64)
    shares_S = token_shares(torch.from_numpy(trained_S), reduction=reduction, constant=constant)
    return packed(chosen, shares_S.numpy().astype(np.float32), tokens_per_batch, shares).batches


def packed(chosen: Sequence[Sample], shares_S: Float32, tokens_per_batch: int, shares: int = 1) -> Packed:
    """As `pack`, for given shares of the loss, and which sample went where."""
    lengths_S = np.array([sample.tokens.size for sample in chosen], np.int64)
    bins = _first_fit(lengths_S, tokens_per_batch) if shares == 1 else _evenly(lengths_S, tokens_per_batch, shares)
    return Packed(bins, [_batch([chosen[i] for i in bin_], shares_S[bin_]) for bin_ in bins])


def _group_samples(group: Group, floor: Version, credit: Credit) -> list[Sample]:
    pairs = zip(group.episodes, group_credit(group, credit), strict=True)
    trained = [pair for pair in pairs if not pair[0].failed and (credit.cut_off or not _cut_off(pair[0]))]
    made = [_sample(episode, float(score), floor) for episode, score in trained]
    return [sample for sample in made if sample is not None]


def _cut_off(episode: Episode) -> bool:
    return episode.stop is StopReason.LENGTH


def _sample(episode: Episode, advantage: float, floor: Version) -> Sample | None:
    """The episode up to its last trained token: what comes after has no say in the loss. None when nothing is left."""
    versions_L = np.full(episode.tokens.size, -1, np.int32)
    mask_L = np.zeros(episode.tokens.size, np.bool_)
    for span in episode.spans:
        versions_L[span.start : span.end] = span.version.n
        mask_L[span.start : span.end] = span.version >= floor
    mask_L &= episode.trained
    mask_L[:1] = False  # the first token has nothing before it to be predicted from
    trained = np.flatnonzero(mask_L)
    if not trained.size:
        return None
    end = int(trained[-1]) + 1
    mask_L = mask_L[:end]
    return Sample(
        tokens=episode.tokens[:end],
        mask=mask_L,
        behaviour=episode.logprobs[:end],
        advantages=np.where(mask_L, np.float32(advantage), np.float32(0)),
        versions=np.where(mask_L, versions_L[:end], np.int32(-1)),
        routes=None if episode.routes is None else episode.routes[: end - 1],
        truncated=_cut_off(episode),
    )


def _first_fit(lengths_S: Int64, budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    first = 0  # bins before it are too full for any sample still to come, since lengths only fall
    shortest = int(lengths_S.min(initial=budget))
    for index in np.argsort(-lengths_S, kind="stable").tolist():
        length = int(lengths_S[index])
        while first < len(bins) and room[first] < shortest:
            first += 1
        home = next((b for b in range(first, len(bins)) if room[b] >= length), len(bins))
        if home == len(bins):
            bins.append([])
            room.append(budget)
        bins[home].append(index)
        room[home] -= length
    return bins


def _evenly(lengths_S: Int64, budget: int, shares: int) -> list[list[int]]:
    """The smallest multiple of `shares` bins that longest-first filling of the emptiest keeps within the budget.

    (Graham 1969: at most 4/3 of the best fullest bin.) Fullest first, so that bins used together are alike.
    """
    order = np.argsort(-lengths_S, kind="stable").tolist()
    count = max(1, -(-int(lengths_S.sum()) // (budget * shares))) * shares
    while True:
        bins, fill = [list[int]() for _ in range(count)], [(0, place) for place in range(count)]
        for index in order:
            size, place = heapq.heappop(fill)
            bins[place].append(index)
            heapq.heappush(fill, (size + int(lengths_S[index]), place))
        if all(size <= budget or len(bins[place]) == 1 for size, place in fill):
            return [bins[place] for _, place in sorted(fill, key=lambda one: (-one[0], one[1]))]
        count += shares


def _batch(chosen: Sequence[Sample], shares_S: Float32) -> Batch:
    lengths_S = np.array([sample.tokens.size for sample in chosen], np.int32)
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths_S, dtype=np.int32)])
    mask_T: Bool = _joined([sample.mask for sample in chosen], np.bool_)
    tokens_T: Int32 = _joined([sample.tokens for sample in chosen], np.int32)
    return Batch(
        tokens=tokens_T,
        positions=np.arange(tokens_T.size, dtype=np.int32) - np.repeat(starts[:-1], lengths_S),
        starts=starts,
        mask=mask_T,
        behaviour=_joined([sample.behaviour for sample in chosen], np.float32),
        advantages=_joined([sample.advantages for sample in chosen], np.float32),
        weights=np.where(mask_T, np.repeat(shares_S, lengths_S), np.float32(0)),
        versions=_joined([sample.versions for sample in chosen], np.int32),
        proximal=_looked([sample.proximal for sample in chosen]),
        reference=_looked([sample.reference for sample in chosen]),
        values=_looked([sample.values for sample in chosen]),
        returns=_looked([sample.returns for sample in chosen]),
        **_routes(chosen),
    )


def _looked(parts: Sequence[Float32 | None]) -> Float32 | None:
    """End to end, where every sample has it; an empty batch has whatever the others have."""
    known = [part for part in parts if part is not None]
    return _joined(known, np.float32) if len(known) == len(parts) else None


def _routes(chosen: Sequence[Sample]) -> dict[str, Any]:
    """Experts of all fed tokens, where some sample brings any."""
    known = [sample.routes for sample in chosen if sample.routes is not None and sample.routed is not None]
    if not known:
        return {}
    routes, routed = list[Routes](), list[Bool]()
    for sample in chosen:
        if sample.routes is None or sample.routed is None:
            fed = sample.tokens.size - 1
            routes.append(np.zeros((fed, *known[0].shape[1:]), known[0].dtype))
            routed.append(np.zeros(fed, np.bool_))
        else:
            routes.append(sample.routes)
            routed.append(sample.routed)
    return {"routes": np.concatenate(routes), "routed": np.concatenate(routed)}


def _joined(parts: Sequence[np.ndarray[Any, np.dtype[N]]], kind: type[N]) -> np.ndarray[Any, np.dtype[N]]:
    """End to end; of no parts, nothing."""
    return np.concatenate([np.zeros(0, kind), *parts])
