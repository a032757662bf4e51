"""Read a GGUF file and write it as a Hugging Face folder: for models that package registries carry in that format only.

    python -m bench.gguf FILE.gguf FOLDER

Takes a Llama model whose tensors are F32, F16, BF16, Q4_1 or Q8_0 and whose tokenizer is byte-level BPE; gives config,
weights in bf16 (norms and matrices; llama.cpp's order of rotary pairs undone), tokenizer and chat template.
Formats after ggml's own description: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import argparse
import json
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

Array = np.ndarray[Any, np.dtype[Any]]

MAGIC = b"GGUF"
ALIGNMENT = 32  # of tensors, unless the file says otherwise
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, LIST = 8, 9
BLOCKS = {0: (1, 4), 1: (1, 2), 3: (32, 20), 8: (32, 34), 30: (1, 2)}  # kind: values and bytes of a block
CONTROL = 3  # type of a special token


class Entry(NamedTuple):
    """Where a tensor lies. `shape` as torch has it, outermost first."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # from the start of the data


class Gguf:
    """An open file: `facts` by key, tensors by name."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._bytes[:4] != MAGIC:
            raise SystemExit(f"{path} is not a GGUF file")
        self._at = 8
        tensors, facts = self._scalar("Q"), self._scalar("Q")
        self.facts: dict[str, Any] = {}
        for _ in range(facts):
            key = self._string()
            self.facts[key] = self._value(self._scalar("I"))
        self.entries = dict(self._entry() for _ in range(tensors))
        step = self.facts.get("general.alignment", ALIGNMENT)
        self._data = -(-self._at // step) * step

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor's values, float32."""
        entry = self.entries[name]
        count = int(np.prod(entry.shape))
        if entry.kind not in BLOCKS:
            raise SystemExit(f"tensor {name!r} is of kind {entry.kind}; known: {sorted(BLOCKS)}")
        values, size = BLOCKS[entry.kind]
        raw = np.frombuffer(self._bytes, np.uint8, count // values * size, self._data + entry.offset)
        return torch.from_numpy(unpacked(raw, entry.kind)).reshape(entry.shape)

    def _entry(self) -> tuple[str, Entry]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))[::-1]
        return name, Entry(shape, self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == LIST:
            inner = self._scalar("I")
            return [self._value(inner) for _ in range(self._scalar("Q"))]
        return self._scalar(SCALARS[kind])

    def _string(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return self._bytes[self._at - length : self._at].decode("utf-8")

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value


def unpacked(raw: Array, kind: int) -> Array:
    """Blocks of 32 values as float32. Q4_1: scale, minimum, 16 bytes of nibbles, low ones first. Q8_0: scale, int8."""
    if kind in (0, 1):
        return raw.view(np.float32 if kind == 0 else np.float16).astype(np.float32)
    if kind == 30:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(-1, BLOCKS[kind][1])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == 8:
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
    return scale * nibbles.astype(np.float32) + least


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json of a Llama model."""
    if facts["general.architecture"] != "llama":
        raise SystemExit(f"architecture {facts['general.architecture']!r}: only llama can be written")
    fact = {key.removeprefix("llama."): value for key, value in facts.items() if key.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": fact["embedding_length"],
        "intermediate_size": fact["feed_forward_length"],
        "num_hidden_layers": fact["block_count"],
        "num_attention_heads": fact["attention.head_count"],
        "num_key_value_heads": fact["attention.head_count_kv"],
        "max_position_embeddings": fact["context_length"],
        "rms_norm_eps": float(f"{fact['attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_theta": float(fact["rope.freq_base"]),
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def weights_of(file: Gguf, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors under the names that transformers gives them."""
    if "output.weight" in file.entries:
        raise SystemExit("the head is not the embedding; only tied models can be written")
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    inner = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config["num_hidden_layers"]):
        names |= {f"blk.{layer}.{old}.weight": f"model.layers.{layer}.{new}.weight" for old, new in inner.items()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    made = {}
    for old, new in names.items():
        tensor = file.tensor(old)
        for part, count in heads.items():
            if part in old:
                tensor = halves(tensor, count)
        made[new] = tensor.to(torch.bfloat16).contiguous()
    return made


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from rotary pairs side by side, as llama.cpp has them, to pairs half a head apart."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template. Digits are split one by one, as SmolLM's are."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise SystemExit(f"tokenizer {facts['tokenizer.ggml.pre']!r} of kind {facts['tokenizer.ggml.model']!r}")
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL]
    )
    made.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for name, key in NAMED.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")


NAMED = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def convert(path: Path, folder: Path) -> None:
    """Write `folder` anew."""
    file = Gguf(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(file.facts)
    save_file(weights_of(file, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(file.facts, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    convert(options.file, options.folder)
    print(f"wrote {options.folder}")


if __name__ == "__main__":
    main()
