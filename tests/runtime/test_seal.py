"""Sealed channels: whoever lacks the key is neither heard nor answered, and nobody answers in another's place."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime.base import Address
from contraflow.runtime.channel import Caller, Server, new_socket
from contraflow.runtime.seal import Guard, Key, listen, new_key
from contraflow.runtime.service import Service
from contraflow.types import Float32


class Worker:
    def __init__(self) -> None:
        self.calls = 0

    async def add(self, a: int) -> int:
        self.calls += 1
        return a + 1

    async def size(self, array: Float32) -> int:
        return array.nbytes


@asynccontextmanager
async def served(key: Key) -> AsyncIterator[tuple[Worker, Address, zmq.Context]]:  # type: ignore[type-arg]
    context = zmq.Context()
    guard, bound, worker = Guard(context, key.public), new_socket(context, zmq.ROUTER), Worker()
    address = Address("w", listen(bound, "127.0.0.1", new_key()))
    serving = asyncio.ensure_future(Server(bound).serve(worker=Service("w", worker), control=Service("w", Worker())))
    try:
        async with asyncio.timeout(20):
            yield worker, address, context
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        guard.close()
        context.destroy(linger=0)


def caller(context: "zmq.Context[zmq.Socket[bytes]]", key: Key | None) -> Caller:
    return Caller(context, owner="test", identity="me", trouble=lambda address: "", key=key)


def test_calls_with_the_key_are_answered_payloads_too() -> None:
    async def scene() -> None:
        key = new_key()
        async with served(key) as (_, address, context):
            mine = caller(context, key)
            assert await mine.connect(address).call(5, Worker.add, 1) == 2
            assert await mine.connect(address).call(10, Worker.size, np.zeros(1 << 20, np.float32)) == 4 << 20
            mine.close()

    asyncio.run(scene())


def test_what_goes_over_the_wire_does_not_show_what_is_in_it() -> None:
    """A relay between caller and server, as somebody on the network sees it."""

    async def scene() -> None:
        key, seen = new_key(), bytearray()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async with served(key) as (_, address, context):
            place, _, public = address.endpoint.partition("#")
            port = int(place.rpartition(":")[2])

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

            between = await asyncio.start_server(relay, "127.0.0.1", 0)
            near = between.sockets[0].getsockname()[1]
            mine = caller(context, key)
            through = mine.connect(Address("w", f"tcp://127.0.0.1:{near}#{public}"))
            assert await through.call(5, Worker.size, np.full(5, 1.25, np.float32)) == 20
            mine.close()
            between.close()
        assert len(seen) > 300
        assert b"size" not in seen
        assert np.full(5, 1.25, np.float32).tobytes() not in seen

    asyncio.run(scene())


@pytest.mark.parametrize("wrong", ["another key", "the server's key of an earlier worker"])
def test_a_stranger_is_not_answered_and_reaches_no_method(wrong: str) -> None:
    async def scene() -> None:
        key = new_key()
        async with served(key) as (worker, address, context):
            theirs, target = key, address
            if wrong == "another key":
                theirs = new_key()
            else:
                place = address.endpoint.partition("#")[0]
                target = Address("w", f"{place}#{'ab' * 32}")
            stranger = caller(context, theirs)
            with pytest.raises((DeadlineExceeded, WorkerDied)):
                await stranger.connect(target).call(1.0, Worker.add, 1)
            stranger.close()
            assert worker.calls == 0
            mine = caller(context, key)
            assert await mine.connect(address).call(5, Worker.add, 1) == 2
            mine.close()

    asyncio.run(scene())


def test_an_open_peer_and_plain_nonsense_are_dropped_and_the_server_goes_on() -> None:
    async def scene() -> None:
        key = new_key()
        async with served(key) as (worker, address, context):
            place = address.endpoint.partition("#")[0]
            plain = context.socket(zmq.DEALER)
            plain.connect(place)
            plain.send(b"\xc1 nonsense")
            with socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2]))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
                mine = caller(context, key)
                assert await mine.connect(address).call(5, Worker.add, 1) == 2
            assert worker.calls == 1
            mine.close()
            plain.close(linger=0)

    asyncio.run(scene())


def test_endpoints_that_do_not_fit_the_caller_are_refused_by_name() -> None:
    async def scene() -> None:
        context, key = zmq.Context(), new_key()
        for endpoint, whose, said in (
            ("tcp://127.0.0.1:9#" + "ab" * 32, None, "is sealed, and calls from here are not"),
            ("tcp://127.0.0.1:9", key, "is open, and calls from here are not"),
            ("tcp://127.0.0.1:9#notakey", key, "ends in no key of a server"),
        ):
            with pytest.raises(ChannelError, match=f"no channel to 'w' at .*{said}"):
                await caller(context, whose).connect(Address("w", endpoint)).call(1, Worker.add, 1)
        context.destroy(linger=0)

    asyncio.run(scene())
