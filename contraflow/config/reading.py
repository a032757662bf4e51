"""From a TOML recipe and overrides to a checked section, and back to TOML.

A `ConfigError` names the key, the value, what is allowed and the nearest name.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from contraflow.config.base import Section
from contraflow.config.recipe import Recipe
from contraflow.config.sft import RewardRecipe, SftRecipe
from contraflow.errors import ConfigError

R = TypeVar("R", bound=Section)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `section.key=value` overrides (values are TOML; a bare word is a string)."""
    return _check(Recipe, _read(path, overrides))


def load_sft_recipe(path: Path, overrides: Sequence[str] = ()) -> SftRecipe:
    """The same for a recipe that makes a model by supervised training."""
    return _check(SftRecipe, _read(path, overrides))


def load_reward_recipe(path: Path, overrides: Sequence[str] = ()) -> RewardRecipe:
    """The same for a recipe that makes a reward model from preferences."""
    return _check(RewardRecipe, _read(path, overrides))


def check_section(kind: type[R], tree: Mapping[str, Any]) -> R:
    """One section from plain values, or the key that is wrong."""
    return _check(kind, tree)


def check_recipe(tree: Mapping[str, Any]) -> Recipe:
    """Turn a tree of plain values into a `Recipe`, or say exactly which key is wrong."""
    return _check(Recipe, tree)


def _read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"recipe {str(path)!r} does not exist; see recipes/ for ones to start from") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise ConfigError(f"recipe {str(path)!r} is not TOML: {fault}") from None
    for override in overrides:
        _apply(tree, override)
    return tree


def _check(kind: type[R], tree: Mapping[str, Any]) -> R:
    try:
        # By way of JSON, since JSON's rules fit TOML: a list may stand for a tuple, and nothing else is converted.
        return kind.model_validate_json(json.dumps(tree))
    except TypeError as fault:
        raise ConfigError(f"a recipe holds numbers, strings, booleans, lists and tables only: {fault}") from None
    except ValidationError as fault:
        raise ConfigError("\n".join([_explain(kind, error) for error in fault.errors()] + _meant(kind, tree))) from None


def _meant(kind: type[BaseModel], tree: Mapping[str, Any]) -> list[str]:
    if kind is Recipe and "sft" in tree:
        return [
            "[sft] is of a recipe that makes a model: contraflow sft RECIPE FOLDER; RL recipes hold no such section"
        ]
    if kind is SftRecipe and "run" in tree:
        return ["[run] is of a recipe for contraflow run; recipes/tiny_moe_sft.toml is one to make a model by"]
    return []


def recipe_toml(recipe: Recipe) -> str:
    """The recipe as TOML, every value written out: what a run really used."""
    lines = []
    for name, section in recipe.model_dump(mode="json").items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml(value)}" for key, value in section.items()]
        lines.append("")
    return "\n".join(lines)


def _apply(tree: dict[str, Any], override: str) -> None:
    path, found, text = override.partition("=")
    keys = path.strip().split(".")
    if not found or len(keys) < 2 or not all(keys):
        raise ConfigError(f"--set {override!r}: write section.key=value, such as buffer.max_age=0")
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {key!r} is a value, not a section")
    node[keys[-1]] = _parse(text.strip())


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(kind: type[BaseModel], error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if not path:
        return str(error["ctx"]["error"])
    if error["type"] == "value_error":  # of one of our validators, which says all there is to say
        return f"{path}: {error['ctx']['error']}"
    if error["type"] == "extra_forbidden":
        return f"unknown key {path!r}{_nearest(kind, error['loc'])}"
    return f"{path} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _nearest(section: type[BaseModel], loc: tuple[Any, ...]) -> str:
    inner: Any = section
    for part in loc[:-1]:
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            inner = inner.model_fields[str(part)].annotation
        elif get_origin(inner) is dict:  # sections by name: `part` is the name
            inner = get_args(inner)[1]
    if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
        return ""
    section = inner
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(names)}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value)
