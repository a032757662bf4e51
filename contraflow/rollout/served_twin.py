"""The twin of a vLLM server: our own engine behind the part of vLLM's HTTP API that `vllm.py` speaks.

Takes a model folder and an address; answers as vLLM 0.32 was seen to, from real weights that it really reloads. For
tests, and to try a set-up where vLLM is not installed: `python -m contraflow.rollout.served_twin FOLDER SOCKET`.
Strict: a request with a field that it does not know is refused. Has no scheduler options, no LoRA, no chat.
"""

import asyncio
import base64
import io
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from contraflow.config import Engine as EngineSection
from contraflow.errors import ContraflowError, EngineError, ModelError
from contraflow.model.decoder import Decoder
from contraflow.model.folder import load_folder
from contraflow.rollout.http_server import Ask, HttpServer, Reply
from contraflow.rollout.native import NativeEngine
from contraflow.telemetry import Clock
from contraflow.types import Completion, Int32, Request, StopReason, Version
from contraflow.weights.probe import make_probe, probe_logprobs, probe_prompts

Tamper = Callable[[str, Any], Any]  # given a path, and what it would answer: what it does answer

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
        clock: Clock = time.perf_counter,
        key: str = "",
        version: str = "0.32.0",
        routes: bool = False,
        raw_logprobs: bool = False,
        tamper: Tamper = lambda path, answer: answer,
    ) -> None:
        """`raw_logprobs`: report those of temperature 1, as vLLM does unless told otherwise. `tamper` alters answers,
        each event of a stream by itself."""
        self._decoder = load_folder(folder)
        section = EngineSection(context_tokens=context_tokens, routes=routes)
        self._engine = NativeEngine(self._decoder, section, clock=clock, stepping="inline", version=Version(0, 0))
        self._section, self._key, self._version, self._raw, self._tamper = section, key, version, raw_logprobs, tamper
        self._stamp, self._loads, self._served = "", 0, 0
        self._running = asyncio.Event()
        self._running.set()
        self._flying: set[str] = set()
        self._http = HttpServer(self._handle)

    async def open(self, socket: Path | None = None) -> str:
        """Begin to serve; the address."""
        return await self._http.open(socket)

    async def close(self) -> None:
        """End as a process does that is killed: everybody is hung up on."""
        await self._http.close()
        await self._engine.close()

    async def _handle(self, ask: Ask) -> Reply:
        guarded = ask.path.startswith(("/v1", "/inference"))  # vLLM asks for no key elsewhere
        if self._key and guarded and ask.headers.get("authorization") != f"Bearer {self._key}":
            return Reply(401, {"error": "Unauthorized"})
        try:
            reply = await self._routed(ask)
        except (KeyError, TypeError, ValueError, EngineError) as fault:
            return Reply(400, {"error": {"message": str(fault), "code": 400}})
        except ContraflowError as fault:
            return Reply(500, {"error": {"message": str(fault), "code": 500}})
        if reply.events is not None:
            return Reply(reply.status, events=self._tampered(ask.path, reply.events))
        return Reply(reply.status, self._tamper(ask.path, reply.body))

    async def _tampered(self, path: str, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with aclosing(events):
            async for event in events:
                yield self._tamper(path, event)

    async def _routed(self, ask: Ask) -> Reply:
        match ask.method, ask.path:
            case "GET", "/health":
                return Reply()
            case "GET", "/version":
                return Reply(body={"version": self._version})
            case "GET", "/v1/models":
                return Reply(body={"data": [{"id": "policy", "max_model_len": self._section.context_tokens}]})
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
        await self._engine.abort(list(self._flying))
        return Reply(body={"status": "paused"})

    async def _rpc(self, method: str, arguments: list[str]) -> Reply:
        if method == "contraflow_load":
            folder, stamp = arguments
            await self._load(load_folder(Path(folder)))
            self._stamp = stamp
        elif method != "contraflow_stamp":
            raise ModelError(f"Worker failed with error 'object has no attribute {method!r}'")
        return Reply(body={"results": [{"stamp": self._stamp, "vllm": self._version}]})

    async def _load(self, fresh: Decoder) -> None:
        """Through the engine's own swap, proven by what the fresh weights themselves give."""
        self._loads += 1
        prompts = probe_prompts(fresh.config.vocab, prompts=1, tokens=4, seed=0)
        probe = make_probe(fresh, prompts, 1e-3)
        await self._engine.swap(Version(0, self._loads), dict(fresh.state_dict()), probe)

    async def _generate(self, body: dict[str, Any]) -> Reply:
        sampling = body["sampling_params"]
        unknown = (body.keys() - _BODY) | (sampling.keys() - _SAMPLING)
        if unknown or not body["token_ids"] or not body["cache_salt"]:
            raise ValueError(f"unknown or empty fields: {sorted(unknown)}")
        prompt = np.array(body["token_ids"], np.int32)
        if body.get("stream"):
            return Reply(events=self._stream(prompt, sampling))
        await self._running.wait()
        (scores,) = probe_logprobs(self._decoder, [prompt])
        rows: list[Any] = [None]
        rows += [{str(t): {"logprob": float(s)}} for t, s in zip(prompt[1:].tolist(), scores, strict=True)]
        return Reply(body={"choices": [{"index": 0, "finish_reason": "length"}], "prompt_logprobs": rows})

    async def _stream(self, prompt: Int32, sampling: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Token by token, each a request of its own: the noise is a function of seed and position."""
        left, stop = int(sampling["max_tokens"]), None
        while stop is None:
            await self._running.wait()
            completion = await self._one(prompt, sampling)
            left -= len(completion.tokens)
            prompt = np.concatenate([prompt, completion.tokens])
            stop = completion.stop
            if stop is StopReason.LENGTH and left and len(completion.tokens):
                stop = None
            yield {"choices": [self._choice(prompt, completion, stop)]}

    async def _one(self, prompt: Int32, sampling: dict[str, Any]) -> Completion:
        self._served += 1
        request = Request(
            id=str(self._served),
            prompt=prompt,
            seed=sampling["seed"],
            max_new_tokens=1,
            temperature=sampling["temperature"],
            stop_tokens=tuple(sampling["stop_token_ids"]),
            want_routes=self._section.routes,
        )
        self._flying.add(request.id)
        try:
            return await self._engine.generate(request)
        finally:
            self._flying.discard(request.id)

    def _choice(self, prompt: Int32, completion: Completion, stop: StopReason | None) -> dict[str, Any]:
        tokens, logprobs = completion.tokens.tolist(), completion.logprobs.tolist()
        if self._raw and tokens:
            logprobs = [float(probe_logprobs(self._decoder, [prompt])[0][-1])]
        content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
        routed = None
        if stop is not None and completion.routes is not None:
            file = io.BytesIO()
            np.save(file, completion.routes)
            routed = base64.b64encode(file.getvalue()).decode()
        return {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {"content": content},
            "finish_reason": None if stop is None else _STOPS[stop],
            "routed_experts": routed,
        }


async def _main(folder: str, socket: str, context_tokens: str) -> None:
    twin = VllmTwin(Path(folder), context_tokens=int(context_tokens), clock=time.perf_counter)
    await twin.open(Path(socket))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
