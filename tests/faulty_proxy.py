"""An HTTP proxy between a client and a real server that fails as networks and stores do, by a script.

One request a connection, on 127.0.0.1; runs on a thread of its own. Signed requests pass: nothing of them changes.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STALL_S = 0.3
BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code></Error>"
STATUS = {
    "throttle": (b"503 Slow Down", BUSY),
    "error": (b"500 Internal Server Error", b""),
    "deny": (b"403 Forbidden", DENIED),
}


@dataclass
class Fault:
    """What happens to the next `times` requests of `method` whose path holds `path`.

    `throttle`, `error`, `deny`: answered so, and not passed on. `reset`: the connection breaks before that; `upload`:
    in the middle of the request's body. `truncate`: in the middle of the answer's. `lost`: after the server did it,
    before a word of the answer. `stall`: passed on after `STALL_S`.
    """

    kind: str
    method: str
    path: str
    times: int = 1
    met: int = 0


@dataclass
class Proxy:
    """Invariant: what no fault says otherwise passes unchanged, at most `bytes_per_s` of bodies both ways together."""

    upstream: int
    bytes_per_s: float = float("inf")
    faults: list[Fault] = field(default_factory=list)
    port: int = 0
    seen: list[str] = field(default_factory=list)  # first lines of requests
    free_at: float = 0.0  # when the line has carried what it was given

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # either side went away, which is what this is about
        finally:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.partition(b"\r\n")[0].decode()
        self.seen.append(line)
        fault = self._fault(*line.split(" ")[:2])
        if fault == "stall":
            await asyncio.sleep(STALL_S)
        length = _length(head)
        if fault == "reset":
            return
        if fault == "upload":
            await reader.readexactly(length // 2)
            return
        body = await reader.readexactly(length)
        await self._pace(length)
        if fault in STATUS:
            await _answer(writer, *STATUS[fault])
            return
        there, here = await asyncio.open_connection("127.0.0.1", self.upstream)
        here.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
        await here.drain()
        answer = await there.readuntil(b"\r\n\r\n")
        rest = await there.read()
        here.close()
        if fault == "lost":
            return
        await self._pace(len(rest))
        writer.write(answer)
        writer.write(rest[: len(rest) // 2] if fault == "truncate" else rest)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _fault(self, method: str, path: str) -> str:
        for fault in self.faults:
            if fault.met < fault.times and fault.method == method and fault.path in path:
                fault.met += 1
                return fault.kind
        return ""

    async def _pace(self, count: int) -> None:
        """The line carries one body after the other."""
        loop = asyncio.get_running_loop()
        self.free_at = max(self.free_at, loop.time()) + count / self.bytes_per_s
        await asyncio.sleep(self.free_at - loop.time())


@contextmanager
def running(proxy: Proxy) -> Iterator[Proxy]:
    """The proxy on a free port, which it names."""
    ready, ended = threading.Event(), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
        proxy.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()

    def run() -> None:
        loop.run_until_complete(main())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        assert ended.wait(10)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _answer(writer: asyncio.StreamWriter, status: bytes, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(body), body))
    await writer.drain()
    writer.close()
    await writer.wait_closed()
