"""An engine whose experts move and are replicated answers as one of one rank does, version after version.

Real processes: one follower, started once.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from contraflow.config import Engine as EngineSection
from contraflow.config import Parallel
from contraflow.dispatch.placement import Sizes, contiguous, place
from contraflow.errors import CarrierError
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.rollout.engine import Engine, EngineReport
from contraflow.rollout.native import NativeEngine
from contraflow.rollout.parts import cutter
from contraflow.types import Completion, Probe, Request, Version
from contraflow.weights.probe import make_probe, probe_prompts
from tests.rollout.gangs import Gang, Spec

SIZES: dict[str, Any] = {"vocab": 24, "dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "context": 64}
EXPERTS: dict[str, Any] = {"experts": 6, "top_k": 2, "expert_ffn": 16, "renormalise": True}
CONFIGS = {
    "qwen3_moe": ModelConfig(family="qwen3_moe", **SIZES, **EXPERTS, layers=3, dense_layers=(1,), ffn=16),
    # Biases of experts; shared experts, and groups that stay in their domain.
    "gpt_oss": ModelConfig(
        **{
            "family": "gpt_oss",
            "layers": 2,
            "window": 5,
            "window_layers": (0,),
            "swiglu_alpha": 1.7,
            "swiglu_limit": 2.0,
        },
        **SIZES,
        **EXPERTS,
    ),
    "glm4_moe": ModelConfig(
        **{"family": "glm4_moe", "layers": 2, "shared_experts": 1, "groups": 2, "top_groups": 1}, **SIZES, **EXPERTS
    ),
}
V1, V2, V3, V4 = (Version(1, n) for n in range(1, 5))


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    started = Gang()
    yield started
    started.close()


def section(**keys: object) -> EngineSection:
    return EngineSection(context_tokens=64, kv_tokens=2048, block_tokens=8, routes=True, **keys)  # type: ignore[arg-type]


def release(config: ModelConfig, seed: int) -> tuple[Mapping[str, Tensor], Probe]:
    decoder = new_decoder(config, seed=seed, std=0.3)
    noise = torch.Generator().manual_seed(seed)
    for name, weight in decoder.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(0.0, 0.2, generator=noise)
    probe = make_probe(decoder, probe_prompts(vocab=24, prompts=2, tokens=9, seed=seed), tolerance=1e-3)
    return decoder.state_dict(), probe


async def answers(engine: Engine, seed: int) -> Sequence[Completion]:
    """Of nine prompts, of one token to twenty."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 21, 9)
    return await asyncio.gather(
        *(
            engine.generate(
                Request(
                    id=f"{seed}-{index}",
                    prompt=draws.integers(0, 24, length).astype(np.int32),
                    seed=index,
                    max_new_tokens=12,
                    want_routes=True,
                )
            )
            for index, length in enumerate(lengths)
        )
    )


async def versions(engine: Engine, config: ModelConfig) -> tuple[list[Sequence[Completion]], EngineReport]:
    """Answers of four versions, one of which is refused at first."""
    try:
        found = [await answers(engine, 1)]
        for version, seed in ((V2, 2), (V3, 3), (V4, 4)):
            tensors, probe = release(config, seed)
            if version == V3:
                with pytest.raises(CarrierError, match="the probe failed"):
                    await engine.swap(version, tensors, release(config, 99)[1])
                found.append(await answers(engine, 5))
            await engine.swap(version, tensors, probe)
            found.append(await answers(engine, seed))
        return found, engine.report()
    finally:
        await engine.close()


def alone(config: ModelConfig) -> list[Sequence[Completion]]:
    decoder = new_decoder(config, seed=1, std=0.3)
    engine = NativeEngine(decoder, section(), clock=time.perf_counter, version=V1)
    return asyncio.run(versions(engine, config))[0]


@pytest.mark.parametrize(
    ("family", "parallel", "spare"),
    [
        ("qwen3_moe", {"dp": 2, "ep": 2}, 0),
        ("qwen3_moe", {"tp": 2, "ep": 2}, 1),
        ("gpt_oss", {"dp": 2, "ep": 2}, 1),
        ("glm4_moe", {"dp": 2, "ep": 2, "domain_ranks": 1}, 1),
    ],
    ids=str,
)
def test_answers_and_logical_routes_are_those_of_one_rank_whatever_lies_where(
    gang: Gang, family: str, parallel: dict[str, int], spare: int
) -> None:
    config = CONFIGS[family]
    keys = section(replace_every=1, spare_experts=spare, parallel=Parallel(**parallel, deadline_s=60.0))
    engine = gang.engine(Spec(config, keys, seed=1, std=0.3, version=V1))
    got, report = asyncio.run(versions(engine, config))
    for batch, wanted_batch in zip(got, alone(config), strict=True):
        for completion, wanted in zip(batch, wanted_batch, strict=True):
            assert completion.tokens.tolist() == wanted.tokens.tolist()
            np.testing.assert_allclose(completion.logprobs, wanted.logprobs, atol=1e-4)
            assert completion.spans == wanted.spans
            np.testing.assert_array_equal(completion.routes, wanted.routes)
    assert report.placed == 3
    assert 1.0 <= report.promised <= report.imbalance
    assert gang.broken == []


def test_in_what_ranks_are_sent_all_replicas_of_an_expert_are_equal_and_of_the_new_version() -> None:
    parallel, size = Parallel(dp=4, ep=2), Sizes(experts=6, ranks=2, slots=5, domain_ranks=2)
    loads_ME = torch.tensor([[900, 3, 50, 60, 7, 8], [1, 2, 3, 4, 500, 600]])
    config = CONFIGS["gpt_oss"]
    tensors, _ = release(config, 7)
    for placements in (place(loads_ME, size), [contiguous(size)] * 2):
        part = cutter(tensors, config, parallel, placements)
        for layer, placement in zip(config.moe_layers, placements, strict=True):
            for name in [f"layers.{layer}.mlp.{name}" for name in ("gate_up", "down", "gate_up_bias", "down_bias")]:
                wanted = [hash(expert.numpy().tobytes()) for expert in tensors[name]]
                for rank in range(4):
                    slots = part(rank, name)
                    held = placement.on(rank % 2).tolist()
                    assert [hash(slot.numpy().tobytes()) for slot in slots][: len(held)] == [
                        wanted[expert] if expert >= 0 else hash(torch.zeros_like(slots[0]).numpy().tobytes())
                        for expert in held
                    ]
            table = part(3, f"layers.{layer}.mlp.slots")
            for expert, replicas in enumerate(part(0, f"layers.{layer}.mlp.replicas").tolist()):
                lying = (placement.experts_P == expert).nonzero().flatten().tolist()
                assert table[expert, :replicas].tolist() == lying
