"""The mismatch laboratory: sampled tokens of a take, scored again by the versions that sampled them.

Takes a decoder that moves and the episodes of a take; keeps the newest versions' weights on the host and gives the
causes of each token's log-ratio (algo/mismatch.py). Puts every bit back before a step begins. One rank; does not train.
Shape letters: L tokens of one episode, N sampled tokens, M MoE layers, K experts per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from contraflow import config
from contraflow.algo.mismatch import CAUSES, Rescored, causes, extent
from contraflow.model.decoder import Decoder
from contraflow.model.logprobs import token_logprobs
from contraflow.model.router import RouterTape
from contraflow.train.batcher import packed
from contraflow.train.forward import Reading, feed, score
from contraflow.train.growing import GrowingPlan
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
    """Tokens `[start, end)` of a turn that `version` sampled; `first` begins the turn, and computed all before it."""

    version: Version
    start: int
    end: int
    first: bool


class Lab:
    """Invariant: `kept` holds the weights of at most `bench.versions` versions, the newest, as they were published."""

    def __init__(self, decoder: Decoder, bench: Bench) -> None:
        self._decoder, self._bench = decoder, bench
        self.kept: dict[Version, list[Tensor]] = {}

    @property
    def every(self) -> int:
        """Steps between looks."""
        return self._bench.every

    @property
    def nbytes(self) -> int:
        """Bytes on the host now."""
        return sum(weight.nbytes for weights in self.kept.values() for weight in weights)

    def keep(self, version: Version) -> None:
        """Copy the weights as they are, as those of `version`; of too many the oldest go."""
        self.kept[version] = [weight.detach().to("cpu", copy=True) for weight in self._decoder.parameters()]
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
                    look.fresh_L[mask_L], look.entropy_L[mask_L] = found
                    self._follow(look, version)
                for counts_M3 in self._routes(mine, version):
                    differing = counts_M3 if differing is None else differing + counts_M3
        whole = [(look, look.sampled_L) for look in looks]
        for (look, mask_L), (now_N, _) in zip(whole, self._score(whole), strict=True):
            look.now_L[mask_L] = now_N
        return msgspec.structs.replace(_told(looks, unknown, differing), host_bytes=self.nbytes)

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
        for weight, kept in zip(self._decoder.parameters(), self.kept[version], strict=True):
            weight.copy_(kept)

    @torch.no_grad()
    def _score(self, asked: Sequence[tuple["_Look", Bool]]) -> list[tuple[Float32, Float32]]:
        """Log-probabilities and entropies, `[N]`, of the tokens of each mask, everything computed anew."""
        samples = [_sample(look.episode, mask_L) for look, mask_L in asked]
        found = [(np.zeros(0, np.float32), np.zeros(0, np.float32))] * len(samples)
        bins, batches = packed(samples, np.zeros(len(samples), np.float32), self._bench.tokens_per_batch)
        for bin_, batch in zip(bins, batches, strict=True):
            scored = score(self._decoder, feed(batch, self._device), Reading(self._bench.temperature))
            ends = np.cumsum([np.count_nonzero(samples[place].mask) for place in bin_])[:-1]
            parts = (np.split(of_N.cpu().numpy(), ends) for of_N in (scored.logprobs_N, scored.entropy_N))
            for place, logprobs_N, entropy_N in zip(bin_, *parts, strict=True):
                found[place] = (logprobs_N, entropy_N)
        return found

    @torch.no_grad()
    def _follow(self, look: "_Look", version: Version) -> None:
        """What `version` says on the keys and values that versions before it left in a turn's cache."""
        for place, link in enumerate(look.links):
            if link.version != version:
                continue
            if link.first:
                look.plan = GrowingPlan()
                follows = place + 1 < len(look.links) and not look.links[place + 1].first
                if not (follows and look.keeps_cache):
                    look.cached_L[link.start : link.end] = look.fresh_L[link.start : link.end]
                    continue
            elif not look.keeps_cache:
                look.cached_L[link.start : link.end] = look.fresh_L[link.start : link.end]
                continue
            begin = 0 if link.first else link.start - 1
            look.cached_L[link.start : link.end] = self._fed(look, link, begin)

    def _fed(self, look: "_Look", link: Link, begin: int) -> Float32:
        tokens_L = torch.from_numpy(look.episode.tokens.astype(np.int64)).to(self._device)
        places_F = torch.arange(begin, link.end - 1, device=self._device)
        hidden_FD = self._decoder(tokens_L[begin : link.end - 1], places_F, look.plan)
        rows_ND, head = hidden_FD[link.start - 1 - begin :], self._decoder.head
        targets_N = tokens_L[link.start : link.end]
        found = token_logprobs(rows_ND, head, targets_N, temperature=self._bench.temperature)
        return found[0].cpu().numpy()

    @torch.no_grad()
    def _routes(self, asked: Sequence[tuple["_Look", Bool]], version: Version) -> Iterator[Tensor]:
        """By MoE layer `[M, 3]`, as `RouterTape.differing`, of the fed tokens before those of each mask, which
        `version` sampled; by batch. An engine that computes anew has recorded the experts of the newest alone."""
        known = [
            _sample(look.episode, mask_L, routed=True)
            for look, mask_L in asked
            if look.episode.routes is not None and (look.keeps_cache or version == look.links[-1].version)
        ]
        if not self._decoder.config.moe_layers:
            return
        for batch in packed(known, np.zeros(len(known), np.float32), self._bench.tokens_per_batch).batches:
            fed = feed(batch, self._device)
            tape = RouterTape(fed.given)
            self._decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=tape)
            yield tape.differing().cpu()

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
        self.plan = GrowingPlan()  # of the turn that is being followed

    def of(self, version: Version) -> Bool:
        """Tokens that `version` sampled, `[L]`."""
        mine_L = np.zeros_like(self.sampled_L)
        for link in self.links:
            if link.version == version:
                mine_L[link.start : link.end] = True
        return mine_L

    @property
    def refreshed(self) -> int:
        """Tokens on a cache that an older version began."""
        return sum(link.end - link.start for link in self.links if not link.first) if self.keeps_cache else 0


def _links(episode: Episode, sampled_L: Bool) -> Iterator[Link]:
    """The episode's sampled tokens, cut where a turn or a version ends. Tokens of others in between begin a new turn:
    an engine is asked anew, and whatever it had cached for others it holds by the version it then serves."""
    last = -1
    for span in episode.spans:
        places = span.start + np.flatnonzero(sampled_L[span.start : span.end])
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if places.size else []:
            start, end = int(run[0]), int(run[-1]) + 1
            yield Link(span.version, start, end, first=start != last)
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
