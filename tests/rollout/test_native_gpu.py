"""The native engine on a GPU: the same function, and a decode pass that a CUDA graph can hold."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.config import Engine as EngineSection
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import Latent
from contraflow.model.router import RouterTape
from contraflow.rollout.core import EngineCore
from contraflow.rollout.sampling import invert_cdf
from contraflow.types import Completion, Request, Version
from contraflow.weights.probe import make_probe, probe_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")]
CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab=64,
    dim=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=8,
    top_k=2,
    expert_ffn=32,
    renormalise=True,
    context=512,
)

SIGMOID: dict[str, Any] = {"dense_layers": (0,), "ffn": 64, "shared_experts": 1, "groups": 4, "top_groups": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "deepseek_v3": SIGMOID
    | {"kv_heads": 4, "head_dim": 24}
    | {"latent": Latent(q_rank=16, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)},
    "glm4_moe": SIGMOID | {"rotary_dim": 8},
    "gpt_oss": {"window": 5, "window_layers": (0, 2), "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
}


def core_of(*, dtype: torch.dtype = torch.float32, seed: int = 1, family: str = "qwen3_moe", **keys: Any) -> EngineCore:
    config = replace(CONFIG, family=family, **FAMILIES[family])
    decoder = Decoder(config, dtype=dtype, device="cuda")
    decoder.load_state_dict(new_decoder(config, seed=seed, std=0.2).state_dict())
    section = EngineSection(**{"block_tokens": 4, "kv_tokens": 4096, "routes": True, **keys})
    return EngineCore(decoder, section, clock=time.perf_counter, version=Version(1, 1))


def submit(core: EngineCore, count: int, *, new: int = 24) -> list[Request]:
    draws = np.random.default_rng(0)
    requests = []
    for index in range(count):
        if index % 4 == 0:
            prompt = draws.integers(0, 64, draws.integers(1, 40)).astype(np.int32)
        temperature = (1.0, 0.6, 0.0, 1.7)[index % 4]
        requests.append(
            Request(
                id=str(index), prompt=prompt, seed=index, max_new_tokens=new, temperature=temperature, want_routes=True
            )
        )
        core.submit(requests[-1], index)
    return requests


def run(core: EngineCore) -> dict[Any, Completion]:
    while core.busy:
        core.step()
    outcomes = dict(core.take_outcomes())
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes  # type: ignore[return-value]


@torch.no_grad()
def packed(core: EngineCore, request: Request, answer: Completion) -> tuple[np.ndarray, np.ndarray]:
    decoder = core._passes.decoder
    tokens = torch.from_numpy(np.concatenate((request.prompt, answer.tokens)).astype(np.int64)).cuda()
    tape = RouterTape()
    fed = len(tokens) - 1
    hidden = decoder(tokens[:-1], torch.arange(fed, device="cuda"), PackedPlan.of([0, fed], "cuda"), tape=tape)
    logits = decoder.logits(hidden).double() / (request.temperature or 1.0)
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
    return logprobs[len(request.prompt) - 1 :].cpu().numpy(), tape.routes().cpu().numpy()


@pytest.mark.parametrize(
    "keys", [{}, {"kv_tokens": 72, "prefill_tokens": 5, "max_sequences": 16}], ids=["roomy", "tight"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logprobs_and_experts_equal_those_of_a_packed_forward(family: str, keys: dict[str, Any]) -> None:
    core = core_of(family=family, **keys)
    requests = submit(core, 24)
    answers = run(core)
    assert (core.report().preempted > 0) == bool(keys)
    for index, request in enumerate(requests):
        logprobs, routes = packed(core, request, answers[index])
        np.testing.assert_allclose(answers[index].logprobs, logprobs, atol=1e-4, rtol=0)
        np.testing.assert_array_equal(answers[index].routes, routes)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logprobs_are_close_to_those_of_a_packed_forward(family: str) -> None:
    core = core_of(dtype=torch.bfloat16, family=family)
    requests = submit(core, 24)
    answers = run(core)
    gaps = [np.abs(answers[i].logprobs - packed(core, r, answers[i])[0]) for i, r in enumerate(requests)]
    assert np.median(np.concatenate(gaps)) < 0.02


def test_a_swap_converts_proves_and_serves() -> None:
    core = core_of(dtype=torch.bfloat16)
    new = core_of(dtype=torch.bfloat16, seed=2)._passes.decoder
    tensors = {name: tensor.cpu() for name, tensor in new.state_dict().items()}
    probe = make_probe(new, probe_prompts(64, prompts=4, tokens=16, seed=1), 0.05)
    places = {name: tensor.data_ptr() for name, tensor in core._passes.decoder.state_dict().items()}
    core.swap(Version(1, 2), tensors, probe)
    assert core.version == Version(1, 2)
    assert places == {name: tensor.data_ptr() for name, tensor in core._passes.decoder.state_dict().items()}
    submit(core, 4)
    assert all(answer.spans[0].version == Version(1, 2) for answer in run(core).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_pass_reads_nothing_back_and_replays_from_a_graph(family: str) -> None:
    core = core_of(dtype=torch.bfloat16, family=family)
    submit(core, 8, new=60)
    for _ in range(6):
        core.step()
    passes, blocks = core._passes, core._passes.rows.prepare()
    passes.decode()  # uploads the rows; writing the same K/V again changes nothing
    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = passes._decode(8, blocks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes._decode(8, blocks)
    graph.replay()
    assert torch.equal(captured.cpu()[0], eager.cpu()[0])
    logprobs = [bits.cpu()[1].view(torch.float32) for bits in (captured, eager)]
    torch.testing.assert_close(*logprobs, atol=1e-2, rtol=0)


@pytest.mark.parametrize("vocab", [3, 1000, 151_936])
def test_no_rounding_of_the_parallel_sum_draws_a_token_without_mass(vocab: int) -> None:
    noise = torch.Generator("cuda").manual_seed(0)
    mass = torch.rand(256, vocab, device="cuda", generator=noise) ** 8
    mass[torch.rand(256, vocab, device="cuda", generator=noise) < 0.7] = 0
    mass[:, [0, -1]] = 0
    mass[:, vocab // 2] = 1
    mass /= mass.sum(-1, keepdim=True)
    for u in (0.0, 0.25, 0.999, 1 - 2**-24):
        tokens = invert_cdf(mass, torch.full((256,), u, device="cuda"))
        assert (mass.gather(-1, tokens[:, None]) > 0).all()
