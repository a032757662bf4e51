"""The channel by itself: server and caller in one process, over each transport."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime import channel
from contraflow.runtime.base import Address
from contraflow.runtime.channel import Caller, ChannelRef, Server, bind
from contraflow.runtime.service import Service
from contraflow.types import Float32


class Worker:
    def __init__(self) -> None:
        self.most = self.now = 0
        self.gate = asyncio.Event()

    async def add(self, a: int) -> int:
        return a + 1

    async def pass_gate(self, payload: Float32) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.gate.wait()
        finally:
            self.now -= 1
        return payload.nbytes


class Control:
    async def add(self, a: int) -> int:
        return a + 100


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[tuple[Worker, Server, Caller, Address]]:
    context = zmq.Context()
    worker, server = Worker(), Server(bind(context, endpoint))
    serving = asyncio.ensure_future(server.serve(worker=Service("w", worker), control=Service("w", Control())))
    caller = Caller(context, owner="test", identity="me", trouble=lambda address: "")
    try:
        async with asyncio.timeout(20):
            yield worker, server, caller, Address("w", endpoint)
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        caller.close()
        context.destroy(linger=0)


@pytest.fixture(params=["ipc", "tcp", "inproc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "tcp":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{free.getsockname()[1]}"
    return f"{request.param}://{tmp_path}/s"


def test_calls_are_answered_over_any_transport(endpoint: str) -> None:
    async def scene() -> None:
        async with connected(endpoint) as (worker, _, caller, address):
            ref = caller.connect(address)
            assert await ref.call(5, Worker.add, 1) == 2
            assert await ChannelRef(address, caller, control=True).call(5, Control.add, 1) == 101
            worker.gate.set()
            assert await ref.call(5, Worker.pass_gate, np.zeros(1 << 20, np.float32)) == 4 << 20

    asyncio.run(scene())


def test_outstanding_calls_and_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_CALLS", 8)
    monkeypatch.setattr(channel, "MAX_BYTES", 1 << 20)

    async def scene() -> None:
        async with connected(f"ipc://{tmp_path}/s") as (worker, _, caller, address):
            ref = caller.connect(address)
            for floats, most in ((1, 8), (100_000, 2)):
                worker.most = 0
                worker.gate.clear()
                payload = np.zeros(floats, np.float32)
                calls = [asyncio.ensure_future(ref.call(10, Worker.pass_gate, payload)) for _ in range(20)]
                await asyncio.sleep(0.2)
                worker.gate.set()
                await asyncio.gather(*calls)
                assert worker.most == most

    asyncio.run(scene())


def test_waiting_for_a_turn_counts_towards_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_CALLS", 1)

    async def scene() -> None:
        async with connected(f"ipc://{tmp_path}/s") as (worker, _, caller, address):
            ref = caller.connect(address)
            first = asyncio.ensure_future(ref.call(10, Worker.pass_gate, np.zeros(1, np.float32)))
            await asyncio.sleep(0.05)
            with pytest.raises(DeadlineExceeded, match=r"test waited 0\.05 s for w\.add"):
                await ref.call(0.05, Worker.add, 1)
            worker.gate.set()
            assert await first == 4
            assert await ref.call(5, Worker.add, 1) == 2

    asyncio.run(scene())


def test_cancelled_calls_give_their_allowance_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_CALLS", 2)

    async def scene() -> None:
        async with connected(f"ipc://{tmp_path}/s") as (worker, _, caller, address):
            ref = caller.connect(address)
            payload = np.zeros(1, np.float32)
            for pause in (0.0, 0.0, 0.01, 0.01):  # before and after the method's first step
                calls = [asyncio.ensure_future(ref.call(10, Worker.pass_gate, payload)) for _ in range(5)]
                await asyncio.sleep(pause)
                for call in calls:
                    call.cancel()
                await asyncio.wait(calls)
            assert await ref.call(5, Worker.add, 1) == 2
            assert worker.now == 0

    asyncio.run(scene())


def test_a_buried_endpoint_fails_calls_that_wait_that_queue_and_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_CALLS", 2)

    async def scene() -> None:
        async with connected(f"ipc://{tmp_path}/s") as (_, _, caller, address):
            ref = caller.connect(address)
            payload = np.zeros(1, np.float32)
            calls = [asyncio.ensure_future(ref.call(10, Worker.pass_gate, payload)) for _ in range(6)]
            await asyncio.sleep(0.05)
            caller.bury(address.endpoint, WorkerDied("w", "SIGSEGV"))
            outcomes: list[Any] = await asyncio.gather(*calls, ref.call(5, Worker.add, 1), return_exceptions=True)
            assert [str(o) for o in outcomes] == ["worker 'w' died: SIGSEGV"] * 7
            assert len({id(o) for o in outcomes}) == 7  # each raise has a traceback of its own

    asyncio.run(scene())


def test_a_forgotten_caller_s_methods_are_cancelled(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(f"ipc://{tmp_path}/s") as (worker, server, caller, address):
            call = asyncio.ensure_future(caller.connect(address).call(10, Worker.pass_gate, np.zeros(1, np.float32)))
            await asyncio.sleep(0.05)
            assert worker.now == 1
            server.forget("somebody else")
            await asyncio.sleep(0.05)
            assert worker.now == 1
            server.forget("me")
            with pytest.raises(Exception, match="CancelledError"):
                await call
            assert worker.now == 0

    asyncio.run(scene())


def test_an_endpoint_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with connected(f"ipc://{tmp_path}/s") as (_, _, caller, _):
            for endpoint in ("nowhere", "ipc://" + "x" * 200, ""):
                with pytest.raises(ChannelError, match="no channel to 'w'"):
                    await caller.connect(Address("w", endpoint)).call(1, Worker.add, 1)

    asyncio.run(scene())


def test_an_answer_that_is_no_answer_fails_every_call(tmp_path: Path) -> None:
    async def scene() -> None:
        context = zmq.Context()
        impostor = context.socket(zmq.ROUTER)
        impostor.bind(f"ipc://{tmp_path}/s")
        caller = Caller(context, owner="test", identity="me", trouble=lambda a: "")
        ref = caller.connect(Address("w", f"ipc://{tmp_path}/s"))
        calls = [asyncio.ensure_future(ref.call(10, Worker.add, i)) for i in range(3)]
        await asyncio.sleep(0.1)
        impostor.send_multipart([b"me", b"\xc1 nonsense"])
        for call in calls:
            with pytest.raises(WorkerDied, match="'w' died: its channel broke"):
                await call
        context.destroy(linger=0)

    asyncio.run(scene())


def test_a_request_that_is_no_request_ends_the_server_loudly(tmp_path: Path) -> None:
    async def scene() -> None:
        context = zmq.Context()
        server = Server(bind(context, f"ipc://{tmp_path}/s"))
        serving = asyncio.ensure_future(server.serve(worker=Service("w", Worker()), control=Service("w", Control())))
        stranger = context.socket(zmq.DEALER)
        stranger.connect(f"ipc://{tmp_path}/s")
        stranger.send(b"\xc1 nonsense")
        with pytest.raises(BaseExceptionGroup, match="unhandled errors"):
            await asyncio.wait_for(serving, 5)
        context.destroy(linger=0)

    asyncio.run(scene())


def test_a_late_answer_comes_with_what_is_known_of_the_trouble(tmp_path: Path) -> None:
    async def scene() -> None:
        context = zmq.Context()
        caller = Caller(context, owner="test", identity="me", trouble=lambda a: f"{a.worker} is asleep")
        with pytest.raises(DeadlineExceeded) as caught:
            await caller.connect(Address("w", f"ipc://{tmp_path}/nobody")).call(0.05, Worker.add, 1)
        assert caught.value.cause == "w.add (w is asleep)"
        caller.close()
        context.destroy(linger=0)

    asyncio.run(scene())
