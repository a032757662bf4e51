"""vLLM's HTTP API as a dialect: token ids in, token ids and log-probabilities out, weights reloaded from a folder.

Speaks `/inference/v1/generate` and the endpoints of its development mode (`/pause`, `/resume`, `/collective_rpc`); the
worker extension of `vllm_extension.py` does the loading. Also the command line that starts such a server. Which
versions: `TESTED`, with what was seen in docs/served.md.
"""

import asyncio
import base64
import io
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from contraflow.config import Engine as EngineSection
from contraflow.errors import ConfigError, ServerError
from contraflow.rollout.dialect import ODD, Chunk, Piece
from contraflow.types import Float32, Int32, Routes, StopReason

if TYPE_CHECKING:
    from contraflow.rollout.http import HttpClient

TESTED = ((0, 24), (0, 32))  # the oldest and newest minor version that the contract suite has run against
EXTENSION = "contraflow.rollout.vllm_extension.Extension"
MODEL = "policy"  # what a server that we start calls its model
_STOPS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}

T = TypeVar("T")


class Vllm:
    """A `Dialect`."""

    def __init__(self, client: "HttpClient", *, moe_layers: Sequence[int] = (), load_deadline_s: float = 300.0) -> None:
        """`moe_layers` are those whose experts make up routes; empty: all. `load_deadline_s` bounds the wait for
        loaded weights."""
        self._client, self._moe_layers, self._load_deadline_s = client, list(moe_layers), load_deadline_s

    @property
    def url(self) -> str:
        return self._client.url

    async def alive(self) -> None:
        """See `Dialect`. Its health is that of the process that computes, too."""
        await self._client.get("/health")

    async def check(self, section: EngineSection) -> str:
        """See `Dialect`."""
        said = await self._client.get("/version")
        version = self._read("/version", lambda: str(said["version"]))
        refuse_untested(self.url, version)
        models = await self._client.get("/v1/models")
        context = self._read("/v1/models", lambda: int(models["data"][0]["max_model_len"]))
        if context < section.context_tokens:
            raise ConfigError(
                f"server {self.url} takes sequences of {context} tokens, engine.context_tokens = "
                f"{section.context_tokens}; start it with --max-model-len {section.context_tokens}"
            )
        await self._ask_to_start_otherwise("contraflow_stamp")
        return f"vLLM {version}"

    async def generate(self, piece: Piece) -> AsyncGenerator[Chunk, None]:
        """See `Dialect`."""
        body = {
            "request_id": piece.id,
            "token_ids": piece.prompt.tolist(),
            "sampling_params": _sampling(piece),
            "cache_salt": piece.salt,
            "stream": True,
        }
        async with aclosing(self._client.stream("/inference/v1/generate", body)) as events:
            async for event in events:
                if isinstance(event, dict) and "error" in event:
                    raise ServerError(self.url, "failed", f"request {piece.id!r}: {event['error']}")
                for chunk in self._read("generate", lambda event=event: [self._chunk(c) for c in event["choices"]]):  # type: ignore[misc]
                    yield chunk

    async def score(self, prompts: Sequence[Int32], salt: str) -> tuple[Float32, ...]:
        """See `Dialect`. vLLM looks nothing up in its cache for a prompt whose log-probabilities are asked for."""
        return tuple(await asyncio.gather(*(self._score(prompt, salt) for prompt in prompts)))

    async def pause(self) -> None:
        """See `Dialect`."""
        await self._client.post("/pause", query={"mode": "abort", "clear_cache": "false"})

    async def load(self, folder: Path, stamp: str) -> None:
        """See `Dialect`."""
        loaded = await self._everywhere("contraflow_load", [str(folder), stamp], deadline_s=self._load_deadline_s)
        if any(worker.get("stamp") != stamp for worker in loaded):
            raise ServerError(self.url, "malformed", f"its workers answer {loaded} to being given version {stamp}")

    async def resume(self) -> None:
        """See `Dialect`."""
        await self._client.post("/resume")

    async def stamp(self) -> str:
        """See `Dialect`. Workers that differ give both."""
        return " and ".join(sorted({str(worker["stamp"]) for worker in await self._everywhere("contraflow_stamp", [])}))

    def _chunk(self, choice: Mapping[str, Any]) -> Chunk:
        tokens = [int(token) for token in choice["token_ids"] or ()]
        content = (choice.get("logprobs") or {}).get("content") or ()
        reason, routed = choice.get("finish_reason"), choice.get("routed_experts")
        return Chunk(
            tokens=tokens,
            logprobs=[float(entry["logprob"]) for entry in content],
            stop=None if reason is None else _STOPS[reason],
            routes=None if routed is None else _routes(routed, self._moe_layers),
        )

    async def _everywhere(
        self, method: str, arguments: list[str], *, deadline_s: float | None = None
    ) -> list[dict[str, Any]]:
        """What every worker process answers to a method of the extension."""
        body = {"method": method, "args": arguments}
        answer = await self._client.post("/collective_rpc", body, deadline_s=deadline_s)
        workers = self._read("/collective_rpc", lambda: list(answer["results"]))
        if not workers or not all(isinstance(worker, dict) and "stamp" in worker for worker in workers):
            raise ServerError(self.url, "malformed", f"{method} gave {workers}")
        return workers

    async def _score(self, prompt: Int32, salt: str) -> Float32:
        body = {
            "token_ids": prompt.tolist(),
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False},
            "cache_salt": salt,
        }
        answer = await self._client.post("/inference/v1/generate", body)
        return self._read("prompt_logprobs", lambda: _scores(answer, prompt))

    async def _ask_to_start_otherwise(self, method: str) -> None:
        try:
            await self._everywhere(method, [])
        except ServerError as fault:
            if fault.kind not in ("refused", "failed"):
                raise
            raise ConfigError(
                f"server {self.url} cannot take new weights ({fault}); start it with VLLM_SERVER_DEV_MODE=1 in its "
                f"environment, contraflow on its PYTHONPATH, and --tokens-only --worker-extension-cls {EXTENSION}"
            ) from fault

    def _read(self, what: str, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except ODD as fault:
            raise ServerError(self.url, "malformed", f"{what}: {type(fault).__name__} {fault}") from None


def refuse_untested(url: str, version: str) -> None:
    """Raise ConfigError unless `version` ("0.32.0", "0.24.1.dev3+cu130") lies within `TESTED`."""
    parts = version.split(".")
    minor = (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else None
    if minor is None or not TESTED[0] <= minor <= TESTED[1]:
        span = " to ".join(".".join(map(str, bound)) for bound in TESTED)
        raise ConfigError(
            f"server {url} is vLLM {version}; {span} were tested, and others may reload weights wrongly or name things "
            "otherwise: install one of those"
        )


def command(section: EngineSection, model: Path, socket: Path) -> list[str]:
    """The words that start a server of `model` listening at `socket`, as `section` wants it."""
    words = [section.server.python, "-m", "vllm.entrypoints.openai.api_server"]
    settings = {
        "--model": str(model),
        "--served-model-name": MODEL,
        "--uds": str(socket),
        "--max-model-len": str(section.context_tokens),
        "--max-num-seqs": str(section.max_sequences),
        "--max-num-batched-tokens": str(max(section.prefill_tokens, section.context_tokens, section.max_sequences)),
        "--dtype": section.compute,
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": EXTENSION,
    }
    words += [word for pair in settings.items() for word in pair]
    words += ["--tokens-only", *(["--enable-return-routed-experts"] if section.routes else [])]
    return [*words, *section.server.arguments]


def environment(given: Mapping[str, str], package: Path, key: str) -> dict[str, str]:
    """The environment of such a server: `given`, what it needs to find the extension in `package`, and its key."""
    path = ":".join(filter(None, [str(package), given.get("PYTHONPATH", "")]))
    ours = {"PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return {**given, **ours, **({"VLLM_API_KEY": key} if key else {})}


def _sampling(piece: Piece) -> dict[str, Any]:
    """Every setting that bends a distribution said aloud: a server's own defaults must not."""
    return {
        "temperature": piece.temperature,
        "seed": piece.seed,
        "max_tokens": piece.max_new_tokens,
        "stop_token_ids": list(piece.stop_tokens),
        "ignore_eos": True,
        "logprobs": 0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "skip_special_tokens": False,
        "detokenize": False,
    }


def _routes(text: str, moe_layers: list[int]) -> Routes:
    """From an .npy file in base64. Read by hand: numpy's `load` takes archives too, and believes what a file claims."""
    data = base64.b64decode(text, validate=True)
    file = io.BytesIO(data)
    if (version := np.lib.format.read_magic(file)) != (1, 0):
        raise ValueError(f"routes in version {version} of the .npy format")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 3 or by_columns or dtype not in (np.uint8, np.uint16, np.int32):
        raise ValueError(f"routes of shape {shape} and type {dtype}{', by columns' if by_columns else ''}")
    found = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape).copy()
    if found.size and not 0 <= found.min() <= found.max() < 1 << 16:
        raise ValueError(f"routes hold experts from {found.min()} to {found.max()}")
    if len(moe_layers) < found.shape[1] and moe_layers:
        found = found[:, moe_layers]
    return found if found.dtype in (np.uint8, np.uint16) else found.astype(np.uint16)


def _scores(answer: Mapping[str, Any], prompt: Int32) -> Float32:
    rows = answer["prompt_logprobs"]
    if len(rows) != len(prompt):
        raise ValueError(f"{len(rows)} entries for {len(prompt)} tokens")
    values = [rows[place][str(token)]["logprob"] for place, token in enumerate(prompt.tolist()) if place]
    return np.array([value if value is not None else math.nan for value in values], np.float32)
