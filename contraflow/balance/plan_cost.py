"""What one decode step, one prefill, one training step and one refresh take, by cause: closed forms, no state.

Each is the larger of what must be computed and what must be read, plus what is waited for. Uniform routing is assumed:
real routing has busier ranks, and a step waits for the busiest.

Letters: E experts, K of a token, R ranks of a layout, N domains of NVLink.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from contraflow.balance.plan_factors import Backend, Factors
from contraflow.balance.plan_sizes import VALUE, Sizes
from contraflow.cluster.instances import Gpu, Instance
from contraflow.config import Parallel
from contraflow.dispatch.traffic import expected_across
from contraflow.errors import ConfigError

SAYS = {
    "compute": "matrix products on the GPUs",
    "memory": "weights and cache read from HBM",
    "experts": "tokens on their way to experts and back",
    "ranks": "gathers and reductions between ranks",
    "bubble": "pipeline stages that wait for each other",
    "fixed": "what each layer costs whatever the batch",
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds by cause. Compute and memory overlap, so the larger counts; the rest is waited for."""

    compute: float = 0.0
    memory: float = 0.0
    experts: float = 0.0
    ranks: float = 0.0
    bubble: float = 0.0
    fixed: float = 0.0
    backend: str = ""  # that carried tokens to experts; empty: they are all here

    @property
    def seconds(self) -> float:
        """In all."""
        return max(self.compute, self.memory) + self.experts + self.ranks + self.bubble + self.fixed

    @property
    def bound(self) -> str:
        """The cause that counts most."""
        return max(SAYS, key=lambda name: getattr(self, name))

    @property
    def reason(self) -> str:
        """A sentence on the bound."""
        share = min(getattr(self, self.bound) / self.seconds, 1.0) if self.seconds else 0.0
        return f"bound by {SAYS[self.bound]}: {share:.0%} of the time"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a layout runs."""

    sizes: Sizes
    instance: Instance
    factors: Factors

    @property
    def gpu(self) -> Gpu:
        if self.instance.gpu is None:
            raise ConfigError(f"instance {self.instance.name!r} has no GPU: a trainer or an engine needs some")
        return self.instance.gpu

    def domains(self, ranks: int) -> int:
        """NVLink domains that so many ranks take; GPUs without NVLink are as if joined inside their node."""
        within = self.instance.nvlink_domain or self.instance.gpus
        return -(-ranks // within)

    @property
    def inside(self) -> float:
        """Bytes a second from one GPU to others of its domain."""
        return (self.gpu.nvlink_gb_s or self.factors.pcie_gb_s) * 1e9

    @property
    def network(self) -> float:
        """Bytes a second from one GPU to other domains."""
        return self.instance.gpu_network_gb_s * 1e9


def hop_seconds(place: Place, backend: Backend, ranks: int, tokens: float, *, back: bool) -> float:
    """One dispatch, or combine (`back`), of `tokens` a rank among `ranks` that share out the experts."""
    config, domains = place.sizes.config, place.domains(ranks)
    here = ranks // domains
    row = config.dim * (VALUE if back else backend.value_bytes) + (0 if back else 12 * config.top_k)
    reached = {"experts": config.experts, "choices": config.top_k}
    copies = {"choice": "per_expert", "rank": "all_to_all", "node": "hierarchical"}[backend.copies]
    across = expected_across(copies, **reached, domains=domains, domain_ranks=here)
    if backend.copies == "choice":
        forwarded = config.top_k * (here - 1) / ranks
    else:
        hit = expected_across("all_to_all", **reached, domains=ranks, domain_ranks=1)
        forwarded = hit * (here - 1) / (here if backend.copies == "node" else ranks - 1)
    seconds = forwarded * row * tokens / (place.inside * backend.nvlink)
    if domains == 1:
        return backend.inside_s + (0.0 if back else backend.out_s) + seconds
    latency = backend.across_s + backend.domain_s * (domains - 2)
    return latency + max(across * row * tokens / (place.network * backend.network), seconds)


def usable(place: Place, ranks: int) -> Mapping[str, Backend]:
    """Backends that can run among so many ranks of this instance."""
    has = {"": True, "efa": place.instance.efa > 0, "gda": place.instance.efa_gda}
    far = place.domains(ranks) > 1
    return {
        name: backend
        for name, backend in place.factors.backends.items()
        if has[backend.needs] and (backend.network > 0 if far else True) and (backend.needs == "" or far)
    }


def to_experts(place: Place, ranks: int, tokens: float, crossings: int, only: str = "") -> tuple[float, str]:
    """Seconds of `crossings` hops (half of them back) in every layer of experts, and the backend that needs least."""
    layers = len(place.sizes.config.moe_layers)
    if ranks == 1 or not layers:
        return 0.0, ""
    found = {
        name: layers * crossings / 2 * sum(hop_seconds(place, b, ranks, tokens, back=back) for back in (False, True))
        for name, b in usable(place, ranks).items()
        if name == (only or name)
    }
    if not found:
        raise ConfigError(
            f"backend {only!r} cannot run over {ranks} GPUs of {place.instance.name}:"
            f" use {', '.join(usable(place, ranks)) or 'fewer GPUs'}"
        )
    best = min(found, key=found.__getitem__)
    return found[best], best


def ring_seconds(place: Place, ranks: int, size: float, passes: int) -> float:
    """`passes` times a ring over `ranks` (2: an all-reduce, 1: a gather) of `size` bytes, at the slowest link."""
    if ranks == 1:
        return 0.0
    f = place.factors
    far = place.domains(ranks) > 1
    rate = place.network * f.collective_network if far else place.inside * f.collective_nvlink
    return passes * size * (ranks - 1) / ranks / rate


def decode_cost(place: Place, layout: Parallel, batch: float, context: float, backend: str = "") -> Cost:
    """One decode step of an engine: `batch` sequences on each data-parallel rank, of a mean `context` of tokens."""
    sizes, f, gpu, c = place.sizes, place.factors, place.gpu, place.sizes.config
    rows = batch * layout.dp
    touched = 1 - (1 - c.top_k / c.experts) ** rows if c.experts else 0.0
    dense = (sizes.rest - sizes.embedding) / layout.tp
    read = VALUE * (dense + touched * sizes.experts / layout.ep) + batch * sizes.read_bytes(context) / layout.tp
    flops = batch * (2 * dense + sizes.attention_flops(context, decode=True) / layout.tp)
    flops += 2 * sizes.active_experts * rows / layout.ep
    moved, used = to_experts(place, layout.ep, batch / layout.tp, 2, backend)
    reduced = c.layers * 2 * ring_seconds(place, layout.tp, batch * c.dim * VALUE, 2)
    return Cost(
        compute=flops / (gpu.bf16_tflops * 1e12 * f.matrices),
        memory=read / (gpu.hbm_tb_s * 1e12 * f.decode_hbm),
        experts=moved,
        ranks=reduced,
        fixed=c.layers * f.decode_layer_s,
        backend=used,
    )


def prefill_cost(place: Place, layout: Parallel, tokens: float, context: float, backend: str = "") -> Cost:
    """A prefill of `tokens` on each data-parallel rank, in prompts of `context` tokens."""
    sizes, f, gpu, c = place.sizes, place.factors, place.gpu, place.sizes.config
    flops = tokens / layout.tp * (2 * sizes.active + sizes.attention_flops(context / 2, decode=False))
    moved, used = to_experts(place, layout.ep, tokens / layout.tp, 2, backend)
    return Cost(
        compute=flops / (gpu.bf16_tflops * 1e12 * f.prefill),
        memory=VALUE * (sizes.rest / layout.tp + sizes.experts / layout.ep) / (gpu.hbm_tb_s * 1e12 * f.decode_hbm),
        experts=moved,
        ranks=c.layers * 2 * ring_seconds(place, layout.tp, tokens * c.dim * VALUE, 2),
        fixed=c.layers * f.decode_layer_s,
        backend=used,
    )


def train_cost(
    place: Place, layout: Parallel, tokens: float, context: float, batch_tokens: int, backend: str = ""
) -> Cost:
    """One optimizer update over `tokens` in sequences of `context`, in micro-batches of `batch_tokens` a rank."""
    sizes, f, gpu, c = place.sizes, place.factors, place.gpu, place.sizes.config
    again = layout.recompute == "layer"
    each = 6 * sizes.active + 3 * sizes.attention_flops(context / 2, decode=False)
    head = 6 * c.vocab * c.dim
    flops = tokens * (each + again * (each - head) / 3)
    compute = flops / layout.ranks / (gpu.bf16_tflops * 1e12 * f.train)
    mine = tokens / (layout.dp * layout.cp)
    micros = max(tokens / layout.dp / batch_tokens, 1.0)
    moved, used = to_experts(place, layout.ep, mine / micros / layout.tp, 4 + 2 * again, backend)
    moved *= micros / layout.pp
    stage = sizes.parameters / (layout.pp * layout.tp)
    held = sizes.rest / (layout.pp * layout.tp) + sizes.experts / (layout.pp * layout.ep)
    sharers = layout.dp * layout.cp
    synced = micros * ring_seconds(place, sharers, VALUE * min(held, stage) * (2 + again) + 4 * min(held, stage), 1)
    reduced = c.layers / layout.pp * (4 + 2 * again) * ring_seconds(place, layout.tp, mine * c.dim * VALUE, 2)
    bubble = (layout.pp - 1) / micros * (compute + moved)
    return Cost(
        compute=compute,
        memory=28 * sizes.parameters / layout.ranks / (gpu.hbm_tb_s * 1e12 * f.decode_hbm),
        experts=moved,
        ranks=reduced + synced * (1 - f.overlap),
        bubble=bubble,
        backend=used,
    )


def refresh_seconds(place: Place, carrier: str, senders: int, nodes: int) -> float:
    """A version, as bf16, from `senders` trainer GPUs on their way to engines of `nodes` nodes."""
    f, size = place.factors, VALUE * place.sizes.parameters
    rates = {
        "collective": senders * min(f.sender_gb_s * 1e9, place.network or place.inside),
        "broadcast": min(f.broadcast_gb_s * 1e9, place.inside),
        "ipc": senders * place.inside * f.collective_nvlink,
        "blob": f.blob_gb_s * 1e9 * max(-(-senders // max(place.instance.gpus, 1)), 1),
    }
    if carrier not in rates:
        raise ConfigError(f"carrier {carrier!r} is not one of {', '.join(rates)}")
    read = size / (f.blob_gb_s * 1e9) if carrier == "blob" else 0.0  # every node reads a version whole
    return f.refresh_s + size / rates[carrier] + (read if nodes else 0.0)
