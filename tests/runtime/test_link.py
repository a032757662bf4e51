"""No message is left lying in a socket, however sends and receives fall together."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from contraflow.runtime.link import Link

Scene = Callable[["zmq.Socket[bytes]", "zmq.Socket[bytes]"], Awaitable[None]]


def play(scene: Scene, folder: Path) -> None:
    async def whole() -> None:
        context = zmq.Context()
        left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket in (left, right):
            socket.set_hwm(0)
        left.bind(f"ipc://{folder}/s")
        right.connect(f"ipc://{folder}/s")  # so that it always has a place for what it sends
        try:
            async with asyncio.timeout(30):
                await scene(left, right)
        finally:
            context.destroy(linger=0)

    asyncio.run(whole())


@pytest.mark.parametrize("seed", range(4))
def test_floods_in_both_directions_arrive_whole_and_in_order(tmp_path: Path, seed: int) -> None:
    count, draw = 3000, random.Random(seed)

    async def scene(left: "zmq.Socket[bytes]", right: "zmq.Socket[bytes]") -> None:
        links = [Link(left), Link(right)]
        got: list[list[int]] = [[], []]
        full = [asyncio.Event(), asyncio.Event()]
        met = asyncio.Event()  # before that, the side that bound has nowhere to put a message
        for side, link in enumerate(links):

            def receive(message: list[zmq.Frame], side: int = side) -> None:
                met.set()
                got[side].append(int(message[0].bytes))
                if len(got[side]) == count:
                    full[side].set()

            link.open(receive)

        async def flood(link: Link) -> None:
            if link is links[0]:
                await met.wait()
            for i in range(count):
                link.send([str(i).encode(), bytes(draw.choice([0, 10, 20_000]))])
                if draw.random() < 0.3:
                    await asyncio.sleep(draw.choice([0, 0, 0.001]))

        await asyncio.gather(*map(flood, links))
        await asyncio.gather(*[event.wait() for event in full])
        assert got == [list(range(count))] * 2
        for link in links:
            link.close(0)

    play(scene, tmp_path)


def test_what_came_before_it_was_opened_is_received(tmp_path: Path) -> None:
    async def scene(left: "zmq.Socket[bytes]", right: "zmq.Socket[bytes]") -> None:
        link, sender = Link(left), Link(right)
        sender.send([b"early"])
        await asyncio.sleep(0.1)
        got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        link.open(lambda message: got.set_result(message[0].bytes))
        assert await got == b"early"
        link.close(0)

    play(scene, tmp_path)


def test_a_message_that_cannot_be_taken_breaks_the_link_with_its_reason(tmp_path: Path) -> None:
    async def scene(left: "zmq.Socket[bytes]", right: "zmq.Socket[bytes]") -> None:
        link, sender = Link(left), Link(right)

        def refuse(message: list[zmq.Frame]) -> None:
            raise ValueError(message[0].bytes)

        link.open(refuse)
        sender.send([b"nonsense"])
        with pytest.raises(ValueError, match="nonsense"):
            await link.broken
        link.close(0)

    play(scene, tmp_path)


def test_closing_twice_and_sending_after_do_nothing(tmp_path: Path) -> None:
    async def scene(left: "zmq.Socket[bytes]", _: "zmq.Socket[bytes]") -> None:
        link = Link(left)
        link.open(lambda message: None)
        link.close(0)
        link.close(0)
        link.send([b"late"])

    play(scene, tmp_path)
