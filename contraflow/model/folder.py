"""Hugging Face model folders: config.json and safetensors, one file or sharded behind an index.

Reads a folder into a `Decoder` and writes one that transformers loads. A folder that is missing, torn, of another shape
or holds too little or too much gives a ModelError that names the tensor and the file; nothing half-read is returned.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.decoder import Decoder
from contraflow.model.families import ModelConfig
from contraflow.model.names import Part, parts

# What lies beside the weights of a model folder and makes it usable for others.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_folder(folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Decoder:
    """Read a model. Parameters become `dtype`; router and head stay fp32 whatever the files hold.

    Raises: ModelError.
    """
    config = read_config(folder)
    decoder = Decoder(config, dtype=dtype, device=device)
    wanted = _wanted(decoder)
    with torch.no_grad():
        for file, names in _files(folder).items():
            for name, tensor in _read(file, names):
                if name in wanted:
                    _fill(*wanted.pop(name), tensor, file)
                elif not _harmless(name, tensor, decoder, wanted):
                    raise ModelError(f"{file}: tensor {name!r} is not part of a {config.family} model of this config")
    if wanted:
        names = sorted(wanted)
        raise ModelError(f"{folder}: tensor {names[0]!r} is missing{f', and {len(names) - 1} more' * (len(names) > 1)}")
    return decoder


def read_config(folder: Path) -> ModelConfig:
    """The model's shape, from `folder/config.json`. Raises: ModelError naming the file and the key."""
    file = folder / "config.json"
    tree = _json(file)
    try:
        return ModelConfig.from_hf(tree)
    except ModelError as fault:
        raise ModelError(f"{file}: {fault}") from None


def save_folder(decoder: Decoder, folder: Path, *, shard_bytes: int = 4 << 30) -> None:
    """Write the model, replacing one that is there. Each file appears whole, the index and config.json last.

    Router and head are written in fp32, the rest in the parameters' own dtype. Raises: ModelError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shards = _shards(decoder, shard_bytes)
        names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
        weight_map: dict[str, str] = {}
        for file, shard in zip(names, shards, strict=True):
            tensors = {name: whole[part.index].detach().cpu().contiguous() for name, (whole, part) in shard.items()}
            save_file(tensors, folder / f"{file}.partial", metadata={"format": "pt"})
            os.replace(folder / f"{file}.partial", folder / file)
            weight_map |= dict.fromkeys(shard, file)
        for stale in {*folder.glob("model*.safetensors"), folder / INDEX} - {folder / name for name in names}:
            stale.unlink(missing_ok=True)
        if len(shards) > 1:
            total = sum(p.nbytes for p in decoder.parameters())
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        dtype = str(decoder.norm.dtype).removeprefix("torch.")
        _write_json(folder / "config.json", decoder.config.to_hf() | {"dtype": dtype})
    except (OSError, SafetensorError) as fault:
        raise ModelError(f"could not write the model to {folder}: {fault}") from fault


def copy_companions(source: Path, target: Path) -> None:
    """Copy the tokenizer and generation files of one model folder to another, as far as there are any."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _wanted(decoder: Decoder) -> dict[str, tuple[Tensor, Part]]:
    """Disk tensor name -> the decoder tensor and the part of it that it fills."""
    weights = dict(decoder.named_parameters())
    return {part.name: (weights[name], part) for name, found in parts(decoder.config).items() for part in found}


def _fill(whole: Tensor, part: Part, tensor: Tensor, file: Path) -> None:
    if tuple(tensor.shape) != part.shape:
        raise ModelError(f"{file}: tensor {part.name!r} is {list(tensor.shape)}, but must be {list(part.shape)}")
    if tensor.dtype not in DTYPES:
        raise ModelError(f"{file}: tensor {part.name!r} is {tensor.dtype}, but must be one of {DTYPES}")
    whole[part.index].copy_(tensor)


def _harmless(name: str, tensor: Tensor, decoder: Decoder, wanted: dict[str, Any]) -> bool:
    """Old checkpoints hold rotary frequencies, and tied ones may hold the embedding twice."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    tied = decoder.config.tied and name == "lm_head.weight" and "model.embed_tokens.weight" not in wanted
    return tied and torch.equal(tensor.to(decoder.embed), decoder.embed)


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """Weight files and the tensors each must hold; None: whatever it holds."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    if not (folder / INDEX).is_file():
        raise ModelError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    weight_map = _json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{folder / INDEX}: {file!r} is not the name of a file beside it")
    return {folder / file: [n for n, f in weight_map.items() if f == file] for file in set(weight_map.values())}


def _read(file: Path, names: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one file, the embedding before a head that may have to equal it."""
    try:
        with safe_open(file, framework="pt") as opened:
            held = set(opened.keys())
            for name in sorted(names or held, key=lambda n: (n == "lm_head.weight", n)):
                if name not in held:
                    raise ModelError(f"{file}: tensor {name!r} is missing, though the index says it is here")
                yield name, opened.get_tensor(name)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing, though the index names it") from None
    except (SafetensorError, OSError) as fault:
        raise ModelError(f"{file} is not a whole safetensors file: {fault}") from None


def _shards(decoder: Decoder, shard_bytes: int) -> list[dict[str, tuple[Tensor, Part]]]:
    shards: list[dict[str, tuple[Tensor, Part]]] = [{}]
    size = 0
    for name, (whole, part) in _wanted(decoder).items():
        nbytes = whole[part.index].nbytes
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (whole, part)
        size += nbytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist; a model folder holds config.json and safetensors") from None
    except (OSError, ValueError) as fault:
        raise ModelError(f"{file} cannot be read: {fault}") from None
    if not isinstance(tree, dict):
        raise ModelError(f"{file} must hold a JSON object, not a {type(tree).__name__}")
    return tree


def _write_json(file: Path, tree: dict[str, Any]) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)
