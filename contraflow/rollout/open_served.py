"""Opens a served engine from a recipe's `engine` section: its dialect, and its servers, attached or to be started.

Takes the section, the model and the run's folder; gives an engine that starts nothing before it is first used.
"""

import importlib.util
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import contraflow
from contraflow.config import Engine as EngineSection
from contraflow.errors import ConfigError
from contraflow.model.folder import read_config
from contraflow.parallel.pieces import shapes
from contraflow.rollout import vllm
from contraflow.rollout.dialect import Dialect
from contraflow.rollout.fleet import Server
from contraflow.rollout.served import ServedEngine
from contraflow.rollout.servers import Attached, Started
from contraflow.rollout.sglang import Sglang
from contraflow.runtime.base import Host
from contraflow.weights.manifest import Expected

if TYPE_CHECKING:
    from contraflow.rollout.http import HttpClient

PACKAGE = Path(contraflow.__file__).parent.parent  # where a server's Python finds the worker extension


def open_served(section: EngineSection, folder: Path, run_folder: Path, host: Host) -> tuple[ServedEngine, Expected]:
    """The engine of a worker, and what weights it can take. Raises: ConfigError, ModelError."""
    config = read_config(folder)
    logs = run_folder / "servers"
    servers = open_servers(section, folder, lambda index: logs / f"{host.name}-{index}.log")
    engine = ServedEngine(servers, section, config, folder, clock=host.clock, on_broken=host.give_up)
    return engine, Expected(config.digest(), shapes(config))


def open_servers(
    section: EngineSection, folder: Path, log: Callable[[int], Path], environment: Mapping[str, str] = os.environ
) -> list[Server]:
    """The servers a section asks for; `log` says where each started one prints. Raises: as `check_servers`."""
    check_servers(section, folder, environment)
    server, key = section.server, key_of(section, environment)
    found = []
    for url in server.urls:
        client = _client(url, key, server.request_deadline_s)
        found.append(Server(_dialect(section, folder, client), Attached(url, deadline_s=server.start_deadline_s)))
    for index in range(0 if server.urls else server.count):
        # A socket in a folder that only this user can enter: the weights' endpoints ask for no key.
        socket = Path(tempfile.gettempdir()) / f"contraflow-{secrets.token_hex(8)}" / "socket"
        client = _client(f"unix:{socket}", key, server.request_deadline_s)
        process = Started(
            client.url,
            vllm.command(section, folder, socket),
            vllm.environment(environment, PACKAGE, key),
            log(index),
            deadline_s=server.start_deadline_s,
        )
        found.append(Server(_dialect(section, folder, client), process))
    return found


def check_servers(section: EngineSection, folder: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError for what no server is needed to know: before anything is started. `folder` is the model's."""
    server, context = section.server, read_config(folder).context
    if importlib.util.find_spec("h11") is None:
        raise ConfigError("served engines need the package 'h11': pip install 'contraflow[served]'")
    key_of(section, environment)
    if server.folder and not os.access(server.folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"engine.server.folder = {server.folder!r}: not a folder that can be written to; make it, or leave it empty"
        )
    if section.context_tokens > context:
        raise ConfigError(f"engine.context_tokens = {section.context_tokens}: the model was made for {context} at most")
    if server.urls:
        return
    if section.kind == "sglang":
        raise ConfigError(
            "engine.server.urls = [] with engine.kind = 'sglang': SGLang servers are attached to, not started; start "
            "one with what `contraflow plan-engine` prints, and name its address there"
        )
    if shutil.which(server.python, path=environment.get("PATH")) is None:
        raise ConfigError(
            f"engine.server.python = {server.python!r}: there is no such program here; name the interpreter of the "
            "environment that has vLLM, or attach to servers with engine.server.urls"
        )


def _dialect(section: EngineSection, folder: Path, client: "HttpClient") -> Dialect:
    if section.kind == "vllm":
        moe_layers = read_config(folder).moe_layers
        return vllm.Vllm(client, moe_layers=moe_layers, load_deadline_s=section.server.start_deadline_s)
    return Sglang(client, read_config(folder), load_deadline_s=section.server.start_deadline_s)


def _client(url: str, key: str, deadline_s: float) -> "HttpClient":
    from contraflow.rollout.http import HttpClient

    return HttpClient(url, key=key, deadline_s=deadline_s)


def key_of(section: EngineSection, environment: Mapping[str, str]) -> str:
    """The servers' key, from the variable that the section names; empty if it names none. Raises: ConfigError."""
    name = section.server.key_env
    key = environment.get(name, "") if name else ""
    if name and not key:
        raise ConfigError(f"engine.server.key_env = {name!r}: there is no such environment variable, or it is empty")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"engine.server.key_env = {name!r}: what the variable holds cannot be sent as a key; printable ASCII"
            " without spaces can (does it end with the line end of the file that it was read from?)"
        )
    return key
