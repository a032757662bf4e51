"""Opens the table at which outside programs play, for an environment that wants one.

Takes the environment and the model's folder, whose chat template is used. Imports what needs the extra late.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from contraflow import config
from contraflow.envs.base import Env
from contraflow.envs.harness import Harness
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
    if not isinstance(world, Harness):
        return None
    try:
        from contraflow.rollout.harness import Table
    except ImportError as fault:
        raise ConfigError(f"env.name = 'harness' needs pip install 'contraflow[harness]': {fault}") from None
    return Table(
        world.options,
        ChatTemplate.load(folder),
        temperature=rollout.temperature,
        deadline_s=deadline_s,
        sign=sign,
        environ=os.environ,
    )
