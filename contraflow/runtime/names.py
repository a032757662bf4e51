"""Names of workers and factories, by the same rules on every runtime."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from contraflow.errors import ChannelError


def check_names(name: str, members: Collection[str], alive: Mapping[str, Collection[str]]) -> None:
    """Refuse to start `name` with workers `members` when there are none, or one of these names is taken.

    `alive` has, for everything started under a name, the workers of it that live.
    """
    if not name or not members:
        raise ChannelError(f"cannot start {name!r} with {len(members)} workers: give it a name, and one worker or more")
    names = {taken for started, workers in alive.items() if workers for taken in (started, *workers)}
    taken = sorted({name, *members} & names)
    if taken:
        raise ChannelError(f"cannot start {name!r}: {', '.join(taken)} is alive; stop it first or choose another name")


def unknown(name: str, started: Collection[str]) -> ChannelError:
    """What to raise about a name that nothing was started with."""
    return ChannelError(f"nothing named {name!r} was started; started: {', '.join(started) or 'nothing'}")


def factory_name(factory: Callable[..., Any]) -> str:
    """How errors call a factory."""
    return getattr(factory, "__qualname__", type(factory).__qualname__)
