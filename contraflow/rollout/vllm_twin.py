"""The twin of a vLLM server: our own engine behind the part of vLLM's HTTP API that `vllm.py` speaks.

Takes a model folder and an address; answers as vLLM 0.32 was seen to, from real weights that it really reloads. For
tests, and to try a set-up where vLLM is not installed:
`python -m contraflow.rollout.vllm_twin FOLDER SOCKET CONTEXT_TOKENS`. Strict: a request with a field that it does not
know is refused. Has no scheduler options, no LoRA, no chat.
"""

import asyncio
import base64
import io
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np

from contraflow.config import Engine as EngineSection
from contraflow.errors import ContraflowError, EngineError, ModelError
from contraflow.model.folder import load_folder
from contraflow.rollout.http_server import Ask, HttpServer, Reply, Tamper, as_it_is
from contraflow.rollout.twin import TwinModel
from contraflow.types import Completion, Int32, StopReason

_BODY = {"request_id", "token_ids", "sampling_params", "cache_salt", "stream"}
_SAMPLING = {
    *("temperature", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "top_p"),
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "skip_special_tokens"),
    "detokenize",
}
_STOPS = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.ABORTED: "abort"}


class VllmTwin:
    """One server. Invariant: while `_running` is not set, nothing is generated."""

    def __init__(
        self,
        folder: Path,
        *,
        context_tokens: int,
        key: str = "",
        version: str = "0.32.0",
        routes: bool = False,
        raw_logprobs: bool = False,
        tamper: Tamper = as_it_is,
        behind: type[TwinModel] = TwinModel,
    ) -> None:
        """`raw_logprobs`: report those of temperature 1, as vLLM does unless told otherwise."""
        section = EngineSection(context_tokens=context_tokens, routes=routes)
        self.model = behind(folder, section, clock=time.perf_counter, raw_logprobs=raw_logprobs)
        self._context, self._key, self._version, self._stamp = context_tokens, key, version, ""
        self._running = asyncio.Event()
        self._running.set()
        self.http = HttpServer(self._handle, tamper)

    async def open(self, socket: Path | None = None) -> str:
        """Begin to serve; the address."""
        return await self.http.open(socket)

    async def close(self) -> None:
        """End as a process does that is killed: everybody is hung up on."""
        await self.http.close()
        await self.model.close()

    async def _handle(self, ask: Ask) -> Reply:
        guarded = ask.path.startswith(("/v1", "/inference"))  # vLLM asks for no key elsewhere
        if self._key and guarded and ask.headers.get("authorization") != f"Bearer {self._key}":
            return Reply(401, {"error": "Unauthorized"})
        try:
            return await self._routed(ask)
        except (KeyError, TypeError, ValueError, EngineError) as fault:
            return Reply(400, {"error": {"message": str(fault), "code": 400}})
        except ContraflowError as fault:
            return Reply(500, {"error": {"message": str(fault), "code": 500}})

    async def _routed(self, ask: Ask) -> Reply:
        match ask.method, ask.path:
            case "GET", "/health":
                return Reply()
            case "GET", "/version":
                return Reply(body={"version": self._version})
            case "GET", "/v1/models":
                return Reply(body={"data": [{"id": "policy", "max_model_len": self._context}]})
            case "POST", "/pause":
                return await self._pause(ask.query)
            case "POST", "/resume":
                self._running.set()
                return Reply(body={"status": "resumed"})
            case "POST", "/collective_rpc":
                return await self._rpc(ask.body["method"], ask.body.get("args", []))
            case "POST", "/inference/v1/generate":
                return await self._generate(ask.body)
        return Reply(404, {"detail": "Not Found"})

    async def _pause(self, query: dict[str, str]) -> Reply:
        if query != {"mode": "abort", "clear_cache": "false"}:
            raise ValueError(f"the twin cannot pause with {query}")
        self._running.clear()
        await self.model.abort()
        return Reply(body={"status": "paused"})

    async def _rpc(self, method: str, arguments: list[str]) -> Reply:
        if method == "contraflow_load":
            folder, stamp = arguments
            await self.model.load(load_folder(Path(folder)))
            self._stamp = stamp
        elif method != "contraflow_stamp":
            raise ModelError(f"Worker failed with error 'object has no attribute {method!r}'")
        return Reply(body={"results": [{"stamp": self._stamp, "vllm": self._version}]})

    async def _generate(self, body: dict[str, Any]) -> Reply:
        sampling = body["sampling_params"]
        unknown = (body.keys() - _BODY) | (sampling.keys() - _SAMPLING)
        if unknown or not body["token_ids"] or not body["cache_salt"]:
            raise ValueError(f"unknown or empty fields: {sorted(unknown)}")
        prompt = np.array(body["token_ids"], np.int32)
        if body.get("stream"):
            return Reply(events=self._stream(prompt, sampling))
        await self._running.wait()
        rows: list[Any] = [None]
        rows += [
            {str(t): {"logprob": s}}
            for t, s in zip(prompt[1:].tolist(), self.model.score(prompt).tolist(), strict=True)
        ]
        return Reply(body={"choices": [{"index": 0, "finish_reason": "length"}], "prompt_logprobs": rows})

    async def _stream(self, prompt: Int32, sampling: dict[str, Any]) -> AsyncGenerator[Any, None]:
        seed, temperature, stops = sampling["seed"], sampling["temperature"], tuple(sampling["stop_token_ids"])
        left, stop = int(sampling["max_tokens"]), None
        while stop is None:
            await self._running.wait()
            completion = await self.model.next(prompt, seed=seed, temperature=temperature, stops=stops)
            left -= len(completion.tokens)
            prompt = np.concatenate([prompt, completion.tokens])
            stop = completion.stop
            if stop is StopReason.LENGTH and left and len(completion.tokens):
                stop = None
            yield {"choices": [_choice(completion, stop)]}


def _choice(completion: Completion, stop: StopReason | None) -> dict[str, Any]:
    tokens, logprobs = completion.tokens.tolist(), completion.logprobs.tolist()
    routed = None
    if stop is not None and completion.routes is not None:
        file = io.BytesIO()
        np.save(file, completion.routes)
        routed = base64.b64encode(file.getvalue()).decode()
    return {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]},
        "finish_reason": None if stop is None else _STOPS[stop],
        "routed_experts": routed,
    }


async def _main(folder: str, socket: str, context_tokens: str) -> None:
    twin = VllmTwin(Path(folder), context_tokens=int(context_tokens))
    await twin.open(Path(socket))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
