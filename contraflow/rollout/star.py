"""Small messages between the leader of some ranks and its followers, each wait with a deadline.

One TCP connection a follower; frames of `runtime.wire`, no pickle. A rank that is gone or silent is named. Tensors do
not travel here: tokens go by `dispatch`, weights by the process group.
"""

import secrets
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlparse

import msgspec
import torch
import torch.distributed as dist

from contraflow.errors import ChannelError, DeadlineExceeded, WorkerDied
from contraflow.runtime import wire

T = TypeVar("T")
LEADER = 0
_LENGTH = struct.Struct("<I")
_CARD_BYTES = 256  # of a `_Card` on the process group, padded


class _Card(msgspec.Struct, frozen=True):
    """Where the leader listens, and what followers show it, so that nobody else is taken for one."""

    host: str
    port: int
    key: bytes


class _Hello(msgspec.Struct, frozen=True):
    rank: int
    key: bytes


class Star:
    """This rank's connections: the leader has one to each follower, a follower has one to the leader.

    Belongs to one thread at a time; `close` may be called from any.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket], deadline_s: float) -> None:
        self.rank = rank
        self.deadline_s = deadline_s
        self._links = dict(links)
        for link in self._links.values():
            link.settimeout(deadline_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def others(self) -> tuple[int, ...]:
        """Ranks at the other ends, in order."""
        return tuple(self._links)

    def tell(self, rank: int, message: object) -> None:
        """Send a message. Raises WorkerDied when the rank is gone, DeadlineExceeded when it takes nothing."""
        data = msgspec.msgpack.encode(wire.encode(message))
        with self._watching(rank, "take a message"):
            self._links[rank].sendall(_LENGTH.pack(len(data)) + data)

    def hear(self, rank: int, kind: type[T] | Any, *, within_s: float | None = None) -> T:
        """The next message of a rank, which must be a `kind`. Raises as `tell` does, or ChannelError."""
        with self._watching(rank, "say anything", within_s):
            link = self._links[rank]
            (size,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
            data = _exactly(link, size)
        value: T = wire.decode(msgspec.msgpack.decode(data, type=list[memoryview]), kind)
        return value

    def close(self) -> None:
        """End all connections: whoever waits at another end is told at once. Safe to call twice."""
        for link in self._links.values():
            link.close()

    @contextmanager
    def _watching(self, rank: int, what: str, within_s: float | None = None) -> Iterator[None]:
        within_s = self.deadline_s if within_s is None else within_s
        try:
            if within_s != self._links[rank].gettimeout():
                self._links[rank].settimeout(within_s)
            yield
        except TimeoutError:
            raise DeadlineExceeded(f"rank {self.rank}", f"rank {rank} to {what}", within_s) from None
        except (OSError, EOFError) as fault:
            raise WorkerDied(f"rank {rank}", f"it ended ({fault})") from None


def open_star(
    group: dist.ProcessGroup, init_method: str, *, deadline_s: float, device: torch.device | str = "cpu"
) -> Star:
    """Connect rank 0 of `group` with all others. Collective over the group.

    The leader listens where `init_method` says it is: at the host of a `tcp://` one, else on this machine only.
    Raises DeadlineExceeded when a rank does not come.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    host = urlparse(init_method).hostname or "127.0.0.1"
    if rank == LEADER:
        with socket.create_server((host, 0)) as door:
            card = _Card(host, door.getsockname()[1], secrets.token_bytes(32))
            _share(card, group, device)
            return Star(rank, _welcome(door, card.key, world, deadline_s), deadline_s)
    card = _share(None, group, device)
    link = socket.create_connection((card.host, card.port), deadline_s)
    star = Star(rank, {LEADER: link}, deadline_s)
    star.tell(LEADER, _Hello(rank, card.key))
    return star


def _welcome(door: socket.socket, key: bytes, world: int, deadline_s: float) -> dict[int, socket.socket]:
    door.settimeout(deadline_s)
    links: dict[int, socket.socket] = {}
    while len(links) < world - 1:
        try:
            link, _ = door.accept()
        except TimeoutError:
            missing = min(set(range(1, world)) - links.keys())
            raise DeadlineExceeded("rank 0", f"rank {missing} to connect", deadline_s) from None
        try:
            hello: _Hello = Star(LEADER, {-1: link}, deadline_s).hear(-1, _Hello)
        except (WorkerDied, DeadlineExceeded, ChannelError, msgspec.MsgspecError):
            link.close()
            continue
        if secrets.compare_digest(hello.key, key):
            links[hello.rank] = link
        else:
            link.close()
    return dict(sorted(links.items()))


def _share(card: _Card | None, group: dist.ProcessGroup, device: torch.device | str) -> _Card:
    data = b"" if card is None else msgspec.msgpack.encode(card)
    padded = torch.frombuffer(bytearray((bytes([len(data)]) + data).ljust(_CARD_BYTES, b"\0")), dtype=torch.uint8)
    shared = padded.to(device)
    dist.broadcast(shared, group=group, group_src=LEADER)
    received = shared.cpu().numpy().tobytes()
    return msgspec.msgpack.decode(received[1 : 1 + received[0]], type=_Card)


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = link.recv_into(view)
        if not got:
            raise EOFError("its connection was closed")
        view = view[got:]
    return data
