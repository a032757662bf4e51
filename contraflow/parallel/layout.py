"""Which part of each tensor a rank holds: a pure function of the model, the mesh and the rank's place in it.

Serves loading, saving, publishing and refreshing, all of which speak of whole tensors by name. Data parallelism is not
part of it: FSDP cuts what is left once more, and puts it together again. Does not touch processes.

Rank order, outermost first: pipeline stage, dp, cp, tp. Tensor ranks are neighbours (they talk most), and so are the ep
ranks of one set of experts, which may reach over tp, cp and dp.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contraflow.config import Parallel
from contraflow.errors import ConfigError
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import FAMILIES

Range = tuple[int, int]  # from, up to


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank sits. `edp` numbers the copies of its experts: its gradients are summed over those."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    edp: int


def place(rank: int, parallel: Parallel) -> Place:
    """The place of `rank` among `parallel.ranks`."""
    if not 0 <= rank < parallel.ranks:
        raise ConfigError(f"rank {rank} is not in [0, {parallel.ranks}), the ranks of {parallel!r}")
    pp, inner = divmod(rank, parallel.stage_ranks)
    edp, ep = divmod(inner, parallel.ep)
    outer, tp = divmod(inner, parallel.tp)
    dp, cp = divmod(outer, parallel.cp)
    return Place(rank=rank, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, edp=edp)


@dataclass(frozen=True)
class Shard:
    """A part of a tensor: these ranges of one dimension, laid end to end."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.ranges)


def cut(whole: Tensor, shard: Shard | None) -> Tensor:
    """The part of `whole` that `shard` names, contiguous; `whole` itself for None."""
    if shard is None:
        return whole
    parts = [whole.narrow(shard.dim, start, end - start) for start, end in shard.ranges]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, shard.dim)).contiguous()


def shards(config: ModelConfig, parallel: Parallel, here: Place) -> dict[str, Shard | None]:
    """Decoder tensor name -> the part of it that the rank holds (None: all of it), in the decoder's order.

    Tensors of layers that belong to other pipeline stages are absent. Embedding and head are held by the first and the
    last stage. Raises ConfigError when sizes do not divide.
    """
    check_fit(config, parallel)
    held: dict[str, Shard | None] = {}
    layers = stage_layers(config.layers, stages(parallel))
    mine = [layer for stage in rank_stages(here.pp, parallel) for layer in layers[stage]]
    if here.pp == 0:
        held["embed"] = None
    for layer in sorted(mine):
        held |= {f"layers.{layer}.{name}": shard for name, shard in _layer(config, parallel, here, layer).items()}
    if here.pp == parallel.pp - 1:
        held["norm"] = None
        if not config.tied:
            held["lm_head"] = None
    return held


def stages(parallel: Parallel) -> int:
    """Pipeline stages in all: one a rank, two with the interleaved schedule."""
    return parallel.pp * (2 if parallel.schedule == "interleaved" and parallel.pp > 1 else 1)


def rank_stages(pp: int, parallel: Parallel) -> tuple[int, ...]:
    """The stages of pipeline rank `pp`: every pp-th, so that the last rank has the last stage."""
    return tuple(range(pp, stages(parallel), parallel.pp))


def stage_layers(layers: int, count: int) -> list[range]:
    """Layers of each of `count` stages; those in front have one more where they do not divide.

    Embedding and head make the first and last stage heavier, but the head of a small share of trained tokens little.
    """
    if count > layers:
        raise ConfigError(f"{count} pipeline stages for {layers} layers: a stage needs at least one layer")
    base, more = divmod(layers, count)
    starts = [stage * base + min(stage, more) for stage in range(count + 1)]
    return [range(starts[stage], starts[stage + 1]) for stage in range(count)]


