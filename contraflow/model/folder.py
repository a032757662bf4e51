"""Hugging Face model folders: config.json and safetensors, one file or sharded behind an index.

Reads a folder into a `Decoder` and writes one that transformers loads. A folder that is missing, torn, of another shape
or holds too little or too much gives a ModelError that names the tensor and the file; nothing half-read is returned.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
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
from contraflow.model.reading import TensorFiles

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
SHARD_BYTES = 2 << 30  # of one file; while one is written, ranks that hand over tensors wait
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_folder(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype | None = None,
) -> Decoder:
    """Read a model. Parameters become `dtype`; router and head stay fp32 whatever the files hold.

    `compute_dtype` as `Decoder` has it.

    Raises: ModelError.
    """
    config = read_config(folder)
    decoder = Decoder(config, dtype=dtype, device=device, compute_dtype=compute_dtype)
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


def open_folder(folder: Path) -> TensorFiles:
    """A folder to read boxes of tensors from, by the parts of `names.parts`.

    Raises: ModelError for a tensor that is not the model's; those that are missing or misshapen when they are read.
    """
    config = read_config(folder)
    known = {part.name for found in parts(config).values() for part in found}
    where: dict[str, Path] = {}
    for file, names in _files(folder).items():
        for name in names or tensor_names(file):
            where[name] = file
            if name not in known and not _redundant(name, config):
                raise ModelError(f"{file}: tensor {name!r} is not part of a {config.family} model of this config")
    return TensorFiles(where)


def save_folder(decoder: Decoder, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model, replacing one that is there; see `write_folder`."""
    write_folder(decoder.config, decoder.named_parameters(), folder, shard_bytes=shard_bytes)


def write_folder(
    config: ModelConfig, tensors: Iterable[tuple[str, Tensor]], folder: Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write decoder tensors, by name, as a model folder, replacing one that is there. Raises: ModelError.

    At most `shard_bytes` and one tensor are held at a time. No file appears before all are whole, and the index and
    config.json come last. Router and head are written in fp32, the rest in the tensors' own dtype.
    """
    table, dtype = parts(config), torch.float32

    def on_disk() -> Iterator[tuple[str, Tensor]]:
        nonlocal dtype
        for name, whole in tensors:
            dtype = whole.dtype if name == "norm" else dtype
            yield from ((part.name, part.of(whole)) for part in table[name])

    try:
        folder.mkdir(parents=True, exist_ok=True)
        weight_map, total = write_shards(folder, "model", on_disk(), shard_bytes)
        for stale in {*folder.glob("model*.safetensors"), folder / INDEX} - {folder / n for n in weight_map.values()}:
            stale.unlink(missing_ok=True)
        if SINGLE not in weight_map.values():
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(folder / "config.json", config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")})
    except (OSError, SafetensorError) as fault:
        raise ModelError(f"could not write the model to {folder}: {fault}") from fault


def write_shards(
    folder: Path, stem: str, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> tuple[dict[str, str], int]:
    """Write `stem.safetensors`, or, beyond `shard_bytes`, `stem-00001-of-0000N.safetensors` and so on.

    Gives tensor name -> file name, and the bytes in all. Files get their names when all are written.
    """
    files: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        save_file(waiting, folder / f"{stem}-{len(files)}.partial", metadata={"format": "pt"})
        files.append(list(waiting))
        waiting.clear()
        size = 0

    for name, tensor in tensors:
        if waiting and size + tensor.nbytes > shard_bytes:
            flush()
        waiting[name] = tensor.detach().cpu().contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"{stem}.safetensors" if len(files) == 1 else f"{stem}-{index + 1:05d}-of-{len(files):05d}.safetensors"
        os.replace(folder / f"{stem}-{index}.partial", folder / file)
        weight_map |= dict.fromkeys(names, file)
    return weight_map, total


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
    part.of(whole).copy_(tensor)


def _harmless(name: str, tensor: Tensor, decoder: Decoder, wanted: dict[str, Any]) -> bool:
    """Whether it says nothing new."""
    if not _redundant(name, decoder.config):
        return False
    tied = decoder.config.tied and name == "lm_head.weight" and "model.embed_tokens.weight" not in wanted
    return not name.startswith("lm_head") or (tied and torch.equal(tensor.to(decoder.embed), decoder.embed))


def _redundant(name: str, config: ModelConfig) -> bool:
    """Old checkpoints hold rotary frequencies, tied ones may hold the embedding twice, and some hold layers for
    multi-token prediction behind the decoder's."""
    more = [f"model.layers.{config.layers + extra}." for extra in range(config.mtp_layers)]
    tied = config.tied and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq") or name.startswith(tuple(more))


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


def tensor_names(file: Path) -> list[str]:
    """What a safetensors file holds. Raises: ModelError when it is not whole."""
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as fault:
        raise ModelError(f"{file} is not a whole safetensors file: {fault}") from None


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
