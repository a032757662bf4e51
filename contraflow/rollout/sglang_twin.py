"""The twin of an SGLang server: our own engine behind the part of SGLang's HTTP API that `sglang.py` speaks.

Takes a model folder and an address; answers as the documentation and source of SGLang 0.5.2x say it does, which no
server has confirmed, from real weights that it really reloads. For tests, and to try a set-up without a GPU:
`python -m contraflow.rollout.sglang_twin FOLDER SOCKET CONTEXT_TOKENS`. Strict: a request with a field that it does not
know is refused. While paused it holds back every request, as SGLang does.
"""

import asyncio
import base64
import sys
import time
from collections.abc import AsyncGenerator, Set
from pathlib import Path
from typing import Any

import numpy as np

from contraflow.config import Engine as EngineSection
from contraflow.errors import ContraflowError, EngineError
from contraflow.model.folder import load_folder
from contraflow.rollout.http_server import Ask, HttpServer, Reply, Tamper, as_it_is
from contraflow.rollout.twin import TwinModel
from contraflow.types import Completion, Int32, Routes, StopReason

# What each call may hold; of the first group everything must be there.
_GENERATE = {"input_ids", "sampling_params", "return_logprob", "extra_key", "stream"}
_MAY_GENERATE = {"rid", "logprob_start_len", "return_routed_experts"}
_SAMPLING = {"max_new_tokens", "temperature", "top_p", "top_k", "min_p"}
_MAY_SAMPLING = {"stop_token_ids", "ignore_eos", "sampling_seed"}
_LOAD = {"model_path", "weight_version", "flush_cache", "abort_all_requests"}


