"""An environment's options, checked: a pydantic model read from `env.options` of a recipe.

Takes plain values, gives the model, or a `ConfigError` that names key, value, what is allowed and the nearest name.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from contraflow.errors import ConfigError


class Options(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


OptionsT = TypeVar("OptionsT", bound=Options)


def read_options(model: type[OptionsT], options: Mapping[str, Any]) -> OptionsT:
    """Check `options` against `model`.

    Raises: ConfigError with one line for each wrong key.
    """
    try:
        return model.model_validate_json(json.dumps(options))  # JSON's rules: a list may stand for a tuple
    except TypeError as fault:
        raise ConfigError(f"env.options holds numbers, strings, booleans, lists and tables only: {fault}") from None
    except ValidationError as fault:
        raise ConfigError("\n".join(_explain(model, error) for error in fault.errors())) from None


def _explain(model: type[Options], error: Any) -> str:
    path = ".".join(["env.options", *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        names = _fields(model, error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), names, n=1)
        return f"unknown key {path!r}" + (
            f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(names)}"
        )
    if error["type"] == "missing":
        return f"{path} is missing"
    return f"{path} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _fields(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """Names a model allows at `loc`, descending through lists of models."""
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        inner = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = inner[0]
    return list(model.model_fields)
