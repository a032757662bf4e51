"""The native engine on a GPU: the same function, in CUDA graphs or not, ahead of the tokens read or not."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.config import Engine as EngineSection
from contraflow.errors import EngineError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.kinds import Latent
from contraflow.model.router import RouterTape
from contraflow.rollout.core import EngineCore
from contraflow.rollout.sampling import invert_cdf, sample
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


# Without experts: torch's grouped matmul in fp32 reads offsets on the host, and no graph can hold that.
DENSE = {"experts": 0, "top_k": 0, "expert_ffn": 0, "ffn": 64, "renormalise": False}


def core_of(*, dtype: torch.dtype = torch.float32, seed: int = 1, family: str = "qwen3_moe", **keys: Any) -> EngineCore:
    config = replace(CONFIG, family=family, **(DENSE if family == "qwen3" else FAMILIES[family]))
    decoder = Decoder(config, dtype=dtype, device="cuda")
    decoder.load_state_dict(new_decoder(config, seed=seed, std=0.2).state_dict())
    section = EngineSection(**{"block_tokens": 4, "kv_tokens": 4096, "routes": bool(config.experts), **keys})
    return EngineCore(decoder, section, clock=time.perf_counter, version=Version(1, 1))


TIGHT = {"kv_tokens": 72, "prefill_tokens": 5, "max_sequences": 16}


def submit(core: EngineCore, count: int, *, new: int = 24, stops: bool = False, prefix: str = "") -> list[Request]:
    draws = np.random.default_rng(0)
    requests = []
    for index in range(count):
        if index % 4 == 0:
            prompt = draws.integers(0, 64, draws.integers(1, 40)).astype(np.int32)
        requests.append(
            Request(
                id=f"{prefix}{index}",
                prompt=prompt,
                seed=index,
                max_new_tokens=new,
                temperature=(1.0, 0.6, 0.0, 1.7)[index % 4],
                want_routes=core._passes.routes is not None,
                stop_tokens=tuple(draws.integers(0, 64, 3).tolist()) if stops else (),
            )
        )
        core.submit(requests[-1], index)
    return requests


def agreed(one: Completion, other: Completion) -> int:
    """Tokens before the first that differs."""
    pairs = zip(one.tokens.tolist(), other.tokens.tolist(), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens)))


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
    routes = tape.routes().cpu().numpy() if decoder.config.experts else np.zeros(0)
    return logprobs[len(request.prompt) - 1 :].cpu().numpy(), routes


@pytest.mark.parametrize("keys", [{}, TIGHT], ids=["roomy", "tight"])
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
    exact = core_of(family=family)  # the same weights, in fp32
    with torch.no_grad():
        for weight, rounded in zip(exact.weights.values(), core.weights.values(), strict=True):
            weight.copy_(rounded)
    gaps: dict[str, list[np.ndarray]] = {"engine": [], "packed": []}
    for index, request in enumerate(requests):
        right, _ = packed(exact, request, answers[index])
        gaps["engine"].append(np.abs(answers[index].logprobs - right))
        gaps["packed"].append(np.abs(packed(core, request, answers[index])[0] - right))
    engine, plain = (np.median(np.concatenate(gaps[kind])) for kind in ("engine", "packed"))
    assert engine < 1.3 * plain  # it rounds as the packed forward does, in another order


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
def test_a_pass_is_begun_without_a_wait_for_the_device(family: str) -> None:
    core = core_of(dtype=torch.bfloat16, family=family)
    submit(core, 8, new=60)
    for _ in range(6):
        core.step()
    core._drain()
    core._grow()
    before = core.report().tokens
    torch.cuda.set_sync_debug_mode("error")
    try:
        core._launched.append(core._passes.launch())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    core._drain()
    assert core.report().tokens == before + 8
    run(core)


def test_graphs_are_few_and_answers_those_of_eager_passes() -> None:
    for family, dtype, tolerance in (("qwen3", torch.float32, 5e-5), ("qwen3_moe", torch.bfloat16, 0.05)):
        given = []
        for graphs in ("off", "auto"):
            core = core_of(dtype=dtype, family=family, graphs=graphs, lookahead="off")
            submit(core, 24)
            given.append(run(core))
            assert ("CUDA graphs" in core.report().decoding) == (graphs == "auto")
        eager, replayed = given
        for index, wanted in eager.items():
            got = replayed[index]
            same = agreed(wanted, got)
            assert same == len(wanted.tokens) or dtype == torch.bfloat16
            np.testing.assert_allclose(got.logprobs[:same], wanted.logprobs[:same], atol=tolerance, rtol=0)


@pytest.mark.parametrize(("graphs", "family"), [("off", "qwen3_moe"), ("auto", "qwen3")])
@pytest.mark.parametrize("keys", [{}, TIGHT], ids=["roomy", "tight"])
def test_looking_ahead_changes_no_answer(graphs: str, family: str, keys: dict[str, Any]) -> None:
    given = []
    for lookahead in ("off", "on"):
        core = core_of(family=family, graphs=graphs, lookahead=lookahead, **keys)
        submit(core, 24, stops=True)
        given.append(run(core))
        assert (core.report().preempted > 0) == bool(keys)
        assert core.report().kv_tokens_held == 0
    for index, wanted in given[0].items():
        got = given[1][index]
        assert (got.tokens.tolist(), got.stop) == (wanted.tokens.tolist(), wanted.stop)
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4, rtol=0)
        if wanted.routes is not None:
            np.testing.assert_array_equal(got.routes, wanted.routes)


def test_without_stops_looking_ahead_runs_the_same_graphs_over_the_same_rows() -> None:
    given = []
    for lookahead in ("off", "on"):
        core = core_of(dtype=torch.bfloat16, lookahead=lookahead)
        submit(core, 24)
        given.append(run(core))
        assert "CUDA graphs" in core.report().decoding
    for index, wanted in given[0].items():
        assert given[1][index].tokens.tolist() == wanted.tokens.tolist()
        np.testing.assert_allclose(given[1][index].logprobs, wanted.logprobs, atol=1e-5, rtol=0)


def test_an_engine_that_rested_in_mid_generation_captures_anew_and_goes_on_as_it_would_have() -> None:
    given = []
    for rests in (False, True):
        core = core_of(dtype=torch.bfloat16)
        submit(core, 12, new=40)
        for _ in range(8):
            core.step()
        if rests:
            halves = core._passes._halves_V2D.untyped_storage()
            assert core.rest() > 0
            assert halves.nbytes() == 0
            core.wake()
            assert core.report().decoding.startswith("0 CUDA graphs")
        given.append(run(core))
    for index, wanted in given[0].items():
        got = given[1][index]
        # The first pass after the rest has the most rows, and other tiles round otherwise.
        same = agreed(wanted, got)
        assert same > 8
        np.testing.assert_allclose(got.logprobs[:same], wanted.logprobs[:same], atol=0.05, rtol=0)


def test_experts_in_fp32_run_eager_and_say_so() -> None:
    core = core_of()
    submit(core, 4)
    run(core)
    assert core.report().decoding.startswith("eager")


def test_graphs_go_on_with_weights_that_are_refreshed_in_place() -> None:
    core = core_of(family="qwen3", on_refresh="recompute")
    requests = submit(core, 12, new=40)
    for _ in range(8):
        core.step()
    before = core.report().decoding
    core.abort(["11"])
    new = core_of(family="qwen3", seed=2)._passes.decoder
    probe = make_probe(new, probe_prompts(64, prompts=4, tokens=16, seed=1), 1e-3)
    core.swap(Version(1, 2), {name: tensor.cpu() for name, tensor in new.state_dict().items()}, probe)
    answers = run(core)
    assert int(before.split()[0]) >= 2  # the largest, and the one that was needed
    for index, request in enumerate(requests[:11]):
        (flip,) = [span.start for span in answers[index].spans if span.version == Version(1, 2)]
        logprobs, _ = packed(core, request, answers[index])
        assert 0 < flip < 40
        np.testing.assert_allclose(answers[index].logprobs[flip:], logprobs[flip:], atol=1e-4, rtol=0)


def test_a_head_in_halves_follows_the_weights_and_gives_nearly_fp32_log_probabilities() -> None:
    core = core_of(dtype=torch.bfloat16)
    new = core_of(dtype=torch.bfloat16, seed=2)._passes.decoder
    probe = make_probe(new, probe_prompts(64, prompts=4, tokens=16, seed=1), 0.05)
    place = core._passes._halves_V2D.data_ptr()
    core.swap(Version(1, 2), {name: tensor.cpu() for name, tensor in new.state_dict().items()}, probe)
    hidden = torch.randn(5, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    exact = hidden.double() @ new.head.double().T
    terms = hidden.double().abs() @ new.head.double().abs().T
    assert ((core._passes._logits(hidden).double() - exact).abs() <= 2**-15 * terms).all()
    assert core._passes._halves_V2D.data_ptr() == place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_gives_no_numbers_ends_only_its_own_sequence(dtype: torch.dtype) -> None:
    core = core_of(dtype=dtype, kv_tokens=256, routes=False)  # blocks that held no numbers are used again
    decoder = core._passes.decoder
    with torch.no_grad():
        decoder.embed[5].fill_(float("nan"))
        decoder.head[5].fill_(-1.0)
    ask = {"seed": 1, "max_new_tokens": 24, "stop_tokens": (5,)}
    for index in range(24):
        last = 5 if index % 3 == 0 else 6
        prompt = np.array([1, 2, 3, 4, index, last], np.int32)
        if index != 5:
            core.submit(Request(id=str(index), prompt=prompt, **ask), index)
    while core.busy:
        core.step()
    for index, outcome in core.take_outcomes():
        if index % 3 == 0:
            assert isinstance(outcome, EngineError)
        else:
            assert np.isfinite(outcome.logprobs).all()
            assert len(outcome.tokens) == 24 or outcome.tokens[-1] == 5


def test_memory_does_not_grow_with_steps() -> None:
    core = core_of(dtype=torch.bfloat16, context_tokens=512, kv_tokens=8192)
    held = []
    for turn in range(5):
        submit(core, 16, new=50, prefix=f"{turn}/")
        for _ in range(40):
            core.step()
        held.append(torch.cuda.memory_allocated())
        run(core)
    assert core.report().steps >= 200
    assert held[-1] <= held[1]


@pytest.mark.parametrize("vocab", [3, 1000, 151_936])
def test_no_rounding_of_the_parallel_sum_draws_a_token_without_mass(vocab: int) -> None:
    noise = torch.Generator("cuda").manual_seed(0)
    mass = torch.rand(256, vocab, device="cuda", generator=noise) ** 8
    mass[torch.rand(256, vocab, device="cuda", generator=noise) < 0.7] = 0
    mass[:, [0, -1]] = 0
    mass[:, vocab // 2] = 1
    mass /= mass.sum(-1, keepdim=True)
    for u in (0.0, 0.25, 0.999, 1 - 2**-24):
        tokens, _ = invert_cdf(mass, torch.full((256, 1), u, device="cuda"))
        assert (mass.gather(-1, tokens) > 0).all()
        logits = mass.log()
        ones = torch.ones(256, device="cuda")
        drawn, logprobs = sample(logits, scales_B=ones, greedy_B=None, uniforms_B=ones * u)
        assert (mass.gather(-1, drawn[:, None]) > 0).all()
        torch.testing.assert_close(
            logprobs.double(), mass.double().log().log_softmax(-1).gather(-1, drawn[:, None])[:, 0], atol=1e-4, rtol=0
        )