class SglangTwin:
    """One server. Invariant: while `_running` is not set, nothing is generated."""

    def __init__(
        self,
        folder: Path,
        *,
        context_tokens: int,
        key: str = "",
        info: dict[str, Any] | None = None,
        eos: tuple[int, ...] = (),
        incremental: bool = True,
        raw_logprobs: bool = False,
        tamper: Tamper = as_it_is,
    ) -> None:
        """`info` changes what /server_info says. `eos` end a sequence unasked, unless told to be ignored.

        `incremental`: events hold new tokens only. `raw_logprobs`: report those of temperature 1, as a server does for
        which SGLANG_RETURN_ORIGINAL_LOGPROB is set.
        """
        section = EngineSection(context_tokens=context_tokens, routes=True)
        self.model = TwinModel(folder, section, clock=time.perf_counter, raw_logprobs=raw_logprobs)
        self._key, self._eos, self._incremental = key, eos, incremental
        self._info: dict[str, Any] = {"version": "0.5.21", "max_req_input_len": context_tokens, "weight_version": ""}
        self._info |= {"disaggregation_mode": "null", "speculative_algorithm": None, "enable_eplb": False}
        self._info |= {"disable_radix_cache": False, "enable_return_routed_experts": True, **(info or {})}
        self._stamp = "default"
        self._running = asyncio.Event()
        self._running.set()
        self._idle = asyncio.Condition()
        self._flying: dict[str, bool] = {}  # request id, and whether it is to be aborted
        self._tasks: set[asyncio.Task[None]] = set()
        self.http = HttpServer(self._handle, tamper)

    async def open(self, socket: Path | None = None) -> str:
        """Begin to serve; the address."""
        return await self.http.open(socket)

    async def close(self) -> None:
        """End as a process does that is killed: everybody is hung up on."""
        await self.http.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.model.close()

    async def _handle(self, ask: Ask) -> Reply:
        if self._key and ask.headers.get("authorization") != f"Bearer {self._key}":
            return Reply(401, {"error": "Unauthorized"})
        try:
            return await self._routed(ask)
        except (KeyError, TypeError, ValueError, EngineError) as fault:
            return Reply(400, {"error": {"message": str(fault)}})
        except ContraflowError as fault:
            return Reply(400, {"success": False, "message": str(fault), "num_paused_requests": 0})

    async def _routed(self, ask: Ask) -> Reply:
        body = ask.body if isinstance(ask.body, dict) else {}
        match ask.method, ask.path:
            case "GET", "/model_info":
                return Reply(body={"is_generation": True, "weight_version": self._stamp})
            case "GET", "/server_info":
                return Reply(body=self._info)
            case "POST", "/pause_generation":
                return await self._pause(body)
            case "POST", "/continue_generation":
                _only(body, set())
                self._running.set()
                return Reply(body={"message": "Generation continued successfully.", "status": "ok"})
            case "POST", "/abort_request":
                _only(body, {"rid"})
                self._abort(body["rid"])
                return Reply()
            case "POST", "/update_weights_from_disk":
                return await self._load(body)
            case "POST", "/generate":
                return await self._generate(body)
        return Reply(404, {"detail": "Not Found"})

    async def _pause(self, body: dict[str, Any]) -> Reply:
        if body != {"mode": "abort"}:
            raise ValueError(f"the twin cannot pause by {body}")
        self._running.clear()
        self._abort("")
        async with self._idle:
            await self._idle.wait_for(lambda: not self._flying)
        return Reply(body={"message": "Generation paused successfully.", "status": "ok"})

    def _abort(self, beginning: str) -> None:
        """Every request whose id begins so."""
        for rid in self._flying:
            self._flying[rid] |= rid.startswith(beginning)

    async def _load(self, body: dict[str, Any]) -> Reply:
        _only(body, _LOAD)
        if body["flush_cache"] or body["abort_all_requests"]:
            raise ValueError("the twin keeps its cache and its requests")
        await self.model.load(load_folder(Path(body["model_path"])))
        self._stamp = body["weight_version"]
        return Reply(body={"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _generate(self, body: dict[str, Any]) -> Reply:
        params = body["sampling_params"]
        _only(body, _GENERATE, _MAY_GENERATE)
        _only(params, _SAMPLING, _MAY_SAMPLING)
        if (params["top_p"], params["top_k"], params["min_p"]) != (1.0, -1, 0.0) or not body["extra_key"]:
            raise ValueError(f"the twin samples from the whole distribution, not by {params}")
        prompt = np.array(body["input_ids"], np.int32)
        await self._running.wait()
        if body["stream"]:
            return Reply(events=self._stream(prompt, body))
        scores = [None, *self.model.score(prompt).tolist()]
        pairs = [[score, token, None] for score, token in zip(scores, prompt.tolist(), strict=True)]
        meta = {"completion_tokens": 1, "weight_version": self._stamp, "input_token_logprobs": pairs}
        return Reply(body={"output_ids": [0], "meta_info": meta | {"finish_reason": {"type": "length", "length": 1}}})

    async def _stream(self, prompt: Int32, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The events of a request, which goes on whether anybody reads them or not."""
        events: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(self._work(prompt, body, events))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        while (event := await events.get()) is not None:
            yield event

    async def _work(self, prompt: Int32, body: dict[str, Any], events: "asyncio.Queue[Any]") -> None:
        rid, params, pairs, reason = body["rid"], body["sampling_params"], list[Any](), None
        seed, temperature = params["sampling_seed"], params["temperature"]
        stops = () if params["ignore_eos"] else (*params["stop_token_ids"], *self._eos)
        self._flying[rid] = False
        try:
            while reason is None:
                new, routes = list[Any](), None
                if self._flying[rid]:
                    reason = {"type": "abort", "message": "Abort in decoding"}
                else:
                    answer = await self.model.next(prompt, seed=seed, temperature=temperature, stops=stops)
                    prompt, routes = np.concatenate([prompt, answer.tokens]), answer.routes
                    given = zip(answer.logprobs.tolist(), answer.tokens.tolist(), strict=True)
                    new = [[score, token, None] for score, token in given]
                    pairs += new
                    reason = _reason(answer, len(pairs), params["max_new_tokens"])
                shown = new if self._incremental else list(pairs)
                meta = {"id": rid, "finish_reason": reason, "completion_tokens": len(pairs)}
                meta |= {"weight_version": self._stamp, "output_token_logprobs": shown}
                if reason is not None and routes is not None and "return_routed_experts" in body:
                    meta["routed_experts"] = self._experts(routes)
                events.put_nowait({"output_ids": [pair[1] for pair in shown], "meta_info": meta})
        except EngineError as fault:
            events.put_nowait({"error": {"message": str(fault), "type": "invalid_request_error", "code": 400}})
        finally:
            events.put_nowait(None)
            del self._flying[rid]
            async with self._idle:
                self._idle.notify_all()

    def _experts(self, routes: Routes) -> str:
        """As SGLang's buffer has them: int32, a row for every layer, those without experts left at 0."""
        config = self.model.config
        rows = np.zeros((len(routes), config.layers, config.top_k), "<i4")
        rows[:, list(config.moe_layers)] = routes
        return base64.b64encode(rows.tobytes()).decode()


def _reason(answer: Completion, count: int, most: int) -> dict[str, Any] | None:
    if answer.stop is StopReason.STOP:
        return {"type": "stop", "matched": int(answer.tokens[-1])}
    return {"type": "length", "length": count} if count >= most else None


def _only(body: dict[str, Any], must: Set[str], may: Set[str] = frozenset()) -> None:
    """Refuse a body with other fields, or without one that it must have."""
    if body.keys() - must - may or must - body.keys():
        raise ValueError(f"fields {sorted(body)}; they are {sorted(must)}, and may be {sorted(may)}")


async def _main(folder: str, socket: str, context_tokens: str) -> None:
    twin = SglangTwin(Path(folder), context_tokens=int(context_tokens))
    await twin.open(Path(socket))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
