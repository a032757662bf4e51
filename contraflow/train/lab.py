"""The mismatch laboratory: sampled tokens of a take, scored again by the versions that sampled them.

Takes a decoder that moves and the episodes of a take; keeps the newest versions' weights on the host and gives the
causes of each token's log-ratio (algo/mismatch.py). Puts every bit back before a step begins. Of several ranks each
keeps its own part of the weights and scores its share of the tokens; layers must all be on one. Does not train.
Shape letters: L tokens of one episode, N sampled tokens, M MoE layers, K experts per token.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from contraflow import config
from contraflow.algo.mismatch import CAUSES, Rescored, causes, extent
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder
from contraflow.model.router import RouterTape
from contraflow.parallel.data import at_rest, local
from contraflow.train.batcher import packed
from contraflow.train.crew import Crew
from contraflow.train.forward import Reading, score
from contraflow.train.growing import GrowingPlan
from contraflow.train.look import by_sample
from contraflow.train.report import Mismatch
from contraflow.train.routing import known_routes
from contraflow.types import Bool, Episode, Float32, Group, Sample, Version


class Bench(NamedTuple):
    """What is looked at: `tokens` sampled tokens of a step at least, if there are so many, in whole episodes."""

    tokens: int
    versions: int  # kept: eta + 1, the ages that a trained token may have
    temperature: float
    keeps_cache: bool  # whether engines keep keys and values through a refresh
    seed: int
    tokens_per_batch: int = 8192  # of one forward pass
    every: int = 1  # steps between looks


def bench_of(recipe: config.Recipe) -> Bench | None:
    """What a recipe wants looked at; None for nothing."""
    if not recipe.run.mismatch_every:
        return None
    return Bench(
        tokens=recipe.run.mismatch_tokens,
        versions=recipe.buffer.max_age + 1,
        temperature=recipe.rollout.temperature,
        keeps_cache=recipe.engine.on_refresh == "keep",
        seed=recipe.run.seed,
        tokens_per_batch=recipe.train.tokens_per_batch,
        every=recipe.run.mismatch_every,
    )


class Link(NamedTuple):
    """Tokens `[start, end)` of the turn that began at `turn`; `version` sampled them. The first computed all before."""

    version: Version
    start: int
    end: int
    turn: int

    @property
    def first(self) -> bool:
        """Whether the turn begins with it."""
        return self.start == self.turn


class Lab:
    """Invariant: `kept` holds the weights of at most `bench.versions` versions, the newest, as they were published; of
    several ranks' the part that is this rank's.

    `examine` is collective: all ranks are given the same groups, and all are told the same.
    """

    def __init__(self, decoder: Decoder, bench: Bench, crew: Crew) -> None:
        self._decoder, self._bench, self._crew = decoder, bench, crew
        self.kept: dict[Version, list[Tensor]] = {}

    @property
    def every(self) -> int:
        """Steps between looks."""
        return self._bench.every

    @property
    def nbytes(self) -> int:
        """Bytes on this rank's host now."""
        return sum(weight.nbytes for weights in self.kept.values() for weight in weights)

    def keep(self, version: Version) -> None:
        """Copy the weights as they are, as those of `version`; of too many the oldest go."""
        self.kept[version] = [weight.to("cpu", copy=True) for weight in self._weights()]
        for old in sorted(self.kept)[: -self._bench.versions]:
            del self.kept[old]

    def examine(self, groups: Sequence[Group], now: Version) -> Mismatch:
        """What the take's tokens say under the weights of `now`, which the decoder holds, and of who sampled them."""
        chosen, unknown = self._choose(groups, now)
        looks = [_Look(episode, self._bench.keeps_cache) for episode in chosen]
        differing: Tensor | None = None
        for version in sorted({link.version for look in looks for link in look.links}):
            masks = [(look, look.of(version)) for look in looks]
            mine = [(look, mask_L) for look, mask_L in masks if mask_L.any()]
            with self._holding(version, now):
                for (look, mask_L), found in zip(mine, self._score(mine), strict=True):
                    look.fresh_L[mask_L], look.entropy_L[mask_L] = (of_L[mask_L] for of_L in found)
                    look.cached_L[mask_L] = look.fresh_L[mask_L]
                self._follow(looks, version)
                for counts_M3 in self._routes(mine, version):
                    differing = counts_M3 if differing is None else differing + counts_M3
        whole = [(look, look.sampled_L) for look in looks]
        for (look, _), (now_L, _) in zip(whole, self._score(whole), strict=True):
            look.now_L = now_L
        self._join(looks)
        team = self._crew.team
        differing = None if differing is None else team.total(differing).cpu()
        host_bytes = int(team.sum(torch.tensor(self.nbytes, device=self._device)))
        return msgspec.structs.replace(_told(looks, unknown, differing), host_bytes=host_bytes)

    def _choose(self, groups: Sequence[Group], now: Version) -> tuple[list[Episode], int]:
        """Episodes in an order drawn from (seed, version), until there are tokens enough; and how many tokens of those
        passed over were sampled by a version that is not kept."""
        usable = [one for group in groups for one in group.episodes if not one.failed and one.trained[1:].any()]
        order = np.random.default_rng([self._bench.seed % 2**64, now.n]).permutation(len(usable))
        chosen, count, unknown = list[Episode](), 0, 0
        for episode in (usable[place] for place in order.tolist()):
            if count >= self._bench.tokens:
                break
            sampled = int(np.count_nonzero(episode.trained))
            if all(span.version in self.kept for span in episode.spans):
                chosen.append(episode)
                count += sampled
            else:
                unknown += sampled
        return chosen, unknown

    @contextmanager
    def _holding(self, version: Version, now: Version) -> Iterator[None]:
        """The weights of `version` inside, those of `now` again outside, bit for bit."""
        try:
            self._install(version)
            yield
        finally:
            self._install(now)

    @torch.no_grad()
    def _install(self, version: Version) -> None:
        for weight, kept in zip(self._weights(), self.kept[version], strict=True):
            weight.copy_(kept)

    def _weights(self) -> Iterator[Tensor]:
        """What of every weight lies on this rank: the very memory."""
        at_rest(self._decoder)
        return (local(weight) for weight in self._decoder.parameters())

    @torch.no_grad()
    def _score(self, asked: Sequence[tuple["_Look", Bool]]) -> list[tuple[Float32, Float32]]:
        """Log-probabilities and entropies, `[L]`, meaningful where masked, everything computed anew."""
        if not asked:
            return []
        samples, reading = [_sample(look.episode, mask_L) for look, mask_L in asked], Reading(self._bench.temperature)
        bins, batches = packed(
            samples, np.zeros(len(samples), np.float32), self._bench.tokens_per_batch, self._crew.team.shares
        )
        mine, feds = self._crew.feeds(batches, self._device)
        scored = [score(self._decoder, fed, reading) for fed in feds]
        logprobs, entropies = (
            dict(by_sample(bins, batches, self._crew.everywhere(batches, mine, found_N)))
            for found_N in ([one.logprobs_N for one in scored], [one.entropy_N for one in scored])
        )
        return [(logprobs[place], entropies[place]) for place in range(len(samples))]

    @torch.no_grad()
    def _follow(self, looks: Sequence["_Look"], version: Version) -> None:
        """What `version` says on the keys and values that versions before it left in a turn's cache. Ranks share out
        the episodes, and each makes as many passes as the one with most."""
        shares = self._crew.team.shares
        asked = [[(look, link) for look in looks[n::shares] for link in look.followed(version)] for n in range(shares)]
        for everybody in zip_longest(*asked):
            if (mine := everybody[self._here]) is not None:
                look, link = mine
                look.cached_L[link.start : link.end] = self._fed(look, link)
            else:
                nothing_F = torch.zeros(0, dtype=torch.int64, device=self._device)
                self._decoder(nothing_F, nothing_F, PackedPlan.of([0], self._device))

    def _fed(self, look: "_Look", link: Link) -> Float32:
        begin = 0 if link.first else link.start - 1
        tokens_L = torch.from_numpy(look.episode.tokens.astype(np.int64)).to(self._device)
        places_F = torch.arange(begin, link.end - 1, device=self._device)
        hidden_FD = self._decoder(tokens_L[begin : link.end - 1], places_F, look.plans[link.turn])
        rows_ND, head = hidden_FD[link.start - 1 - begin :], self._decoder.head
        targets_N = tokens_L[link.start : link.end]
        found = self._decoder.arithmetic.token_logprobs(rows_ND, head, targets_N, temperature=self._bench.temperature)
        return found[0].cpu().numpy()

    def _join(self, looks: Sequence["_Look"]) -> None:
        """Let every rank know what each followed. Ranks that share sequences have followed the same, so one tells."""
        if not looks:
            return
        team, context = self._crew.team, self._crew.context
        tells = context is None or context.place == 0
        told = [
            look.cached_L if tells and place % team.shares == self._here else np.zeros_like(look.cached_L)
            for place, look in enumerate(looks)
        ]
        joined = team.once(torch.from_numpy(np.concatenate(told)).to(self._device)).cpu().numpy()
        ends = np.cumsum([look.cached_L.size for look in looks])[:-1]
        for look, cached_L in zip(looks, np.split(joined, ends), strict=True):
            look.cached_L = cached_L

    @torch.no_grad()
    def _routes(self, asked: Sequence[tuple["_Look", Bool]], version: Version) -> Iterator[Tensor]:
        """By MoE layer `[M, 3]`, as `RouterTape.differing`, of the fed tokens before those of each mask, which
        `version` sampled; by batch of this rank. An engine that computes anew has recorded the experts of the newest
        alone."""
        known = [
            _sample(look.episode, mask_L, routed=True)
            for look, mask_L in asked
            if look.episode.routes is not None and (look.keeps_cache or version == look.links[-1].version)
        ]
        if not self._decoder.config.moe_layers or not known:
            return
        shares = self._crew.team.shares
        batches = packed(known, np.zeros(len(known), np.float32), self._bench.tokens_per_batch, shares).batches
        for fed in self._crew.feeds(batches, self._device)[1]:
            tape = RouterTape(fed.given)
            self._decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=tape)
            yield tape.differing()

    @property
    def _here(self) -> int:
        """This rank follows every `shares`-th episode, from this one on."""
        return self._crew.team.mine(range(self._crew.team.shares))[0]

    @property
    def _device(self) -> torch.device:
        return next(self._decoder.parameters()).device


