"""Opens the table at which outside programs play, for an environment that wants one.

Takes the environment and the model's folder, whose chat template is used. Imports what needs the extra late.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from contraflow import config
from contraflow.envs.base import Env
from contraflow.envs.harness import Harness, HarnessOptions
from contraflow.envs.verifiers import Verifiers
from contraflow.errors import ConfigError
from contraflow.model.template import ChatTemplate

if TYPE_CHECKING:
    from contraflow.rollout.harness import Table


def open_table(
    world: Env, folder: Path, *, rollout: config.Rollout, deadline_s: float, sign: Path | None
) -> "Table | None":
    """The table of one worker; None for an environment that is played in place. `sign`: where its address is written.

    Raises: ConfigError, also without the extra; ModelError.
    """
    if not isinstance(world, Harness | Verifiers):
        return None
    try:
        from contraflow.rollout.harness import Table
        from contraflow.rollout.player import Player
    except ImportError as fault:
        extra = f"contraflow[{world.name}]"
        raise ConfigError(f"env.name = {world.name!r} needs pip install {extra!r}: {fault}") from None
    player = None
    if isinstance(world, Verifiers):
        hello = {"options": world.options.model_dump(), "deadline_s": deadline_s}
        player = Player((sys.executable, "-m", "contraflow.envs.verifiers_play"), hello, os.environ)
    return Table(
        world.options if isinstance(world, Harness) else HarnessOptions(tasks={}),
        ChatTemplate.load(folder),
        temperature=rollout.temperature,
        deadline_s=deadline_s,
        sign=sign,
        environ=os.environ,
        player=player,
    )
