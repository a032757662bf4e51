"""Where a recipe's `model.folder` lies: a folder on disk, or `builtin:NAME` for a model shipped in the package."""

from pathlib import Path

from contraflow.errors import ConfigError, ModelError

SHIPPED = Path(__file__).parent / "shipped"
_PREFIX = "builtin:"


def model_folder(name: str, *, shipped: Path = SHIPPED) -> Path:
    """The folder that `name` stands for. What is in it is checked by whoever loads it.

    Raises: ConfigError when there is no such folder, listing what is shipped; ModelError when it holds no config.json.
    """
    folder = shipped / name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model.folder = {name!r}: no such model; shipped: {', '.join(shipped_models(shipped)) or 'none'}; "
            "or give the path of a Hugging Face folder (config.json, *.safetensors, tokenizer.json)"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.folder = {name!r}: {folder} holds no config.json, so it is not a model folder")
    return folder


def shipped_models(shipped: Path = SHIPPED) -> list[str]:
    """Names that a recipe can use, `builtin:` included."""
    return sorted(_PREFIX + config.parent.name for config in shipped.glob("*/config.json"))
