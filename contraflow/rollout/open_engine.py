"""Opens the engine that a recipe asks for, for one worker: which class, on which device, with which weights to expect.

Takes the section and the model's folder; gives the engine, what weights it can take, and who answers if it is scripted.
Heavy imports are late: an engine's own, in its branch.
"""

from pathlib import Path
from typing import Literal

from contraflow import config
from contraflow.errors import ConfigError
from contraflow.model.tokenizer import Tokenizer
from contraflow.rollout.engine import Engine
from contraflow.rollout.pupil import Pupil
from contraflow.rollout.scripted import ScriptedEngine
from contraflow.runtime.base import Host, Rendezvous
from contraflow.weights.manifest import Expected, expect

Opened = tuple[Engine, Expected | None, Pupil | None]  # what weights it can take; who answers when it is scripted


def open_served_engine(section: config.Engine, folder: Path, run_folder: Path, host: Host) -> Opened:
    """An engine that other programs run. Raises ConfigError."""
    from contraflow.rollout.open_served import open_served

    return *open_served(section, folder, run_folder, host), None


def open_engine(
    section: config.Engine,
    folder: Path,
    tokenizer: Tokenizer,
    host: Host,
    stepping: Literal["thread", "inline"],
    rendezvous: Rendezvous | None,
    *,
    whole: bool,
) -> Opened:
    """The scripted or native engine, alone or as rank 0 of several. Raises: ConfigError, ModelError."""
    if section.kind == "scripted":
        if section.routes:
            raise ConfigError("engine.routes = true needs engine.kind = 'native': the scripted engine has no experts")
        pupil = Pupil(lambda: scripted.version, eos=tokenizer.eos, letters=sorted(set(tokenizer.encode("0123456789"))))
        scripted = ScriptedEngine(
            pupil,
            vocab=tokenizer.size,
            clock=host.clock,
            context_tokens=section.context_tokens,
            on_refresh=section.on_refresh,
        )
        return scripted, None, pupil
    if rendezvous is not None:
        from contraflow.parallel.pieces import shapes
        from contraflow.rollout.rank import led_engine, load_rank

        rank = load_rank(section, folder, rendezvous, clock=host.clock)
        expected = Expected(rank.core.config.digest(), shapes(rank.core.config))
        return led_engine(rank, clock=host.clock, on_broken=host.give_up, whole=whole), expected, None
    from contraflow.model.folder import load_folder
    from contraflow.parallel.devices import DTYPES, device_of, enter_device
    from contraflow.rollout.native import NativeEngine

    device = device_of(section.device)
    enter_device(device)
    decoder = load_folder(folder, dtype=DTYPES[section.compute], device=device)
    expected = expect(decoder.config.digest(), decoder.state_dict())
    return NativeEngine(decoder, section, clock=host.clock, stepping=stepping), expected, None
