"""Where each of the decoder's tensors lives in a Hugging Face checkpoint: fused here, one by one there.

Gives, per decoder tensor, its shape and the disk tensors that fill it, as a pure function of the config. Serves reading
and writing folders, and engines that want Hugging Face names. Does not touch tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from contraflow.model.families import FAMILIES, ModelConfig


@dataclass(frozen=True, slots=True)
class Part:
    """Disk tensor `name` of `shape` fills `whole[index]`; an empty index is the whole tensor."""

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()


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
    yield from _attention(config, f"{there}.self_attn")
    yield "mlp_norm", [Part(f"{there}.post_attention_layernorm.weight", (config.dim,))]
    yield from _moe(config, there) if layer in config.moe_layers else _dense(config, f"{there}.mlp")


def _attention(config: ModelConfig, there: str) -> Iterator[tuple[str, list[Part]]]:
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    yield "attention.qkv", _rows([(f"{there}.{name}.weight", rows) for name, rows in projections], (config.dim,))
    yield "attention.out", [Part(f"{there}.o_proj.weight", (config.dim, queries))]
    if config.attention_bias:
        yield "attention.qkv_bias", _rows([(f"{there}.{name}.bias", rows) for name, rows in projections], ())
        yield "attention.out_bias", [Part(f"{there}.o_proj.bias", (config.dim,))]
    if config.qk_norm == "projection":
        yield "attention.qk_norm", _rows([(f"{there}.q_norm.weight", queries), (f"{there}.k_norm.weight", keys)], ())
    if config.qk_norm == "head":
        yield (
            "attention.qk_norm",
            [Part(f"{there}.{n}_norm.weight", (config.head_dim,), (i,)) for i, n in enumerate("qk")],
        )


def _dense(config: ModelConfig, there: str) -> Iterator[tuple[str, list[Part]]]:
    both = [(f"{there}.gate_proj.weight", config.ffn), (f"{there}.up_proj.weight", config.ffn)]
    yield "mlp.gate_up", _rows(both, (config.dim,))
    yield "mlp.down", [Part(f"{there}.down_proj.weight", (config.dim, config.ffn))]


def _moe(config: ModelConfig, there: str) -> Iterator[tuple[str, list[Part]]]:
    family, ffn = FAMILIES[config.family], config.expert_ffn
    there = f"{there}.{family.moe}"
    gate, up, down = family.expert_names
    yield "mlp.router.weight", [Part(f"{there}.gate.weight", (config.experts, config.dim))]
    gate_up, downs = [], []
    for expert in range(config.experts):
        both = _rows([(f"{there}.experts.{expert}.{n}.weight", ffn) for n in (gate, up)], (config.dim,))
        gate_up += [Part(part.name, part.shape, (expert, *part.index)) for part in both]
        downs.append(Part(f"{there}.experts.{expert}.{down}.weight", (config.dim, ffn), (expert,)))
    yield "mlp.gate_up", gate_up
    yield "mlp.down", downs


def _rows(named: list[tuple[str, int]], rest: tuple[int, ...]) -> list[Part]:
    """Tensors stacked one below the other."""
    found, start = [], 0
    for name, rows in named:
        found.append(Part(name, (rows, *rest), (slice(start, start + rows),)))
        start += rows
    return found