class _Look:
    """One episode under the glass: `[L]` of what was found, meaningful where `sampled_L`."""

    def __init__(self, episode: Episode, keeps_cache: bool) -> None:
        self.episode, self.keeps_cache = episode, keeps_cache
        self.sampled_L = episode.trained & (np.arange(episode.tokens.size) > 0)
        self.links = list(_links(episode, self.sampled_L))
        self.fresh_L, self.cached_L, self.now_L, self.entropy_L = np.zeros((4, episode.tokens.size), np.float32)
        self.plans = defaultdict[int, GrowingPlan](GrowingPlan)  # of each turn, as far as it was followed

    def of(self, version: Version) -> Bool:
        """Tokens that `version` sampled, `[L]`."""
        mine_L = np.zeros_like(self.sampled_L)
        for link in self.links:
            if link.version == version:
                mine_L[link.start : link.end] = True
        return mine_L

    def followed(self, version: Version) -> list[Link]:
        """Stretches of `version` that stand on an older one's cache, or leave one to a newer, in order."""
        after = [not link.first for link in self.links[1:]] + [False]
        pairs = zip(self.links, after, strict=True) if self.keeps_cache else ()
        return [link for link, more in pairs if link.version == version and (more or not link.first)]

    @property
    def refreshed(self) -> int:
        """Tokens on a cache that an older version began."""
        return sum(link.end - link.start for link in self.links if not link.first) if self.keeps_cache else 0


