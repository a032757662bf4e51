"""SGLang's HTTP API as a dialect of served engines: token ids in, tokens and log-probabilities out, weights from disk.

For 0.5.15 up to 0.6, written from its documentation and source (docs/advanced_features/sglang_for_rl, srt/managers/
{io_struct,tokenizer_manager}, srt/layers/sampler), and not run against a server. Its log-probabilities are of the
temperature-scaled softmax before any truncation, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set, which `scaled` finds.
While paused a server holds back every request, a probe too: so proofs come after `resume`.
"""

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from contraflow.config import Engine as EngineSection
from contraflow.envs.draws import derive_seed
from contraflow.errors import ConfigError, ServerError
from contraflow.model.families import ModelConfig
from contraflow.rollout.dialect import ODD, Chunk, Piece
from contraflow.types import Float32, Int32, Routes, StopReason

if TYPE_CHECKING:
    from contraflow.rollout.http import HttpClient

OLDEST, TOO_NEW = (0, 5, 15), (0, 6)
_UNSTAMPED = "default"  # weight_version of a server that was told none
# What a server's command line must not have said: its words in /server_info, what is allowed, why.
_WANTED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("disaggregation_mode", ("null", None), "a prefill or decode server answers only through a router"),
    ("speculative_algorithm", (None,), "tokens that a draft model proposed have not been held to the policy's own"),
    ("enable_eplb", (False, None), "weights loaded after experts have moved may go to the wrong ones"),
)


