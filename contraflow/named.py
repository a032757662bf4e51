"""From a name in a recipe to the thing it means: an entry of a shipped table, or the user's own code.

Takes `NAME`, `package.module:ATTRIBUTE` or `path/to/file.py:ATTRIBUTE`; gives the object, or a `ConfigError` that lists
what is shipped and the nearest name. Runs the user's module when it loads it: a recipe is as trusted as a program.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from contraflow.errors import ConfigError


def find(name: str, table: Mapping[str, Any], *, what: str) -> Any:
    """The entry of `table` called `name`, or the user's object that `name` points to.

    Raises: ConfigError when there is no such entry, module, file or attribute, or when the user's module raises.
    """
    if name in table:
        return table[name]
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise ConfigError(f"unknown {what} {name!r}{_hint(name, table)}")
    module = _load(place, what=what, name=name)
    if not hasattr(module, attribute):
        names = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{what} {name!r}: {place} has no {attribute!r}; it has {', '.join(names) or 'nothing'}")
    return getattr(module, attribute)


def _hint(name: str, table: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, table, n=1)
    nearest = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{nearest} shipped: {', '.join(table)}; your own: 'package.module:NAME' or 'path/to/file.py:NAME'"


def _load(place: str, *, what: str, name: str) -> ModuleType:
    try:
        return _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as fault:
        raise ConfigError(f"{what} {name!r}: {place} does not load: {type(fault).__name__}: {fault}") from fault


def _load_file(path: Path) -> ModuleType:
    """The module of a file, loaded once: by its full path, since two files may have the same name."""
    name = str(path.resolve())
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
