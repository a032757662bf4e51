"""The adapter against a real vLLM, in an environment of its own: see `make test-vllm`, and docs/served.md.

`CONTRAFLOW_VLLM_PYTHON` names its interpreter. tests/contracts/test_engine.py holds it to the contract of engines.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from contraflow.errors import CarrierError, EngineError
from contraflow.model.decoder import new_decoder
from contraflow.rollout.fleet import Server
from contraflow.rollout.http import HttpClient
from contraflow.rollout.served import ServedEngine
from contraflow.rollout.servers import Started
from contraflow.rollout.vllm import Vllm, command
from contraflow.types import Probe, Request, Span, Version
from contraflow.weights.probe import make_probe, probe_prompts
from tests.rollout.served_lab import VLLM_MODEL, VLLM_PYTHON, model_folder, vllm_environment, vllm_section
from tests.rollout.test_served import logprobs_of
from tests.rollout.test_servers import children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_PYTHON not in os.environ, reason=f"{VLLM_PYTHON} names no interpreter that has vLLM"),
]
V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
GPU = torch.cuda.is_available()


def release(seed: int) -> tuple[Mapping[str, Tensor], Probe]:
    decoder = new_decoder(VLLM_MODEL, seed=seed, std=0.3)
    prompts = probe_prompts(VLLM_MODEL.vocab, prompts=3, tokens=9, seed=seed)
    return dict(decoder.state_dict()), make_probe(decoder, prompts, 1e-3)


def ask(name: str = "a", *, new: int = 12, seed: int = 5, **rest: Any) -> Request:
    return Request(id=name, prompt=np.array([1, 2, 3], np.int32), seed=seed, max_new_tokens=new, **rest)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 580))


def started(place: Path, *, extension: str = "", arguments: tuple[str, ...] = ()) -> tuple[ServedEngine, Started]:
    """An engine with a server of its own; `extension` instead of ours."""
    section = vllm_section(gpu=GPU)
    folder, socket = (
        model_folder(VLLM_MODEL, place / "model"),
        Path(tempfile.gettempdir()) / f"cf-{os.getpid()}-{place.name[-4:]}" / "s",
    )
    words = [*command(section, folder, socket), *arguments]
    if extension:
        words[words.index("--worker-extension-cls") + 1] = extension
    process = Started(f"unix:{socket}", words, vllm_environment(), place / "log", deadline_s=240.0)
    server = Server(Vllm(HttpClient(f"unix:{socket}", deadline_s=60.0)), process)
    engine = ServedEngine([server], section, VLLM_MODEL, folder, clock=time.perf_counter)
    return engine, process


def test_one_server_lives_through_temperatures_refreshes_and_its_own_death(tmp_path: Path) -> None:
    async def body() -> None:
        engine, process = started(tmp_path)
        await engine.swap(V1, *release(1))
        decoder = new_decoder(VLLM_MODEL, seed=1, std=0.3)
        for temperature in (0.5, 1.0, 1.7):
            answer = await engine.generate(ask(new=40, temperature=temperature))
            wanted = logprobs_of(decoder, ask().prompt, answer.tokens, temperature)
            assert np.abs(answer.logprobs - wanted).max() < 1e-3
        calm = (await engine.generate(ask(new=200))).tokens.tolist()
        flying = asyncio.create_task(engine.generate(ask(new=200)))
        goal = engine.report().tokens + 20
        while engine.report().tokens < goal:  # noqa: ASYNC110 - an engine says nothing between completions
            await asyncio.sleep(0.002)
        keeper = process._keeper
        assert keeper is not None
        for pid in children(keeper.pid):
            os.kill(pid, signal.SIGKILL)
        answer = await flying
        assert answer.tokens.tolist() == calm
        assert answer.spans == (Span(V1, 0, 200),)
        assert engine.report().faults == {"unreachable": 1}
        await engine.swap(V2, *release(2))
        assert (await engine.generate(ask())).spans == (Span(V2, 0, 12),)
        await engine.close()

    run(body)


@pytest.mark.skipif(GPU, reason="vLLM reloads a mixture wrongly on CPU only")
def test_a_mixture_that_vllm_reloads_wrongly_is_caught_by_the_probe(tmp_path: Path) -> None:
    """That our extension mends it, every other test of a real server shows."""

    async def body() -> None:
        engine, _ = started(tmp_path, extension="tests.rollout.unmended.Unmended")
        with pytest.raises(CarrierError, match="the probe failed: largest difference"):
            await engine.swap(V1, *release(1))
        with pytest.raises(EngineError, match="serves no version yet"):
            await engine.generate(ask())
        await engine.close()

    run(body)


def test_a_server_whose_log_probabilities_ignore_the_temperature_may_only_sample_at_1(tmp_path: Path) -> None:
    async def body() -> None:
        engine, _ = started(tmp_path, arguments=("--logprobs-mode", "raw_logprobs"))
        await engine.swap(V1, *release(1))
        await engine.generate(ask())
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            await engine.generate(ask(temperature=0.7))
        await engine.close()

    run(body)