class Sglang:
    """A `Dialect`."""

    def __init__(self, client: "HttpClient", config: ModelConfig, *, load_deadline_s: float) -> None:
        """`config` says which layers have experts. `load_deadline_s` bounds the wait for loaded weights."""
        self._client, self._config, self._load_deadline_s = client, config, load_deadline_s

    @property
    def url(self) -> str:
        return self._client.url

    async def alive(self) -> None:
        """See `Dialect`. A paused server generates nothing, so it is not asked to."""
        await self._client.get("/model_info")

    async def check(self, section: EngineSection) -> str:
        """See `Dialect`."""
        info = await self._object("/server_info")
        version = str(info.get("version"))
        if not OLDEST <= _numbers(version) < TOO_NEW:
            oldest, limit = (".".join(map(str, numbers)) for numbers in (OLDEST, TOO_NEW))
            raise ConfigError(f"server {self.url} is SGLang {version}; this adapter is written for {oldest} to {limit}")
        for name, allowed, why in _WANTED:
            if info.get(name) not in allowed:
                raise ConfigError(f"server {self.url} was started with {name} = {info[name]!r}: {why}; leave it out")
        longest = info.get("max_req_input_len")
        if not isinstance(longest, int) or longest < section.context_tokens:
            raise ConfigError(
                f"server {self.url} takes prompts below {longest} tokens, engine.context_tokens ="
                f" {section.context_tokens}; start it with --context-length {section.context_tokens + 6}, of which it"
                " keeps 6"
            )
        if section.routes and not info.get("enable_return_routed_experts"):
            raise ConfigError(f"engine.routes: start server {self.url} with --enable-return-routed-experts")
        if section.on_refresh == "keep" and info.get("disable_radix_cache"):
            raise ConfigError(
                f"server {self.url} keeps no cache (--disable-radix-cache), engine.on_refresh = 'keep' is of its cache;"
                " set engine.on_refresh = 'recompute'"
            )
        return f"SGLang {version}"

    async def generate(self, piece: Piece) -> AsyncGenerator[Chunk, None]:
        """See `Dialect`. A server stops at end tokens of its model too: at one that is not asked for it goes on."""
        part, stamps = piece, list[str | None]()
        while True:
            seen, on = list[int](), False
            async with aclosing(self._part(part, seen)) as chunks:
                async for chunk, more in chunks:
                    # The weights of all parts: a server may have been started anew between two.
                    stamp = " and ".join(dict.fromkeys(map(str, [*stamps, chunk.stamp])))
                    yield msgspec.structs.replace(chunk, stamp=stamp)
                    on = more
            if not on:
                return
            stamps.append(chunk.stamp)
            part = _rest(part, seen)

    async def _part(self, piece: Piece, seen: list[int]) -> AsyncGenerator[tuple[Chunk, bool], None]:
        """What one request gives, its tokens added to `seen`; with the last, whether the piece goes on from there."""
        rid, ended = _rid(piece.id), False
        try:
            async with aclosing(self._client.stream("/generate", _asked(piece, rid))) as events:
                async for event in events:
                    chunk, ended = self._chunk(piece, event, seen)
                    seen += chunk.tokens
                    if chunk.tokens or ended:
                        yield chunk, ended and chunk.stop is None
            if not ended:
                raise ServerError(self.url, "failed", f"it ended piece {piece.id!r} without a reason")
        except ServerError:
            ended = True  # whoever fails is mended, and what it was at ends with it
            raise
        finally:
            if not ended:  # it would notice a connection that broke off only after seconds
                await self._client.post("/abort_request", {"rid": rid})

    async def score(self, prompts: Sequence[Int32], salt: str) -> tuple[Float32, ...]:
        """See `Dialect`. Cached prefixes are not used where log-probabilities of the prompt are asked for."""
        return tuple(await asyncio.gather(*(self._score(prompt, salt) for prompt in prompts)))

    async def pause(self) -> None:
        """See `Dialect`."""
        await self._client.post("/pause_generation", {"mode": "abort"})

    async def load(self, folder: Path, stamp: str) -> None:
        """See `Dialect`. The cache stays: prefixes of other weights have other salts."""
        body = {"model_path": str(folder), "weight_version": stamp, "flush_cache": False, "abort_all_requests": False}
        self._done(await self._client.post("/update_weights_from_disk", body, deadline_s=self._load_deadline_s))

    async def resume(self) -> None:
        """See `Dialect`."""
        await self._client.post("/continue_generation", {})

    async def stamp(self) -> str:
        """See `Dialect`."""
        version = (await self._object("/model_info")).get("weight_version")
        if not isinstance(version, str):
            raise ServerError(self.url, "malformed", f"/model_info has weight_version {version!r}")
        return "" if version == _UNSTAMPED else version

    async def join_group(self, name: str, address: str, port: int, *, first_rank: int, ranks: int) -> None:
        """Make the server's GPUs ranks `first_rank` and on of a process group of `ranks` that meets at `address`."""
        body = {"master_address": address, "master_port": port, "rank_offset": first_rank, "world_size": ranks}
        body |= {"group_name": name, "backend": "nccl"}
        self._done(await self._client.post("/init_weights_update_group", body, deadline_s=self._load_deadline_s))

    async def receive(self, name: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]], stamp: str | None) -> None:
        """Take tensors, by Hugging Face name with dtype and shape, as rank 0 of the group broadcasts them, in order.

        Only while paused, as `load`. The last call of a version has its `stamp`.
        """
        body: dict[str, Any] = {"names": list(tensors), "group_name": name, "flush_cache": False}
        body |= {"dtypes": [dtype for dtype, _ in tensors.values()]}
        body |= {"shapes": [list(shape) for _, shape in tensors.values()], "abort_all_requests": False}
        body |= {} if stamp is None else {"weight_version": stamp}
        self._done(await self._client.post("/update_weights_from_distributed", body, deadline_s=self._load_deadline_s))

    async def leave_group(self, name: str) -> None:
        """Undo `join_group`."""
        self._done(await self._client.post("/destroy_weights_update_group", {"group_name": name}))

    def _chunk(self, piece: Piece, event: Any, seen: list[int]) -> tuple[Chunk, bool]:
        """What an event adds to the tokens that were `seen`, and whether it is the last of them.

        Events hold all tokens so far, or only new ones if the server was started with --incremental-streaming-output.
        """
        try:
            if "error" in event:
                raise ServerError(self.url, "refused", f"piece {piece.id!r}: {event['error']['message']}")
            meta = event["meta_info"]
            pairs, count = meta.get("output_token_logprobs") or [], int(meta.get("completion_tokens", len(seen)))
            whole = len(pairs) == count and [pair[1] for pair in pairs[: len(seen)]] == seen
            new = pairs[len(seen) :] if whole else pairs
            tokens, logprobs = [int(pair[1]) for pair in new], [float(pair[0]) for pair in new]
            reason = meta.get("finish_reason")
            stop = None if reason is None else _stop(reason, piece, [*seen, *tokens])
            told = piece.routes and stop in (StopReason.STOP, StopReason.LENGTH)
            routes = self._routes(meta["routed_experts"], piece, count) if told else None
            stamp = _stamp(meta)
        except ODD as fault:
            said = f"{type(fault).__name__}: {fault}"
            raise ServerError(self.url, "malformed", f"/generate gave an event of another form ({said})") from None
        if len(seen) + len(tokens) != count:
            said = f"{len(pairs)} log-probabilities after {len(seen)} tokens, {count} in all"
            raise ServerError(self.url, "malformed", f"piece {piece.id!r} got {said}")
        return Chunk(tokens=tokens, logprobs=logprobs, stop=stop, routes=routes, stamp=stamp), reason is not None

    def _routes(self, text: str, piece: Piece, count: int) -> Routes:
        """Experts from base64 of int32 [Lp + N - 1, all layers or those with experts, K]."""
        try:
            ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        except binascii.Error as fault:
            raise ValueError(f"routed_experts: {fault}") from None
        config, fed = self._config, len(piece.prompt) + count - 1
        layers = ids.size // max(fed * config.top_k, 1)
        if layers not in (config.layers, len(config.moe_layers)) or ids.size != layers * fed * config.top_k:
            raise ValueError(f"routed_experts holds {ids.size} ids, for {fed} tokens of {config.layers} layers")
        routes_LMK = ids.reshape(fed, layers, config.top_k)
        if layers != len(config.moe_layers):
            routes_LMK = routes_LMK[:, list(config.moe_layers)]
        if routes_LMK.size and not (routes_LMK.min() >= 0 and routes_LMK.max() < config.experts):
            raise ValueError(f"routed_experts holds ids from {routes_LMK.min()} to {routes_LMK.max()}")
        return routes_LMK.astype(np.uint8 if config.experts <= 256 else np.uint16)

    async def _score(self, prompt: Int32, salt: str) -> Float32:
        ids = [int(token) for token in prompt]
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "extra_key": salt, "stream": False}
        body["sampling_params"] = {**_PLAIN, "max_new_tokens": 1, "temperature": 1.0}
        try:
            pairs = (await self._client.post("/generate", body))["meta_info"]["input_token_logprobs"]
            given = [int(pair[1]) for pair in pairs]
            logprobs = np.array([float(pair[0]) for pair in pairs[1:]], np.float32)
        except ODD as fault:
            said = f"{type(fault).__name__}: {fault}"
            raise ServerError(self.url, "malformed", f"/generate scored in another form ({said})") from None
        if given != ids:
            raise ServerError(self.url, "malformed", f"/generate scored the tokens {given}, asked for {ids}")
        return logprobs

    async def _object(self, path: str) -> dict[str, Any]:
        answer = await self._client.get(path)
        if not isinstance(answer, dict):
            raise ServerError(self.url, "malformed", f"{path} gave {answer!r}")
        return answer

    def _done(self, answer: Any) -> None:
        """Raise unless a control call says that it succeeded."""
        if not (isinstance(answer, dict) and answer.get("success") is True):
            said = answer.get("message") if isinstance(answer, dict) else answer
            raise ServerError(self.url, "refused", f"it could not: {said}")


_PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}  # the full distribution, whatever the model's folder says


def _asked(piece: Piece, rid: str) -> dict[str, Any]:
    params: dict[str, Any] = {**_PLAIN, "max_new_tokens": piece.max_new_tokens, "temperature": piece.temperature}
    params |= {"stop_token_ids": list(piece.stop_tokens), "ignore_eos": not piece.stop_tokens}
    params |= {"sampling_seed": piece.seed}  # heeded only under --enable-deterministic-inference
    body: dict[str, Any] = {"rid": rid, "input_ids": [int(token) for token in piece.prompt], "sampling_params": params}
    body |= {"return_logprob": True, "extra_key": piece.salt, "stream": True}
    return body | ({"return_routed_experts": True} if piece.routes else {})


def _rid(name: str) -> str:
    """A server aborts every request whose id begins with the one that it is told; none of these begins another."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _stop(reason: Any, piece: Piece, tokens: list[int]) -> StopReason | None:
    """Why a piece ended with all its `tokens`. None: by an end token of the model, so it goes on from there."""
    if reason["type"] == "length":
        return StopReason.LENGTH
    if reason["type"] == "abort":
        return StopReason.ABORTED
    if reason["type"] != "stop" or not tokens:
        raise ValueError(f"finish_reason {reason!r} with tokens {tokens}")
    if tokens[-1] in piece.stop_tokens:
        return StopReason.STOP
    return StopReason.LENGTH if len(tokens) == piece.max_new_tokens else None


def _rest(piece: Piece, tokens: list[int]) -> Piece:
    """What is left of a piece that got `tokens`. Its seed is another, since noise is drawn from a request's start."""
    return msgspec.structs.replace(
        piece,
        id=f"{piece.id}+",
        prompt=np.concatenate([piece.prompt, np.array(tokens, np.int32)]),
        seed=derive_seed(piece.seed, "part", len(tokens)),
        max_new_tokens=piece.max_new_tokens - len(tokens),
    )


def _stamp(meta: Mapping[str, Any]) -> str:
    """The weights that sampled all of it; newer servers say it token by token."""
    spans = meta.get("weight_versions")
    versions = [str(span["version"]) for span in spans] if spans else [str(meta["weight_version"])]
    return " and ".join("" if version == _UNSTAMPED else version for version in dict.fromkeys(versions))


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return tuple(int(part) for part in found.groups()) if found else ()
