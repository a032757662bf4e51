"""Where each of the decoder's tensors lives in a Hugging Face checkpoint: fused here, one by one there.

Gives, per decoder tensor, its shape and the disk tensors that fill it, as a pure function of the config. Serves reading
and writing folders, and engines that want Hugging Face names. Does not touch tensors' values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from contraflow.model.families import ModelConfig
from contraflow.model.kinds import FAMILIES, Latent


@dataclass(frozen=True, slots=True)
class Part:
    """Disk tensor `name` of `shape` fills `whole[index]`; an empty index is the whole tensor."""

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    turned: bool = False  # on disk its last two dimensions are the other way round

    @property
    def inside(self) -> tuple[int, ...]:
        """Its shape as it lies in the decoder's tensor."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.turned else self.shape

    def of(self, whole: Tensor) -> Tensor:
        """The view of a decoder tensor that the disk tensor fills."""
        return whole[self.index].mT if self.turned else whole[self.index]


def parts(config: ModelConfig) -> dict[str, list[Part]]:
    """Decoder tensor name -> the parts that fill it, every element exactly once."""
    table = {"embed": [Part("model.embed_tokens.weight", (config.vocab, config.dim))]}
    for layer in range(config.layers):
        table |= {f"layers.{layer}.{name}": found for name, found in _layer(config, layer)}
    table["norm"] = [Part("model.norm.weight", (config.dim,))]
    if not config.tied:
        table["lm_head"] = [Part("lm_head.weight", (config.vocab, config.dim))]
    return table


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, list[Part]]]:
    there = f"model.layers.{layer}"
    yield "attention_norm", [Part(f"{there}.input_layernorm.weight", (config.dim,))]
    if config.latent is not None:
        yield from _latent_attention(config, config.latent, f"{there}.self_attn")
    else:
        yield from _attention(config, f"{there}.self_attn")
    yield "mlp_norm", [Part(f"{there}.post_attention_layernorm.weight", (config.dim,))]
    if layer in config.moe_layers:
        yield from _moe(config, f"{there}.{FAMILIES[config.family].moe}")
    else:
        yield from _dense("mlp", config.dim, config.ffn, f"{there}.mlp")


def _attention(config: ModelConfig, there: str) -> Iterator[tuple[str, list[Part]]]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    yield "attention.qkv", _rows([(f"{there}.{name}.weight", rows) for name, rows in projections], (config.dim,))
    yield "attention.out", [Part(f"{there}.o_proj.weight", (config.dim, queries))]
    if config.attention_bias:
        yield "attention.qkv_bias", _rows([(f"{there}.{name}.bias", rows) for name, rows in projections], ())
        if FAMILIES[config.family].out_bias:
            yield "attention.out_bias", [Part(f"{there}.o_proj.bias", (config.dim,))]
    if FAMILIES[config.family].oss:
        yield "attention.sinks", [Part(f"{there}.sinks", (config.heads,))]
    if config.qk_norm == "projection":
        yield "attention.qk_norm", _rows([(f"{there}.q_norm.weight", queries), (f"{there}.k_norm.weight", keys)], ())
    if config.qk_norm == "head":
        yield (
            "attention.qk_norm",
            [Part(f"{there}.{n}_norm.weight", (config.head_dim,), (i,)) for i, n in enumerate("qk")],
        )


def _latent_attention(config: ModelConfig, latent: Latent, there: str) -> Iterator[tuple[str, list[Part]]]:
    queries, keys = config.heads * config.head_dim, latent.kv_rank + latent.rope_dim
    first = ("q_proj", queries) if latent.q_rank is None else ("q_a_proj", latent.q_rank)
    down = (first, ("kv_a_proj_with_mqa", keys))
    yield "attention.down", _rows([(f"{there}.{name}.weight", rows) for name, rows in down], (config.dim,))
    if latent.q_rank is not None:
        yield "attention.q_norm", [Part(f"{there}.q_a_layernorm.weight", (latent.q_rank,))]
        yield "attention.q_up", [Part(f"{there}.q_b_proj.weight", (queries, latent.q_rank))]
    yield "attention.kv_norm", [Part(f"{there}.kv_a_layernorm.weight", (latent.kv_rank,))]
    both = config.heads * (latent.nope_dim + latent.value_dim)
    yield "attention.kv_up", [Part(f"{there}.kv_b_proj.weight", (both, latent.kv_rank))]
    yield "attention.out", [Part(f"{there}.o_proj.weight", (config.dim, config.heads * latent.value_dim))]
    if config.attention_bias:
        yield "attention.down_bias", _rows([(f"{there}.{name}.bias", rows) for name, rows in down], ())
        yield "attention.out_bias", [Part(f"{there}.o_proj.bias", (config.dim,))]


def _dense(here: str, dim: int, ffn: int, there: str) -> Iterator[tuple[str, list[Part]]]:
    yield f"{here}.gate_up", _rows([(f"{there}.gate_proj.weight", ffn), (f"{there}.up_proj.weight", ffn)], (dim,))
    yield f"{here}.down", [Part(f"{there}.down_proj.weight", (dim, ffn))]


def _moe(config: ModelConfig, there: str) -> Iterator[tuple[str, list[Part]]]:
    family, (experts, dim, ffn) = FAMILIES[config.family], (config.experts, config.dim, config.expert_ffn)
    router = f"{there}.{family.router_name}"
    yield "mlp.router.weight", [Part(f"{router}.weight", (experts, dim))]
    if family.oss:
        yield "mlp.router.bias", [Part(f"{router}.bias", (experts,))]
        yield from _fused_experts(experts, dim, ffn, f"{there}.experts")
        return
    gate, up, down = family.expert_names
    gate_up, downs = [], []
    for expert in range(experts):
        both = _rows([(f"{there}.experts.{expert}.{n}.weight", ffn) for n in (gate, up)], (dim,))
        gate_up += [Part(part.name, part.shape, (expert, *part.index)) for part in both]
        downs.append(Part(f"{there}.experts.{expert}.{down}.weight", (dim, ffn), (expert,)))
    yield "mlp.gate_up", gate_up
    yield "mlp.down", downs
    if family.sigmoid:
        yield "mlp.router.correction_bias", [Part(f"{router}.e_score_correction_bias", (experts,))]
        yield from _dense("mlp.shared", dim, config.shared_experts * ffn, f"{there}.shared_experts")


def _fused_experts(experts: int, dim: int, ffn: int, there: str) -> Iterator[tuple[str, list[Part]]]:
    """gpt-oss keeps a layer's experts together, each matrix turned, gate and up row by row as here."""
    yield "mlp.gate_up", [Part(f"{there}.gate_up_proj", (experts, dim, 2 * ffn), turned=True)]
    yield "mlp.gate_up_bias", [Part(f"{there}.gate_up_proj_bias", (experts, 2 * ffn))]
    yield "mlp.down", [Part(f"{there}.down_proj", (experts, ffn, dim), turned=True)]
    yield "mlp.down_bias", [Part(f"{there}.down_proj_bias", (experts, dim))]


def _rows(named: list[tuple[str, int]], rest: tuple[int, ...]) -> list[Part]:
    """Tensors stacked one below the other."""
    found, start = [], 0
    for name, rows in named:
        found.append(Part(name, (rows, *rest), (slice(start, start + rows),)))
        start += rows
    return found
