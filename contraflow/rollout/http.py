"""A small HTTP/1.1 client for servers that generate: JSON there and back, and streams of server-sent events.

Takes an address (`http://host:port`, `https://...`, `unix:/path`), gives parsed answers; h11 does the protocol. Every
request has a connection of its own, so that ending one ends what the server does for it. Every answer has a deadline
and a largest size, each event of a stream its own. Follows no redirect, uses no proxy, lets no key into an error.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import h11

from contraflow.config.server import fault_of_url
from contraflow.errors import ConfigError, ServerError

_CHUNK = 1 << 16
_MAX_TEXT = 400  # characters of a server's own words that an error repeats
_MAX_BYTES = 64 << 20  # of one answer, or one line of a stream: a long sequence's experts fit, an endless one does not


class HttpClient:
    """One server. Holds no connection between calls, so it needs no closing and may be shared by tasks."""

    def __init__(self, url: str, *, key: str = "", deadline_s: float = 60.0) -> None:
        """`key` is sent as a bearer token. `deadline_s` bounds each answer as a whole, in a stream each event: bytes
        that only keep a connection alive buy no time. Raises: ConfigError."""
        self.url = url.rstrip("/")
        self._place = _Place.of(self.url)
        self._key = key
        self._deadline_s = deadline_s

    async def get(self, path: str, *, deadline_s: float | None = None) -> Any:
        """The JSON at `path`; None for an empty body. Raises: ServerError."""
        return await self._whole("GET", path, None, deadline_s)

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
    ) -> Any:
        """Send `body` as JSON (None: nothing); the JSON that comes back. Raises: ServerError."""
        return await self._whole("POST", f"{path}?{urlencode(query)}" if query else path, body, deadline_s)

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The JSON of each event that the answer to `body` streams, `[DONE]` left out.

        Leaving the loop early closes the connection. Raises: ServerError, also when the stream ends without `[DONE]`.
        """
        async with self._asked("POST", path, body, self._deadline_s) as link:
            rest = b""
            link.extend()
            async for data in link.data():
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MAX_BYTES:
                    raise ServerError(self.url, "malformed", f"{path} streams a line of over {_MAX_BYTES} bytes")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    text = line[5:].strip()
                    if text == b"[DONE]":
                        return
                    yield self._parsed(path, text)
                    link.extend()
            raise ServerError(self.url, "unreachable", f"{path} ended its stream before it was done")

    async def _whole(self, method: str, path: str, body: Any, deadline_s: float | None) -> Any:
        async with self._asked(method, path, body, deadline_s or self._deadline_s) as link:
            text = await link.rest(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ServerError(self.url, "malformed", f"{path} gave over {_MAX_BYTES} bytes")
        return self._parsed(path, text) if text.strip() else None

    @asynccontextmanager
    async def _asked(self, method: str, path: str, body: Any, deadline_s: float) -> AsyncIterator["_Link"]:
        """A link whose next bytes are the body of the answer, once its status says that there is one."""
        link: _Link | None = None
        try:
            link = await _Link.open(self._place, deadline_s)
            status = await link.ask(method, path, self._headers(body), b"" if body is None else _encoded(body))
            if status >= 300:
                said = (await link.rest(_MAX_TEXT)).decode(errors="replace")
                kind = "refused" if status < 500 else "unreachable" if status in (502, 503, 504) else "failed"
                raise ServerError(self.url, kind, self._clean(f"{method} {path} gave {status}: {said}"))
            yield link
        except TimeoutError:
            raise ServerError(self.url, "late", f"{method} {path}: no answer within {deadline_s:g} s") from None
        except (OSError, EOFError, UnicodeError, h11.RemoteProtocolError) as fault:  # a UnicodeError is a host's name
            raise ServerError(self.url, "unreachable", self._clean(f"{method} {path}: {fault or 'closed'}")) from None
        finally:
            if link is not None:
                link.close()

    def _headers(self, body: Any) -> list[tuple[str, str]]:
        headers = [("Host", self._place.name), ("Accept", "*/*"), ("Connection", "close")]
        if self._key:
            headers.append(("Authorization", f"Bearer {self._key}"))
        if body is not None:
            headers.append(("Content-Type", "application/json"))
        return headers

    def _parsed(self, path: str, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            said = self._clean(text.decode(errors="replace"))[:_MAX_TEXT]
            raise ServerError(self.url, "malformed", f"{path} gave no JSON: {said}") from None

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


@dataclass(frozen=True)
class _Place:
    """Where a server listens: a host and port, or the path of a socket."""

    name: str
    port: int = 0
    path: str = ""
    tls: bool = False

    @classmethod
    def of(cls, url: str) -> "_Place":
        if (fault := fault_of_url(url)) is not None:
            raise ConfigError(fault)
        if url.startswith("unix:/"):
            return cls("localhost", path=url.removeprefix("unix:"))
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(str(parts.hostname), parts.port or (443 if tls else 80), tls=tls)


class _Link:
    """One connection, for one exchange. What is not done `deadline_s` after `open` or `extend` raises TimeoutError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline_s: float) -> None:
        self._reader, self._writer, self._deadline_s = reader, writer, deadline_s
        self._protocol = h11.Connection(h11.CLIENT)
        self.extend()

    def extend(self) -> None:
        """Give the other side the whole deadline anew."""
        self._until = asyncio.get_running_loop().time() + self._deadline_s

    @classmethod
    async def open(cls, place: _Place, deadline_s: float) -> "_Link":
        async with asyncio.timeout(deadline_s):
            if place.path:
                reader, writer = await asyncio.open_unix_connection(place.path)
            else:
                context = ssl.create_default_context() if place.tls else None
                reader, writer = await asyncio.open_connection(place.name, place.port, ssl=context)
        return cls(reader, writer, deadline_s)

    async def ask(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> int:
        """Send a request; the status of the answer."""
        if body or method == "POST":
            headers = [*headers, ("Content-Length", str(len(body)))]
        request = h11.Request(method=method, target=path, headers=headers)
        for event in (request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage()):
            self._writer.write(self._protocol.send(event) or b"")
        async with asyncio.timeout_at(self._until):
            await self._writer.drain()
        while not isinstance(event := await self._next(), h11.Response):
            pass  # an informational answer comes before the one
        return int(event.status_code)

    async def data(self) -> AsyncIterator[bytes]:
        """The body, piece by piece."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def rest(self, most: int) -> bytes:
        """The first `most` bytes of the body."""
        found = bytearray()
        async for data in self.data():
            found += data
            if len(found) >= most:
                break
        return bytes(found[:most])

    def close(self) -> None:
        self._writer.close()  # what is left to send is nothing; nobody waits for the other side to agree

    async def _next(self) -> Any:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout_at(self._until):
                self._protocol.receive_data(await self._reader.read(_CHUNK))
        if isinstance(event, h11.ConnectionClosed):
            raise EOFError("the connection closed")
        return event


def _encoded(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
