"""Served engines for tests: over twins in this process, and over a real vLLM where one is installed."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from contraflow.config import Engine as EngineSection
from contraflow.config import Server as ServerSection
from contraflow.errors import ServerError
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import save_folder
from contraflow.rollout import vllm
from contraflow.rollout.dialect import Dialect
from contraflow.rollout.fleet import Server
from contraflow.rollout.http import HttpClient
from contraflow.rollout.open_served import PACKAGE
from contraflow.rollout.served import ServedEngine
from contraflow.rollout.servers import Attached
from contraflow.rollout.sglang import Sglang
from contraflow.rollout.sglang_twin import SglangTwin
from contraflow.rollout.vllm import Vllm
from contraflow.rollout.vllm_twin import VllmTwin
from contraflow.types import Probe, Version
from contraflow.weights.probe import make_probe, probe_prompts

VOCAB = 24
CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab=VOCAB,
    dim=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=8,
    experts=4,
    top_k=2,
    expert_ffn=16,
    renormalise=True,
    context=256,
)
VLLM_PYTHON = "CONTRAFLOW_VLLM_PYTHON"  # names the interpreter of an environment that has vLLM
# vLLM's kernels on CPU want heads of 32 and more.
VLLM_CONTEXT = 1100
VLLM_MODEL = ModelConfig(
    family="qwen3_moe",
    vocab=24,
    dim=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    experts=4,
    top_k=2,
    expert_ffn=32,
    renormalise=True,
    context=VLLM_CONTEXT,
)
ON_GPU = ("--gpu-memory-utilization", "0.2", "--enforce-eager")
ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill")


def release(seed: int, config: ModelConfig = CONFIG) -> tuple[dict[str, Tensor], Probe]:
    """Weights of a seed, with a probe that they pass."""
    decoder = new_decoder(config, seed=seed, std=0.3)
    prompts = probe_prompts(config.vocab, prompts=3, tokens=9, seed=seed)
    return dict(decoder.state_dict()), make_probe(decoder, prompts, 1e-3)


@dataclass
class TwinProcess:
    """A `Process` that is a twin in this loop. `twin` is what runs now; `options` are for those to come."""

    folder: Path
    socket: Path
    context_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    kind: type[VllmTwin] | type[SglangTwin] = VllmTwin
    twin: VllmTwin | SglangTwin | None = None
    starts: int = 0

    async def start(self, answers: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self.stop()
        self.starts += 1
        self.twin = self.kind(self.folder, context_tokens=self.context_tokens, **self.options)
        await self.twin.open(self.socket)
        await answers()

    async def stop(self) -> None:
        twin, self.twin = self.twin, None
        if twin is not None:
            await twin.close()
            self.socket.unlink(missing_ok=True)


def model_folder(config: ModelConfig, folder: Path, *, seed: int = 0) -> Path:
    """A random model, written."""
    save_folder(new_decoder(config, seed=seed, std=0.3), folder)
    return folder


def served_section(policy: Literal["keep", "recompute"] = "keep", **rest: Any) -> EngineSection:
    deadlines = {"request_deadline_s": 20.0, "start_deadline_s": 20.0}
    settings = {"kind": "vllm", "context_tokens": 256, "routes": True, "on_refresh": policy, **rest}
    return EngineSection(server=ServerSection(**deadlines), **settings)


@dataclass
class Twins:
    """An engine over `count` twins, and what runs them."""

    engine: ServedEngine
    processes: list[TwinProcess]


def over_twins(
    config: ModelConfig,
    place: Path,
    *,
    count: int = 1,
    section: EngineSection | None = None,
    version: Version | None = None,
    on_broken: Callable[[str], None] = lambda reason: None,
    kind: type[VllmTwin] | type[SglangTwin] = VllmTwin,
    key: str = "",
    **options: Any,
) -> Twins:
    """`place` is a folder of the test's own; `key` is what the engine says, `options` are the twins'."""
    section = section or served_section()
    folder = model_folder(config, place / "model")
    if issubclass(kind, VllmTwin):
        options = {"routes": section.routes, **options}
    processes = [
        TwinProcess(folder, place / f"s{index}", section.context_tokens, dict(options), kind) for index in range(count)
    ]

    def dialect(process: TwinProcess) -> Dialect:
        client = HttpClient(f"unix:{process.socket}", key=key, deadline_s=section.server.request_deadline_s)
        if issubclass(kind, VllmTwin):
            return Vllm(client)
        return Sglang(client, config, load_deadline_s=section.server.start_deadline_s)

    servers = [Server(dialect(process), process) for process in processes]
    engine = ServedEngine(
        servers, section, config, folder, clock=time.perf_counter, version=version, on_broken=on_broken
    )
    return Twins(engine, processes)


def vllm_section(policy: Literal["keep", "recompute"] = "keep", *, gpu: bool = False, **rest: Any) -> EngineSection:
    """Routes only on a GPU: vLLM records none on CPU."""
    server = {"python": os.environ.get(VLLM_PYTHON, sys.executable), "arguments": ON_GPU if gpu else ON_CPU}
    server |= {"request_deadline_s": 60.0, "start_deadline_s": 240.0}
    settings: dict[str, Any] = {"kind": "vllm", "context_tokens": VLLM_CONTEXT, "max_sequences": 64}
    settings |= {"on_refresh": policy}
    return EngineSection(server=ServerSection(**server), **{**settings, "routes": gpu, **rest})


def vllm_environment() -> dict[str, str]:
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return vllm.environment({**os.environ, **quiet}, PACKAGE, "")


@contextmanager
def vllm_server(section: EngineSection, folder: Path, log: Path) -> Iterator[str]:
    """A real server that outlives an engine; its address."""
    with tempfile.TemporaryDirectory(prefix="cf-") as short, log.open("wb") as out:
        socket = Path(short) / "s"
        words = [sys.executable, "-m", "contraflow.rollout.keeper", *vllm.command(section, folder, socket)]
        keeper = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=vllm_environment()
        )
        assert keeper.stdin is not None
        url = f"unix:{socket}"
        try:
            asyncio.run(Attached(url, deadline_s=section.server.start_deadline_s).start(Vllm(HttpClient(url)).alive))
            yield url
        except ServerError as fault:
            raise AssertionError(f"{fault}\n{log.read_text(errors='replace')[-3000:]}") from fault
        finally:
            keeper.stdin.close()
            keeper.wait(30)


def over_url(
    url: str, section: EngineSection, config: ModelConfig, folder: Path, version: Version | None = None
) -> ServedEngine:
    """An engine attached to a server that runs already."""
    client = HttpClient(url, deadline_s=section.server.request_deadline_s)
    server = Server(Vllm(client), Attached(url, deadline_s=section.server.start_deadline_s))
    return ServedEngine([server], section, config, folder, clock=time.perf_counter, version=version)
