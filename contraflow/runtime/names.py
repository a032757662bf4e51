"""Names of workers and factories, by the same rules on every runtime."""

from collections.abc import Callable, Collection
from typing import Any

from contraflow.errors import ChannelError


def check_names(name: str, members: Collection[str], alive: Collection[str]) -> None:
    """Refuse to start `name` with workers `members` when one of those names is taken, or there are none."""
    if not name or not members:
        raise ChannelError(f"cannot start {name!r} with {len(members)} workers: give it a name, and one worker or more")
    taken = sorted(set(members) & set(alive))
    if taken:
        raise ChannelError(f"cannot start {name!r}: {', '.join(taken)} is alive; stop it first or choose another name")


def factory_name(factory: Callable[..., Any]) -> str:
    """How errors call a factory."""
    return getattr(factory, "__qualname__", type(factory).__qualname__)