def _links(episode: Episode, sampled_L: Bool) -> Iterator[Link]:
    """The episode's sampled tokens, cut where a turn or a version ends. Tokens of others in between begin a new turn:
    an engine is asked anew, and whatever it had cached for others it holds by the version it then serves."""
    last = turn = -1
    for span in episode.spans:
        places = span.start + np.flatnonzero(sampled_L[span.start : span.end])
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if places.size else []:
            start, end = int(run[0]), int(run[-1]) + 1
            turn = turn if start == last else start
            yield Link(span.version, start, end, turn)
            last = end


def _sample(episode: Episode, mask_L: Bool, *, routed: bool = False) -> Sample:
    nothing_L = np.zeros(episode.tokens.size, np.float32)
    given: dict[str, Any] = {}
    if routed and episode.routes is not None:
        given = {"routes": episode.routes, "routed": known_routes(episode.routes) & mask_L[1:]}
    return Sample(
        tokens=episode.tokens,
        mask=mask_L,
        behaviour=nothing_L,
        advantages=nothing_L,
        versions=np.full(episode.tokens.size, -1, np.int32),
        **given,
    )


def _told(looks: Sequence[_Look], unknown: int, differing_M3: Tensor | None) -> Mismatch:
    def joined(parts: Sequence[Float32]) -> Tensor:
        masked = [part_L[look.sampled_L] for part_L, look in zip(parts, looks, strict=True)]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *masked])).double()

    scored = Rescored(
        joined([look.episode.logprobs for look in looks]),
        joined([look.cached_L for look in looks]),
        joined([look.fresh_L for look in looks]),
        joined([look.now_L for look in looks]),
    )
    parts = causes(scored)
    told = {name: extent(part_N) for name, part_N in zip(CAUSES, parts, strict=True)}
    told["all"] = extent(scored.now_N - scored.behaviour_N)
    entropy_N = joined([look.entropy_L for look in looks])
    fed, sets_M = (0, []) if differing_M3 is None else (int(differing_M3[0, 0]), differing_M3[:, 1].tolist())
    return Mismatch(
        tokens=entropy_N.numel(),
        refreshed=sum(look.refreshed for look in looks),
        unknown=unknown,
        entropy=float(entropy_N.mean()) if entropy_N.numel() else 0.0,
        parts=told,
        routed=fed,
        routes_differ=tuple(count / fed for count in sets_M) if fed else (),
    )
