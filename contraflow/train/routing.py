"""Routing replay: which experts the trainer's passes shall take, of those that engines recorded.

Takes the groups and samples of a take, gives samples whose recorded experts are checked, or refuses them (R3, arXiv
2510.11370). Experts of the trainer's own first pass (R2, arXiv 2507.18071) need no check: see `Crew.routes`. Does not
run a model. Shape letters: L tokens of one episode, M MoE layers, K experts per token.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from contraflow.errors import ConfigError, RoutesError
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.moe import MoE
from contraflow.types import Bool, Episode, Group, Routes, Sample

Routing = Literal["own", "r2", "r3"]
Missing = Literal["own", "drop", "refuse"]


class Replayed(NamedTuple):
    """The samples of a take that are trained, and what they lack."""

    by_group: list[list[Sample]]
    missing: int = 0  # fed tokens that came without experts, those of dropped samples included
    dropped: int = 0  # samples left out for it


class Disagreement(NamedTuple):
    """What replay changed, over the updates of a step. By MoE layer: shares of the replayed tokens."""

    replayed_tokens: int = 0  # fed tokens that went to recorded experts
    routes_differ: tuple[float, ...] = ()  # that the router would have sent to another set of experts
    first_differs: tuple[float, ...] = ()  # to another first choice


def disagreement(counts_M3: Sequence[Tensor | None]) -> Disagreement:
    """Of what each update counted (see `RouterTape.differing`); nothing where nothing was replayed."""
    counted = [counts for counts in counts_M3 if counts is not None]
    if not counted:
        return Disagreement()
    tokens_M, sets_M, firsts_M = torch.stack(counted).sum(0).double().unbind(1)
    if not tokens_M.any():
        return Disagreement()
    shares = [tuple((part_M / tokens_M).tolist()) for part_M in (sets_M, firsts_M)]
    return Disagreement(int(tokens_M[0]), *shares)


def replayed(by_group: Sequence[Sequence[Sample]], routing: Routing, missing: Missing) -> Replayed:
    """The samples as `train.routing` and `train.missing_routes` have them; routes are those that `check_routes` passed.

    Raises: RoutesError when a sample lacks experts and `missing` is `refuse`.
    """
    if routing != "r3":
        return Replayed([[msgspec.structs.replace(one, routes=None) for one in group] for group in by_group])
    kept, lacking, dropped = [], 0, 0
    for place, group in enumerate(by_group):
        marked = [_marked(sample) for sample in group]
        holes = [_holes(sample) for sample in marked]
        if missing == "refuse" and any(holes):
            fed = sum(one.tokens.size - 1 for one in group)
            raise RoutesError(
                f"{sum(holes)} of {fed} fed tokens of group {place} of the take (from 0) came without experts, and"
                " train.missing_routes = 'refuse'; see docs/routing.md for engines that give none, or use 'own' or"
                " 'drop'"
            )
        whole = [one for one, hole in zip(marked, holes, strict=True) if not hole]
        lacking += sum(holes)
        dropped += len(group) - len(whole) if missing == "drop" else 0
        kept.append(whole if missing == "drop" else marked)
    return Replayed(kept, lacking, dropped)


def known_routes(routes_LMK: Routes) -> Bool:
    """Which tokens have experts, `[L]`. A token sent to one expert K times was sent nowhere: an engine that has no
    experts for a token, such as one of a prefix cached without them, leaves such a row. With K = 1 none can be told."""
    if routes_LMK.shape[2] < 2:
        return np.ones(len(routes_LMK), np.bool_)
    first_LM, *others = np.moveaxis(routes_LMK, 2, 0)
    several_LM = np.logical_or.reduce([first_LM != other_LM for other_LM in others])
    known_L: Bool = several_LM.all(1)
    return known_L


def check_routes(groups: Sequence[Group], model: ModelConfig) -> None:
    """Whether the experts of every episode that has any can be of `model`.

    Raises: RoutesError, naming the episode, what it brings and what is due.
    """
    for group in groups:
        for place, episode in enumerate(group.episodes):
            if episode.routes is not None and not episode.failed and (fault := _fault(episode, episode.routes, model)):
                layers, top = len(model.moe_layers), model.top_k
                raise RoutesError(
                    f"the experts of episode {place} of group {group.ticket.group} {fault}; due are"
                    f" [{episode.tokens.size - 1} fed tokens, {layers} MoE layers, {top} different experts] of"
                    f" {model.experts}, uint8 or uint16, as model {model.digest()} has them: does the engine serve it?"
                )


def prepare_routers(decoder: Decoder, routing: Routing, *, freeze: bool) -> None:
    """Make the routers what a recipe asks for, before an optimizer sees them: `freeze` leaves them as they are.

    Raises: ConfigError when there are none.
    """
    if not decoder.config.experts and (routing != "own" or freeze):
        raise ConfigError(
            f"train.routing = {routing!r} and train.freeze_router = {str(freeze).lower()}: the model has no experts, so"
            " nothing to replay or freeze; leave them at 'own' and false"
        )
    for module in decoder.modules():
        if freeze and isinstance(module, MoE):
            module.router.requires_grad_(False)


def _marked(sample: Sample) -> Sample:
    if sample.routes is None:
        return sample
    return msgspec.structs.replace(sample, routed=known_routes(sample.routes))


def _holes(sample: Sample) -> int:
    return sample.tokens.size - 1 if sample.routed is None else int(np.count_nonzero(~sample.routed))


def _fault(episode: Episode, routes: Routes, model: ModelConfig) -> str:
    """What is wrong; nothing where all is well."""
    shape, due = routes.shape, (episode.tokens.size - 1, len(model.moe_layers), model.top_k)
    if shape != due or routes.dtype not in (np.uint8, np.uint16):
        return f"are of shape {list(shape)} and type {routes.dtype}"
    if routes.size and (highest := int(routes.max())) >= model.experts:
        token, layer, _ = (int(place) for place in np.argwhere(routes == highest)[0])
        return f"name expert {highest} for token {token} in MoE layer {layer}"
    known_L = known_routes(routes)
    for one_LM, other_LM in itertools.combinations(np.moveaxis(routes, 2, 0), 2):  # a sort takes four times as long
        if (twice := np.argwhere((one_LM == other_LM) & known_L[:, None])).size:
            token, layer = twice[0].tolist()
            return f"name expert {one_LM[token, layer]} twice for token {token} in MoE layer {layer}"
    return ""
