"""The trainer's arithmetic on one rank and on many: the same updates, seen as whole tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from contraflow.config import Parallel, Train
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import save_folder
from contraflow.model.kinds import Latent
from contraflow.parallel.data import local
from contraflow.parallel.mesh import open_mesh
from contraflow.parallel.spread import Spread, load_spread
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.crew import open_crew
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from contraflow.types import Sample

TRAIN = Train(warmup_updates=0, clip_norm=0.5)

SIGMOID: dict[str, Any] = {
    "heads": 4, "experts": 8, "top_k": 3, "expert_ffn": 8, "dense_layers": (0,), "ffn": 12, "shared_experts": 2,
    "groups": 4, "top_groups": 2, "renormalise": True, "routed_scale": 2.5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "heads": 4,
        "kv_heads": 2,
        "experts": 4,
        "top_k": 2,
        "expert_ffn": 8,
        "dense_layers": (1,),
        "ffn": 12,
    },
    "olmoe": {"heads": 4, "kv_heads": 4, "experts": 8, "top_k": 3, "expert_ffn": 16, "attention_bias": True},
    "deepseek_v3": SIGMOID
    | {
        "kv_heads": 4,
        "latent": Latent(q_rank=12, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=6),
        "attention_bias": True,
    },
    "glm4_moe": SIGMOID | {"kv_heads": 2, "rotary_dim": 4, "attention_bias": True},
    "gpt_oss": {"heads": 4, "kv_heads": 2, "experts": 4, "top_k": 2, "expert_ffn": 8, "attention_bias": True}
    | {"window": 3, "window_layers": (0, 2), "swiglu_alpha": 1.702, "swiglu_limit": 0.5, "renormalise": True},
    "qwen3": {"heads": 4, "kv_heads": 4, "ffn": 20, "attention_bias": True, "tied": True},
}


def make_folder(family: str, folder: Path, layers: int = 3) -> Path:
    """A random model of that family, odd in its sizes, weights large enough for every gradient to matter."""
    config = ModelConfig(
        family=family, vocab=37, dim=16, layers=layers, head_dim=8, context=64, norm_eps=1e-5, **MODELS[family]
    )
    decoder = new_decoder(config, seed=1, std=0.2)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    save_folder(decoder, folder / family)
    return folder / family


def samples(count: int, *, seed: int = 0, routed: ModelConfig | None = None) -> list[Sample]:
    """With `routed`, experts to go to of most tokens of two samples in three, none of them the router's own choice."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(rng.integers(2, 20))
        mask = np.arange(length) >= int(rng.integers(1, length))
        made.append(
            Sample(
                tokens=rng.integers(0, 37, length, dtype=np.int32),
                mask=mask,
                behaviour=np.where(mask, -rng.random(length), 0).astype(np.float32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                versions=np.where(mask, np.int32(0), np.int32(-1)),
            )
        )
    if routed is None:
        return made
    chance = [rng.random((one.tokens.size - 1, len(routed.moe_layers), routed.experts)) for one in made]
    routes = [one.argsort(-1)[..., : routed.top_k].astype(np.uint8) for one in chance]
    known = [rng.random(len(one)) < 0.8 for one in routes]
    triples = zip(made, routes, known, strict=True)
    given = [msgspec.structs.replace(one, routes=ids, routed=where) for one, ids, where in triples]
    return [free if place % 3 == 2 else one for place, (free, one) in enumerate(zip(made, given, strict=True))]


def objective(batch, fed, scored):
    def tensor(values_T):
        return torch.from_numpy(values_T[batch.mask]).to(scored.logprobs_N.device)

    ratio_N = (scored.logprobs_N - tensor(batch.behaviour)).exp()
    return -(tensor(batch.weights) * tensor(batch.advantages) * ratio_N).sum()


class Seen(NamedTuple):
    """Of three updates. Tensors are whole, None on ranks other than 0."""

    losses: list[float]
    balances: list[float]
    norms: list[float]
    loads: list[Any]
    differing: list[Any]  # see `RouterTape.differing`
    gradient: dict[str, Tensor | None]  # of the first update, after clipping
    weights: dict[str, Tensor | None]


def three_updates(
    spread: Spread, *, counts: Sequence[int] = (9, 1, 14), budget: int = 40, routed: bool = False
) -> Seen:
    """Train on random samples; the second update has but one, so that some ranks have nothing."""
    spread.decoder.recompute = spread.mesh is not None and spread.mesh.parallel.recompute == "layer"
    optimizer = Optimizer(spread.decoder, TRAIN, spread)
    account = Account(lambda: 0.0)
    crew = open_crew(spread.decoder, spread.mesh, account, temperature=1.0)
    updater = Updater(spread.decoder, optimizer, account, crew, balance_weight=0.1)
    done, gradient = [], {}
    for update, count in enumerate(counts):
        made = samples(count, seed=update, routed=spread.config if routed else None)
        batches = pack(made, tokens_per_batch=budget, reduction="token", shares=crew.team.shares)
        done.append(updater.update(batches, objective))
        if not gradient:
            held = {name: local(p.grad) for name, p in spread.decoder.named_parameters() if p.requires_grad}
            trained = [name for name in spread.shapes if not name.endswith("correction_bias")]
            gradient = {name: spread.gather(name, held.get(name)) for name in trained}
    return Seen(
        losses=[one.loss for one in done],
        balances=[one.balance for one in done],
        norms=[one.applied.grad_norm for one in done],
        loads=[None if one.loads_ME is None else one.loads_ME.tolist() for one in done],
        differing=[None if one.differing_M3 is None else one.differing_M3.tolist() for one in done],
        gradient=gradient,
        weights=dict(spread.tensors()),
    )


def alone(folder: Path, routed: bool = False) -> Seen:
    return three_updates(load_spread(folder, None), routed=routed)


def on_ranks(
    store: Any, rank: int, cases: Sequence[tuple[Parallel, Path]], meeting: Path, routed: bool = False
) -> list[Seen]:
    """Every case in turn, in the same processes."""
    dist.barrier()  # who leaves while others still connect breaks their connections
    dist.destroy_process_group()
    seen = []
    for index, (parallel, folder) in enumerate(cases):
        with open_mesh(parallel, rank=rank, init_method=f"file://{meeting}/{index}") as mesh:
            seen.append(three_updates(load_spread(folder, mesh), routed=routed))
    return seen


def difference(found: Tensor | None, wanted: Tensor | None) -> float:
    """Relative, of the whole tensor."""
    assert found is not None
    assert wanted is not None
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12))
