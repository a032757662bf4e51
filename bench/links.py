"""Two network namespaces joined by one link of a given rate: two "nodes" on one machine. Needs root and Linux.

with slow_link(200) as sides:          # Mbit/s each way; None: as fast as it goes
    subprocess.Popen(sides[0].command(["python", ...]), env=sides[0].environment())
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

BURST = "256kb"  # of the token bucket: smaller ones hold gloo's large writes back for no reason
LATENCY = "2000ms"  # of queue before packets are dropped: a sender waits, as it would on a real link


@dataclass(frozen=True)
class Side:
    """One namespace and its end of the link."""

    namespace: str
    interface: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, run inside."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """An environment in which gloo talks over the link."""
        return {**base, "GLOO_SOCKET_IFNAME": self.interface}


@contextmanager
def slow_link(mbit: int | None) -> Iterator[tuple[Side, Side]]:
    """Two sides; removed on the way out, with whatever still runs in them losing its network."""
    tag = f"cf{os.getpid() % 100000}"
    sides = (Side(f"{tag}a", f"{tag}a"), Side(f"{tag}b", f"{tag}b"))
    try:
        for side in sides:
            _ip("netns", "add", side.namespace)
        a, b = sides
        _ip("link", "add", a.interface, "netns", a.namespace, "type", "veth", "peer", b.interface, "netns", b.namespace)
        for number, side in enumerate(sides, 1):
            inside = ("-n", side.namespace)
            _ip(*inside, "addr", "add", f"10.77.0.{number}/24", "dev", side.interface)
            _ip(*inside, "link", "set", side.interface, "up")
            _ip(*inside, "link", "set", "lo", "up")
            if mbit is not None:
                bucket = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", LATENCY)
                _run("tc", "-n", side.namespace, "qdisc", "add", "dev", side.interface, "root", *bucket)
        yield sides
    finally:
        for side in sides:
            subprocess.run(["ip", "netns", "del", side.namespace], check=False, capture_output=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()} (network namespaces need root)")
