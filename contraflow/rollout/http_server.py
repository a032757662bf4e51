"""A small HTTP/1.1 server: the other end of `http.py`, for twins of servers and for programs that play episodes.

Takes a handler that turns a parsed request into JSON, or into a stream of server-sent events; h11 does the protocol.
One request a connection, of a bounded size, in bounded time; one that is no JSON is refused. A client that hangs up
cancels what is done for it.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import h11

_MAX_BYTES = 256 << 20  # of one request, where nothing else is said
_READ_S = 60.0  # for a request to arrive whole


@dataclass(frozen=True)
class Ask:
    """A request. `body` is the parsed JSON, None if there was none; header names are in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Reply:
    """An answer: `body` as JSON; or `events`, each as JSON, then `[DONE]`."""

    status: int = 200
    body: Any = None
    events: AsyncGenerator[Any, None] | None = field(default=None, compare=False)


Tamper = Callable[[str, Any], Any]  # given a path, and what would be answered: what is answered


def as_it_is(path: str, answer: Any) -> Any:
    """The `Tamper` of an honest server."""
    return answer


class HttpServer:
    """Listens on one address while it is open. `tamper` alters answers, each event of a stream by itself."""

    def __init__(
        self, handle: Callable[[Ask], Awaitable[Reply]], tamper: Tamper = as_it_is, *, max_bytes: int = _MAX_BYTES
    ) -> None:
        self._handle, self.tamper, self._max_bytes = handle, tamper, max_bytes
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self, socket: Path | None = None) -> str:
        """Begin to listen, at a path or on a free port of this host; the address for `HttpClient`."""
        if socket is not None:
            self._server = await asyncio.start_unix_server(self._serve, socket)
            return f"unix:{socket}"
        return await self.listen("127.0.0.1", 0)

    async def listen(self, host: str, port: int) -> str:
        """Begin to listen on a port, 0 for a free one; the address for clients. Raises: OSError when it is taken."""
        self._server = await asyncio.start_server(self._serve, host, port)
        name, found = self._server.sockets[0].getsockname()[:2]
        return f"http://[{name}]:{found}" if ":" in name else f"http://{name}:{found}"

    async def close(self) -> None:
        """Stop listening and hang up on everybody, as a server does that dies."""
        if self._server is not None:
            self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            protocol = h11.Connection(h11.SERVER)
            async with asyncio.timeout(_READ_S):
                ask = await _read(protocol, reader, self._max_bytes)
            answering = asyncio.create_task(self._answer(protocol, ask, writer))
            gone = asyncio.create_task(reader.read(1))  # nothing more is due, so this ends when the client does
            try:
                await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for part in (answering, gone):
                    part.cancel()
                await asyncio.gather(answering, gone, return_exceptions=True)
            if not answering.cancelled():
                answering.result()  # what a handler raises is a fault of ours: asyncio logs it
        except (OSError, EOFError, TimeoutError, h11.RemoteProtocolError):
            pass  # whoever asked has gone, or spoke no HTTP: there is nobody to tell
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._serving.discard(task)
            writer.close()

    async def _answer(self, protocol: h11.Connection, ask: Ask | Reply, writer: asyncio.StreamWriter) -> None:
        reply, path = (ask, "") if isinstance(ask, Reply) else (await self._handle(ask), ask.path)
        kind = "application/json" if reply.events is None else "text/event-stream"
        head = h11.Response(
            status_code=reply.status, headers=[("Content-Type", kind), ("Connection", "close")], reason=b""
        )
        writer.write(protocol.send(head) or b"")
        if reply.events is None:
            body = self.tamper(path, reply.body)
            data = b"" if body is None else json.dumps(body).encode()
            writer.write(protocol.send(h11.Data(data=data)) or b"")
        else:
            async with aclosing(reply.events) as events:
                async for event in events:
                    said = json.dumps(self.tamper(path, event)).encode()
                    writer.write(protocol.send(h11.Data(data=b"data: " + said + b"\n\n")) or b"")
                    await writer.drain()
            writer.write(protocol.send(h11.Data(data=b"data: [DONE]\n\n")) or b"")
        writer.write(protocol.send(h11.EndOfMessage()) or b"")
        with suppress(OSError):  # a client that hangs up has what it wanted
            await writer.drain()


async def _read(protocol: h11.Connection, reader: asyncio.StreamReader, max_bytes: int) -> Ask | Reply:
    """A request, or why it is refused."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            protocol.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > max_bytes:
                return Reply(413, {"error": {"message": f"a request of over {max_bytes} bytes", "code": "too_large"}})
        elif isinstance(event, h11.EndOfMessage):
            break
        else:
            raise EOFError("the connection closed")
    assert head is not None, "an end comes after a beginning"
    headers = {name.decode().lower(): value.decode("latin-1") for name, value in head.headers}
    try:
        target = urlsplit(head.target.decode())
    except ValueError:
        return Reply(400, {"error": {"message": "the request's path is none", "code": "no_such_path"}})
    try:
        parsed = json.loads(body or b"null")
    except (ValueError, RecursionError):
        return Reply(400, {"error": {"message": "the body is no JSON", "code": "no_json"}})
    return Ask(head.method.decode(), target.path, dict(parse_qsl(target.query)), headers, parsed)
