"""Replay on a GPU: the same function there, after an engine whose routers are our kernels."""

import asyncio
import time

import numpy as np
import pytest
import torch

from contraflow import config
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.router import RouterTape
from contraflow.rollout.native import NativeEngine
from contraflow.train.batcher import pack
from contraflow.train.forward import Fed, Reading, feed, score
from contraflow.train.routing import replayed
from contraflow.types import Batch, Request, Sample, Version

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")],
)
MODEL = ModelConfig(
    family="qwen3_moe", vocab=64, dim=64, layers=6, heads=4, kv_heads=2, head_dim=16, experts=32, top_k=4,
    expert_ffn=32, renormalise=True, context=512,
)  # fmt: skip


def engine_batch(decoder: Decoder) -> Batch:
    """What a native engine samples, records and the trainer packs."""

    async def body() -> list[Sample]:
        section = config.Engine(context_tokens=64, kv_tokens=4096, max_sequences=32, routes=True)
        engine = NativeEngine(decoder, section, clock=time.perf_counter, stepping="inline", version=Version(0, 0))
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 64, 8, dtype=np.int32) for _ in range(24)]
        asked = [
            Request(id=str(i), prompt=prompt, seed=i, max_new_tokens=24, want_routes=True)
            for i, prompt in enumerate(prompts)
        ]
        told = await asyncio.gather(*(engine.generate(request) for request in asked))
        await engine.close()
        made = []
        for prompt, answer in zip(prompts, told, strict=True):
            mask = np.arange(len(prompt) + len(answer.tokens)) >= len(prompt)
            behaviour = np.zeros(len(mask), np.float32)
            behaviour[mask] = answer.logprobs
            made.append(
                Sample(
                    tokens=np.concatenate([prompt, answer.tokens]),
                    mask=mask,
                    behaviour=behaviour,
                    advantages=mask.astype(np.float32),
                    versions=np.where(mask, np.int32(0), np.int32(-1)),
                    routes=answer.routes,
                )
            )
        return made

    by_group = replayed([asyncio.run(body())], "r3", "refuse").by_group
    (batch,) = pack(by_group[0], tokens_per_batch=9999, reduction="token")
    return batch


def gradients(decoder: Decoder, fed: Fed) -> dict[str, torch.Tensor]:
    decoder.zero_grad()
    score(decoder, fed, Reading(), tape=RouterTape(fed.given)).logprobs_N.mean().backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_an_engine_in_bf16_is_followed_more_closely_with_replay(device: str) -> None:
    trainer, engine = (
        new_decoder(MODEL, seed=1, std=0.1, device=device),
        Decoder(MODEL, dtype=torch.bfloat16, device=device),
    )
    with torch.no_grad():
        for mine, theirs in zip(engine.parameters(), trainer.parameters(), strict=True):
            mine.copy_(theirs)
    batch = engine_batch(engine)
    fed = feed(batch, torch.device(device))
    behaviour_N = torch.from_numpy(batch.behaviour[batch.mask]).to(device)
    found = {}
    for name, given in (("own", None), ("replayed", fed.given)):
        with torch.no_grad():
            scored = score(trainer, fed._replace(given=given), Reading(), tape=(tape := RouterTape(given)))
        found[name] = float((scored.logprobs_N - behaviour_N).abs().mean())
    shares = (tape.differing()[:, 1] / tape.differing()[:, 0]).tolist()
    print(f"{device}: other experts by layer {[round(share, 4) for share in shares]}; |log-ratio| {found}")
    assert tape.differing()[:, 0].tolist() == [fed.tokens_F.numel()] * 6
    assert 0 < max(shares) < 0.3
    assert found["replayed"] < found["own"]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [CUDA])
def test_own_choices_replayed_change_nothing_and_recomputation_follows_them(device: str, compute: torch.dtype) -> None:
    decoder = new_decoder(MODEL, seed=1, std=0.1, device=device)
    decoder.compute_dtype = compute
    batch = engine_batch(new_decoder(MODEL, seed=2, std=0.1, device=device))
    fed = feed(batch, torch.device(device))
    free, follow = RouterTape(), RouterTape(fed.given)
    with torch.no_grad():
        one = decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=free)
        other = decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=follow)
    assert not torch.equal(one, other)
    assert torch.equal(follow.routes().cpu(), torch.from_numpy(np.asarray(batch.routes)))
    plain = gradients(decoder, fed)
    decoder.recompute = True
    again = gradients(decoder, fed)
    assert plain["layers.3.mlp.router.weight"].abs().max() > 0
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-3, atol=1e-6, msg=name)
    assert fed.given is not None
    with torch.no_grad():
        same = RouterTape(fed.given._replace(ids_TMK=free.routes()))
        assert torch.equal(decoder(fed.tokens_F, fed.positions_F, fed.plan, tape=same), one)
    assert not same.differing()[:, 1:].any()
