"""Messages between the leader and its followers arrive whole, and who is gone or silent is named."""

import socket
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.rollout.orders import Beat, Broken, Order, Reply, Said, Step, Submit, hear
from contraflow.rollout.star import Star, _Hello, _welcome
from contraflow.types import Request


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        return near, door.accept()[0]


@pytest.fixture
def ends() -> Iterator[tuple[Star, Star]]:
    near, far = connected()
    leader, follower = Star(0, {1: near}, 0.3), Star(1, {0: far}, 0.3)
    yield leader, follower
    leader.close()
    follower.close()


def test_orders_arrive_with_their_arrays_however_long(ends: tuple[Star, Star]) -> None:
    leader, follower = ends
    for length in (0, 3, 100_000):
        prompt = np.arange(length, dtype=np.int32)
        asked = Request(id="a", prompt=prompt, seed=1 << 60, max_new_tokens=3, stop_tokens=(1, 2))
        sending = threading.Thread(target=leader.tell, args=(1, Step((Submit(7, asked),))))
        sending.start()
        step = follower.hear(0, Order)
        sending.join()
        assert isinstance(step, Step)
        (order,) = step.orders
        assert isinstance(order, Submit)
        assert order.number == 7
        assert msgspec.structs.replace(order.request, prompt=prompt) == msgspec.structs.replace(asked, prompt=prompt)
        np.testing.assert_array_equal(order.request.prompt, prompt)


def test_a_silent_rank_is_named_with_the_time_it_had(ends: tuple[Star, Star]) -> None:
    leader, follower = ends
    with pytest.raises(DeadlineExceeded, match=r"rank 0 waited 0.3 s for rank 1 to say anything"):
        hear(leader, 1, Reply)
    with pytest.raises(DeadlineExceeded, match=r"rank 1 waited 0.05 s for rank 0 to say anything"):
        follower.hear(0, Order, within_s=0.05)


def test_a_rank_that_takes_nothing_is_named(ends: tuple[Star, Star]) -> None:
    leader, _ = ends
    with pytest.raises(DeadlineExceeded, match="rank 1 to take a message"):
        leader.tell(1, Broken("x" * 100_000_000))


def test_a_rank_that_is_gone_is_named_at_once(ends: tuple[Star, Star]) -> None:
    leader, follower = ends
    follower.tell(0, Beat())
    follower.close()
    assert isinstance(hear(leader, 1, Beat), Beat)  # what it said before still counts
    with pytest.raises(WorkerDied, match="'rank 1' died: it ended"):
        hear(leader, 1, Beat)


def test_last_words_and_words_out_of_turn_are_errors(ends: tuple[Star, Star]) -> None:
    leader, follower = ends
    follower.tell(0, Broken("ValueError: no"))
    with pytest.raises(WorkerDied, match="'rank 1' died: it failed: ValueError: no"):
        hear(leader, 1, Reply)
    follower.tell(0, Beat())
    with pytest.raises(ChannelError, match="rank 1 said Beat where Reply was due"):
        hear(leader, 1, Reply)
    leader.tell(1, "nonsense")
    with pytest.raises(ChannelError):
        follower.hear(0, Said)


def test_strangers_at_the_door_are_sent_away_and_whoever_does_not_come_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:

        def come(hello: _Hello | str) -> socket.socket:
            link = socket.create_connection(door.getsockname())
            Star(-1, {0: link}, 5.0).tell(0, hello)
            return link

        links = [come(hello) for hello in ("hi", _Hello(1, b"wrong"), _Hello(2, b"right"), _Hello(1, b"right"))]
        found = _welcome(door, b"right", 3, 5.0)
        assert list(found) == [1, 2]
        assert [found[rank].getpeername() for rank in (1, 2)] == [links[i].getsockname() for i in (3, 2)]
        with pytest.raises(DeadlineExceeded, match="rank 1 to connect"):
            _welcome(door, b"right", 2, 0.2)
        for link in (*links, *found.values()):
            link.close()
