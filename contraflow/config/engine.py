"""Sections for models that compute: how one is spread over ranks, and the engine that generates with it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contraflow.config.base import Compute, Count, Device, Seconds, Section
from contraflow.config.launch import Launch
from contraflow.config.server import Server

SERVED = ("vllm", "sglang")  # kinds of engines that other programs run


class Parallel(Section):
    """How one model is spread over ranks: pp * dp * cp * tp of them, the experts of a stage over ep of its ranks."""

    dp: Count = 1  # data parallel: each has samples (trainer) or sequences (engine) of its own
    ep: Count = 1  # ranks that share out the experts; divides dp * cp * tp
    tp: Count = 1  # tensor parallel: attention heads and dense MLPs; tokens of expert layers are shared out too
    cp: Count = 1  # context parallel: the tokens of each sequence; trainer only
    pp: Count = 1  # pipeline stages: the layers; trainer only
    schedule: Literal["1f1b", "interleaved"] = "1f1b"  # of the pipeline; interleaved has two stages a rank
    recompute: Literal["none", "layer"] = "none"  # activations kept, or computed again in the backward pass; trainer
    dispatch: Literal["auto", "per_expert", "all_to_all", "hierarchical", "overlapped", "nvlink", "deepep"] = (
        "auto"  # see docs/dispatch.md
    )
    domain_ranks: Annotated[int, Field(ge=0)] = 0  # ranks joined by NVLink; 0: those of one host
    wire: Literal["same", "bf16", "fp8"] = "same"  # precision of tokens on their way to experts
    deadline_s: Seconds = 60.0  # a rank that does not take part in an exchange by then is named and ends the run

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.pp * self.stage_ranks

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if self.domain_ranks and self.ranks % self.domain_ranks:
            raise ValueError(f"domain_ranks = {self.domain_ranks} does not divide the {self.ranks} ranks evenly")
        if self.stage_ranks % self.ep:
            raise ValueError(
                f"ep = {self.ep} does not divide dp * cp * tp = {self.stage_ranks}: the experts are shared out among"
                " the ranks of one stage"
            )
        return self


class Engine(Section):
    """Where tokens come from."""

    kind: Literal["native", "scripted", "vllm", "sglang"] = (
        "native"  # scripted answers without a model; the last two are served, see docs/served.md
    )
    context_tokens: Count = 256  # longest sequence, prompt included
    kv_tokens: Count = 65536  # KV-cache budget, over all sequences
    block_tokens: Count = 16  # tokens of one cache block
    max_sequences: Count = 256  # sequences decoded together
    prefill_tokens: Count = 2048  # prompt tokens computed in one step
    on_refresh: Literal["keep", "recompute"] = "keep"  # KV cache of unfinished sequences when weights change
    routes: bool = False  # record each token's experts
    device: Device = "cpu"  # cpu, cuda or cuda:N: rank r takes GPU N + r, further workers the ones behind
    compute: Compute = "float32"  # of the forward pass; bfloat16 keeps weights so, but for router and head
    graphs: Literal["auto", "off"] = (
        "auto"  # replay decode passes as CUDA graphs; auto: on a GPU, with one rank, experts in bfloat16
    )
    lookahead: Literal["auto", "on", "off"] = (
        "auto"  # begin a pass before the last one's tokens are read; auto: as graphs
    )
    kernels: Literal["auto", "off"] = (
        "auto"  # C kernels on a CPU, built at the start; auto: where fp32, one thread and a C compiler are
    )
    bitwise: bool = False  # engine and trainer give a token the same bits, whatever the batch: see docs/bitwise.md
    replace_every: Annotated[int, Field(ge=0)] = 0  # refreshes between placements of experts by load; 0: in order
    spare_experts: Annotated[int, Field(ge=0)] = 0  # slots of each rank for replicas of popular experts
    offload: Literal["none", "all"] = "none"  # to the host while the trainer steps: weights and KV cache; native only
    parallel: Parallel = Parallel()  # how each worker's model is spread; cache and sequences are those of a dp rank
    launch: Launch = Launch()  # how a served engine is spread, for `contraflow plan-engine`
    server: Server = Server()  # of a served engine

    @property
    def served(self) -> bool:
        """Whether other programs generate."""
        return self.kind in SERVED

    @model_validator(mode="after")
    def _servers_decide(self) -> Self:
        if not self.served and self.server != Server():
            raise ValueError(
                f"server is set, but engine.kind = {self.kind!r} has no server; use one of {', '.join(SERVED)}, or "
                "leave engine.server out"
            )
        if not self.served:
            return self
        where = "the servers' own command line decides it (engine.server.arguments)"
        theirs = {
            "parallel",
            "device",
            "kv_tokens",
            "block_tokens",
            "replace_every",
            "spare_experts",
            "graphs",
            "lookahead",
        }
        for key in sorted(theirs):
            if getattr(self, key) != type(self).model_fields[key].get_default():
                raise ValueError(f"{key} = {getattr(self, key)!r} with engine.kind = {self.kind!r}: {where}")
        return self

    @model_validator(mode="after")
    def _ranks_can_generate(self) -> Self:
        if self.parallel.cp > 1 or self.parallel.pp > 1:
            raise ValueError(
                f"engine.parallel has cp = {self.parallel.cp} and pp = {self.parallel.pp}: an engine is spread over dp,"
                " tp and ep only; leave both at 1"
            )
        if self.kind == "scripted" and self.parallel.ranks > 1:
            raise ValueError(
                f"engine.parallel has {self.parallel.ranks} ranks, but engine.kind = 'scripted' has no model to spread"
            )
        return self

    @model_validator(mode="after")
    def _bitwise_is_of_one_cpu(self) -> Self:
        if not self.bitwise:
            return self
        wanted = {"kind": "native", "device": "cpu", "compute": "float32", "kernels": "auto"}
        wanted["on_refresh"] = (
            "recompute"  # keys and values of older weights are of another function than the trainer's
        )
        wrong = [
            f"{key} = {getattr(self, key)!r}, use {one!r}" for key, one in wanted.items() if getattr(self, key) != one
        ]
        if self.parallel.ranks > 1:
            wrong.append(f"parallel has {self.parallel.ranks} ranks, use one")
        if wrong:
            raise ValueError(f"bitwise = true with {'; '.join(wrong)}; or set bitwise = false")
        return self

    @model_validator(mode="after")
    def _only_one_rank_rests(self) -> Self:
        if self.offload != "none" and (self.kind != "native" or self.parallel.ranks > 1):
            raise ValueError(
                f"offload = {self.offload!r} with kind = {self.kind!r} and {self.parallel.ranks} ranks: only a native"
                " engine of one rank gives its memory away; set offload = 'none'"
            )
        return self

    @model_validator(mode="after")
    def _ranks_wait_for_each_other(self) -> Self:
        if self.lookahead == "on" and self.parallel.ranks > 1:
            raise ValueError(
                f"lookahead = 'on' with {self.parallel.ranks} ranks: they settle every pass among themselves;"
                " leave it at 'auto', which looks ahead where it can"
            )
        return self

    @model_validator(mode="after")
    def _placement_needs_ranks(self) -> Self:
        if self.spare_experts and not self.replace_every:
            raise ValueError(
                f"spare_experts = {self.spare_experts} with replace_every = 0: nothing would ever lie in those slots;"
                " say after how many refreshes experts are placed by load, such as replace_every = 1"
            )
        if self.replace_every and self.parallel.ep == 1:
            raise ValueError(
                f"replace_every = {self.replace_every} with parallel.ep = 1: one rank has all experts in any case;"
                " leave it at 0, or share the experts out among ranks"
            )
        return self
