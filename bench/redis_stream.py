"""A Redis stream as a peer of the buffer: the same groups in and out, through a real redis-server on the same disk.

Takes the path of a redis-server; gives seconds and bytes. A group is one XADD of what the wire format makes of it; a
step reads its groups with XREADGROUP, decodes and acknowledges them. Eight connections put at a time, over a Unix
socket, append-only file on. Nothing is checked on the way back, where the ledger checks a digest.
"""

import itertools
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from contraflow.runtime.wire import Frame, decode, encode
from contraflow.types import Group

Reply: TypeAlias = Any  # what RESP has: bytes, int, None, lists of them
WRITERS = 8
STREAM, READERS = b"groups", b"trainer"
LARGE = 1 << 16  # bytes of a word that is sent without a copy
DEADLINE_S = 120.0
EVENTS = (b"posed", b"started", b"ready", b"taken", b"trained")  # of a group that goes the straight way


class Connection:
    """RESP2 over a blocking socket. Invariant: replies are read in the order of what was sent, by one thread."""

    def __init__(self, place: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(str(place))
        self._reader = self._socket.makefile("rb", buffering=1 << 20)

    def ask(self, *words: Frame) -> Reply:
        """Send a command and give its reply. Raises RuntimeError when Redis answers with an error."""
        self.send([words])
        return self.reply()

    def send(self, commands: Iterable[Sequence[Frame]]) -> None:
        """Send commands, whose replies are to be read; large words are not copied."""
        small = bytearray()
        for words in commands:
            small += b"*%d\r\n" % len(words)
            for word in words:
                small += b"$%d\r\n" % memoryview(word).nbytes
                if memoryview(word).nbytes > LARGE:
                    self._socket.sendall(small)
                    self._socket.sendall(word)
                    small.clear()
                else:
                    small += word
                small += b"\r\n"
        self._socket.sendall(small)

    def reply(self) -> Reply:
        line = self._reader.readline()[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"-" or not kind:
            raise RuntimeError(f"redis-server answered: {rest.decode() or 'nothing'}")
        if kind == b"$":
            return None if rest == b"-1" else self._reader.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [self.reply() for _ in range(int(rest))]
        return int(rest) if kind == b":" else rest

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


@contextmanager
def server(binary: Path, folder: Path, fsync: str) -> Iterator[Path]:
    """A redis-server whose append-only file is in `folder`, synced as `fsync` says; its socket."""
    place = folder.absolute() / "socket"
    settings = {
        "port": "0", "unixsocket": str(place), "dir": str(folder), "save": "", "appendonly": "yes",
        "appendfsync": fsync, "auto-aof-rewrite-percentage": "0",
    }  # fmt: skip
    words = itertools.chain.from_iterable((f"--{name}", value) for name, value in settings.items())
    process = subprocess.Popen([str(binary), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = list(itertools.takewhile(lambda line: "eady to accept connections" not in line, process.stdout))
        if not place.exists():
            raise RuntimeError(f"{binary} did not start: {''.join(said)}")
        yield place
    finally:
        process.terminate()
        process.communicate(timeout=60)


def version(binary: Path) -> str:
    """Such as 'Redis server v=7.0.15'."""
    said = subprocess.run([str(binary), "--version"], check=True, capture_output=True, text=True).stdout
    return " ".join(said.split()[:3])


@contextmanager
def connected(place: Path, count: int) -> Iterator[list[Connection]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Connection(place))) for _ in range(count)]


def payloads(place: Path, steps: Sequence[Sequence[Group]]) -> float:
    """Seconds for groups in, durable as far as `appendfsync` makes them, out again, decoded and acknowledged."""
    took = 0.0
    with connected(place, WRITERS) as writers, ThreadPoolExecutor(WRITERS) as threads:
        writers[0].ask(b"XGROUP", b"CREATE", STREAM, READERS, b"0", b"MKSTREAM")
        for groups in steps:
            began = time.perf_counter()
            list(threads.map(_put, writers, (groups[n::WRITERS] for n in range(WRITERS))))
            ids = _take(writers[0], len(groups))
            took += time.perf_counter() - began
            writers[0].ask(b"XDEL", STREAM, *ids)
    return took


def _put(writer: Connection, groups: Sequence[Group]) -> None:
    for group in groups:
        words = itertools.chain.from_iterable((b"%d" % n, frame) for n, frame in enumerate(encode(group)))
        writer.ask(b"XADD", STREAM, b"*", *words)


def _take(reader: Connection, count: int) -> list[bytes]:
    """Ids of so many entries, each of which was decoded."""
    command = (b"XREADGROUP", b"GROUP", READERS, b"one", b"COUNT", b"%d" % count, b"STREAMS", STREAM, b">")
    ((_, entries),) = reader.ask(*command)
    for _, words in entries:
        decode(words[1::2], Group)
    ids = [entry for entry, _ in entries]
    if reader.ask(b"XACK", STREAM, READERS, *ids) != count:
        raise RuntimeError(f"redis-server gave and acknowledged other than {count} groups")
    return ids


def events(place: Path, groups: int, at_once: int) -> float:
    """Seconds for the events of so many groups, `at_once` groups in a pipeline."""
    with connected(place, 1) as (one,):
        began = time.perf_counter()
        for first in range(0, groups, at_once):
            happened = list(itertools.product(range(first, min(first + at_once, groups)), EVENTS))
            one.send(
                (b"XADD", b"events", b"*", b"kind", kind, b"group", b"%d" % group, b"attempt", b"1")
                for group, kind in happened
            )
            for _ in happened:
                one.reply()
        return time.perf_counter() - began


def find() -> Path | None:
    """The redis-server of this machine, or what CONTRAFLOW_REDIS names."""
    places = [os.environ.get("CONTRAFLOW_REDIS", ""), *(f"{p}/redis-server" for p in os.get_exec_path())]
    return next((Path(place) for place in places if place and Path(place).is_file()), None)