def check_fit(config: ModelConfig, parallel: Parallel) -> None:
    """Raise ConfigError, naming sizes, unless the model can be spread like this."""
    wrong = []
    if parallel.ep > 1 and (not config.experts or config.experts % parallel.ep):
        wrong.append(f"ep = {parallel.ep} must divide the model's {config.experts} experts")
    if stages(parallel) > config.layers:
        wrong.append(
            f"pp = {parallel.pp} with schedule {parallel.schedule!r} makes {stages(parallel)} stages of the model's "
            f"{config.layers} layers: a stage needs at least one"
        )
    for what, size in (("heads", config.heads), ("kv_heads", config.kv_heads), ("ffn", config.ffn)):
        if size % parallel.tp:
            wrong.append(f"tp = {parallel.tp} must divide the model's {what} = {size}")
    if parallel.tp > 1 and (config.latent is not None or FAMILIES[config.family].oss):
        what = "attention sinks" if config.latent is None else "latent attention"
        wrong.append(f"tp = {parallel.tp}: {what} ({config.family}) is not cut by heads; use tp = 1, with dp, ep or pp")
    if parallel.pp > 1 and config.tied:
        wrong.append("pp > 1: the model ties its head to the embedding, which would lie on two stages")
    if wrong:
        raise ConfigError("; ".join(wrong))


def split_evenly(size: int, parts: int, index: int) -> Range:
    """Part `index` of `parts` equal parts of `range(size)`."""
    each = size // parts
    return index * each, (index + 1) * each


def _layer(config: ModelConfig, parallel: Parallel, here: Place, layer: int) -> dict[str, Shard | None]:
    tp = parallel.tp
    attention = _latent_attention(config) if config.latent is not None else _attention(config, tp, here)
    found: dict[str, Shard | None] = {"attention_norm": None, **attention, "mlp_norm": None}
    if layer in config.moe_layers:
        return found | _moe(config, parallel, here)
    found["mlp.gate_up"] = Shard(0, _stacked([config.ffn, config.ffn], tp, here.tp)) if tp > 1 else None
    found["mlp.down"] = Shard(1, (split_evenly(config.ffn, tp, here.tp),)) if tp > 1 else None
    return found


def _attention(config: ModelConfig, tp: int, here: Place) -> dict[str, Shard | None]:
    d, family, found = config.head_dim, FAMILIES[config.family], dict[str, Shard | None]()
    heads = _stacked([config.heads * d, config.kv_heads * d, config.kv_heads * d], tp, here.tp)
    found["attention.qkv"] = Shard(0, heads) if tp > 1 else None
    found["attention.out"] = Shard(1, (split_evenly(config.heads * d, tp, here.tp),)) if tp > 1 else None
    if config.attention_bias:
        found["attention.qkv_bias"] = Shard(0, heads) if tp > 1 else None
        found |= {"attention.out_bias": None} if family.out_bias else {}
    if config.qk_norm != "none":
        by_head = config.qk_norm == "projection" and tp > 1
        found["attention.qk_norm"] = Shard(0, heads[:2]) if by_head else None
    return found | ({"attention.sinks": None} if family.oss else {})


def _latent_attention(config: ModelConfig) -> dict[str, Shard | None]:
    """Whole on every rank: `check_fit` refuses tp."""
    names = ["down", "kv_norm", "kv_up", "out"]
    names += ["q_norm", "q_up"] if config.latent is not None and config.latent.q_rank is not None else []
    names += ["down_bias", "out_bias"] if config.attention_bias else []
    return {f"attention.{name}": None for name in names}


def _moe(config: ModelConfig, parallel: Parallel, here: Place) -> dict[str, Shard | None]:
    """Experts are cut by ep; the router and its bias are whole, and so are the shared experts."""
    family = FAMILIES[config.family]
    experts = Shard(0, (split_evenly(config.experts, parallel.ep, here.ep),)) if parallel.ep > 1 else None
    found: dict[str, Shard | None] = {"mlp.router.weight": None, "mlp.gate_up": experts, "mlp.down": experts}
    if family.oss:
        found |= {"mlp.router.bias": None, "mlp.gate_up_bias": experts, "mlp.down_bias": experts}
    if family.sigmoid:
        found |= {"mlp.router.correction_bias": None, "mlp.shared.gate_up": None, "mlp.shared.down": None}
    return found


def _stacked(sizes: Sequence[int], parts: int, index: int) -> tuple[Range, ...]:
    """Part `index` of each of several blocks that are laid end to end."""
    found, start = [], 0
    for size in sizes:
        lo, hi = split_evenly(size, parts, index)
        found.append((start + lo, start + hi))
        start += size
    return tuple(found)
