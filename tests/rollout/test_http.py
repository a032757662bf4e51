"""The HTTP client against real sockets: our own server, and peers that speak badly."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contraflow.errors import ConfigError, ServerError
from contraflow.rollout.http import HttpClient
from contraflow.rollout.http_server import Ask, HttpServer, Reply

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), 30)

    asyncio.run(bounded())


async def echo(ask: Ask) -> Reply:
    return Reply(body={"path": ask.path, "query": ask.query, "body": ask.body, "method": ask.method})


async def served(handle: Callable[[Ask], Awaitable[Reply]]) -> tuple[HttpServer, str]:
    server = HttpServer(handle)
    return server, await server.open()


async def raw(data: bytes, *, hold: bool = False) -> tuple[asyncio.Server, str]:
    """A peer that answers anything with `data`, and then hangs up, or holds on."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        for start in range(0, len(data), 7):  # in pieces that fit nothing
            writer.write(data[start : start + 7])
            await writer.drain()
        if hold:
            await reader.read()
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, "http://{}:{}".format(*server.sockets[0].getsockname()[:2])


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON)
def test_json_comes_back_as_it_was_sent(tree: Any) -> None:
    async def body() -> None:
        server, url = await served(echo)
        said = await HttpClient(url).post("/a/b", [tree], query={"x": "1 & 2", "y": "é"})
        assert said == {"path": "/a/b", "query": {"x": "1 & 2", "y": "é"}, "body": [tree], "method": "POST"}
        await server.close()

    run(body)


def test_a_socket_in_a_folder_and_a_large_body_will_do(tmp_path: Path) -> None:
    async def body() -> None:
        server = HttpServer(echo)
        client = HttpClient(await server.open(tmp_path / "s"))
        large = ["x" * 3_000_000]
        assert (await client.post("/", large))["body"] == large
        assert (await client.get("/"))["body"] is None
        await server.close()

    run(body)


def test_events_come_one_by_one_and_leaving_early_ends_the_server_s_work() -> None:
    async def body() -> None:
        ended = asyncio.Event()

        async def count() -> AsyncGenerator[Any, None]:
            try:
                for number in range(1_000_000):
                    yield {"number": number}
                    await asyncio.sleep(0)
            finally:
                ended.set()

        async def handle(ask: Ask) -> Reply:
            return Reply(events=count())

        server, url = await served(handle)
        stream = HttpClient(url).stream("/", {})
        assert [(await anext(stream))["number"] for _ in range(5)] == [0, 1, 2, 3, 4]
        await stream.aclose()
        await asyncio.wait_for(ended.wait(), 5)
        await server.close()

    run(body)


def test_events_that_arrive_in_odd_pieces_are_put_together() -> None:
    async def body() -> None:
        events = [{"n": n, "text": "é" * n} for n in range(9)]
        lines = b"".join(b": a comment\r\ndata: " + json.dumps(e).encode() + b"\r\n\r\n" for e in events)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        server, url = await raw(head + lines + b"data: [DONE]\n\n")
        assert [event async for event in HttpClient(url).stream("/", {})] == events
        server.close()

    run(body)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "unreachable"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "unreachable"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}", "unreachable"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "malformed"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope", "refused"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n", "refused"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\noops", "failed"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "unreachable"),
    ],
)
def test_a_peer_that_speaks_badly_is_named_with_how(data: bytes, kind: str) -> None:
    async def body() -> None:
        server, url = await raw(data)
        with pytest.raises(ServerError) as caught:
            await HttpClient(url).post("/x", {})
        assert (caught.value.kind, caught.value.server) == (kind, url)
        server.close()

    run(body)


def test_a_stream_that_ends_before_it_is_done_is_an_error() -> None:
    async def body() -> None:
        server, url = await raw(b'HTTP/1.1 200 OK\r\n\r\ndata: {"n": 1}\n\n')
        stream = HttpClient(url).stream("/", {})
        assert await anext(stream) == {"n": 1}
        with pytest.raises(ServerError, match="before it was done"):
            await anext(stream)
        server.close()

    run(body)


def test_silence_is_bounded_before_an_answer_and_within_one() -> None:
    async def body() -> None:
        for data in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"):
            server, url = await raw(data, hold=True)
            with pytest.raises(ServerError, match=r"no answer within 0\.1 s") as caught:
                await HttpClient(url, deadline_s=0.1).get("/")
            assert caught.value.kind == "late"
            server.close()

    run(body)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X-More: 1\r\n" * 1000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 10_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b": still here\n\n" * 1000,
        b"HTTP/1.1 500 Oh\r\n\r\n" + b"x" * 10_000,
    ],
    ids=["head", "continue", "blanks", "comments", "error"],
)
def test_bytes_that_only_keep_a_connection_alive_buy_no_time(data: bytes) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        for start in range(0, len(data), 13):
            writer.write(data[start : start + 13])
            await asyncio.sleep(0.02)
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        client = HttpClient("http://{}:{}".format(*server.sockets[0].getsockname()[:2]), deadline_s=0.3)
        for asked in (client.get("/"), anext(client.stream("/", {}))):
            with pytest.raises(ServerError) as caught:
                await asyncio.wait_for(asked, 5)
            assert caught.value.kind == "late"
        server.close()

    run(body)


def test_a_stream_may_take_longer_than_its_deadline_as_long_as_events_come() -> None:
    async def count() -> AsyncGenerator[Any, None]:
        for number in range(8):
            yield number
            await asyncio.sleep(0.1)

    async def handle(ask: Ask) -> Reply:
        return Reply(events=count())

    async def body() -> None:
        server, url = await served(handle)
        assert [event async for event in HttpClient(url, deadline_s=0.4).stream("/", {})] == [*range(8)]
        await server.close()

    run(body)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'"' + b"x" * (65 << 20) + b'"'], ids=["deep", "endless"])
def test_an_answer_too_deep_or_too_long_to_read_is_malformed(text: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + text)
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        with pytest.raises(ServerError) as caught:
            await HttpClient("http://{}:{}".format(*server.sockets[0].getsockname()[:2])).get("/")
        assert (caught.value.kind, len(str(caught.value)) < 600) == ("malformed", True)
        server.close()

    run(body)


def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    async def body() -> None:
        for url in (f"unix:{tmp_path}/none", "http://127.0.0.1:1", f"http://{'a' * 64}:1"):
            with pytest.raises(ServerError) as caught:
                await HttpClient(url).get("/")
            assert caught.value.kind == "unreachable"

    run(body)


def test_a_key_goes_into_the_header_and_into_no_error() -> None:
    async def body() -> None:
        async def handle(ask: Ask) -> Reply:
            return Reply(403, {"you said": ask.headers["authorization"]})

        server, url = await served(handle)
        with pytest.raises(ServerError) as caught:
            await HttpClient(url, key="open-sesame").post("/", {})
        assert "Bearer ***" in str(caught.value)
        assert "sesame" not in str(caught.value)
        await server.close()

    run(body)


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "http://", "http://user:pw@host", "http://host/path", "host:80", "unix:rel", "unix:/a b"),
        *("http://host:eighty", "http://host:70000", "http://[::1", "http://h\0st", "unix:/a\0b"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write http://host:port"):
        HttpClient(url)
