"""Command lines as data: what runs on which node, with a reason for every word, as text for a shell or as JSON.

Takes nothing from the machine and starts nothing. The text of a shell is quoted by `shlex`, so that any path in it
stays one word.
"""

import json
import shlex
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """One option with its value, or a switch, and why it is there."""

    words: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Setting:
    """One variable of the environment, and why it is set."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Process:
    """What to start on one node."""

    node: int
    command: tuple[str, ...]
    flags: tuple[Flag, ...]
    settings: tuple[Setting, ...]

    @property
    def argv(self) -> list[str]:
        """Program and arguments."""
        return [*self.command, *(word for flag in self.flags for word in flag.words)]

    @property
    def env(self) -> dict[str, str]:
        """To be added to the environment."""
        return {setting.name: setting.value for setting in self.settings}

    @property
    def reasons(self) -> dict[str, str]:
        """Why each variable and option is there, by its name."""
        return {s.name: s.why for s in self.settings} | {flag.words[0]: flag.why for flag in self.flags}


@dataclass(frozen=True)
class Plan:
    """One engine: its processes, one a node, node 0 answering HTTP; and what to know before starting it."""

    engine: str
    versions: str  # whose documentation the flags are from
    url: str
    processes: tuple[Process, ...]
    notes: tuple[str, ...]

    def shell(self) -> str:
        """One command a node with its reasons above it, to be pasted."""
        lines = [f"# {self.engine}, flags of {self.versions}; answers at {self.url}"]
        lines += [f"# note: {note}" for note in self.notes]
        said: set[str] = set()
        for process in self.processes:
            lines += ["", f"# node {process.node}"]
            lines += [f"#   {name}: {why}" for name, why in process.reasons.items() if name not in said]
            said |= process.reasons.keys()
            variables = [f"{shlex.quote(name)}={shlex.quote(value)}" for name, value in process.env.items()]
            lines.append(" ".join([*(["env", *variables] if variables else []), shlex.join(process.argv)]))
        return "\n".join(lines)

    def json(self) -> str:
        """The same for programs: `processes` with node, argv and env; `why` by option or variable."""
        tree: dict[str, Any] = {"engine": self.engine, "versions": self.versions, "url": self.url}
        tree |= {"notes": self.notes, "processes": [], "why": {}}
        for process in self.processes:
            tree["processes"].append({"node": process.node, "argv": process.argv, "env": process.env})
            tree["why"] |= process.reasons
        return json.dumps(tree, indent=2)
