"""A ZeroMQ socket on the event loop: messages go out at once, and come in by callback.

Takes a socket without high-water marks, so that a send never has to wait. pyzmq's own asyncio sockets serve every kind
of socket; this does the one thing the channel needs, in half the time of a round trip.
"""

import asyncio
from collections.abc import Callable, Sequence

import zmq

from contraflow.runtime.wire import Frame

_IN = int(zmq.POLLIN)


class Link:
    """One socket that always has a place for what it sends: a DEALER that connects, a ROUTER.

    Invariant: while open, the socket is looked at again after every send and receive.

    Its file descriptor tells of changes only, and any use of the socket may swallow one. `broken` ends, with the
    reason, when a message could not be taken.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._receive: Callable[[list[zmq.Frame]], None] | None = None
        self._looking = False
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def open(self, receive: Callable[[list[zmq.Frame]], None]) -> None:
        """Hand every message to `receive` from now on."""
        self._receive = receive
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._look)
        self._look_soon()

    def send(self, frames: Sequence[Frame]) -> None:
        """Send a message, unless closed. Where there is no place for it the far side refused the connection's key."""
        if self._socket.closed:
            return
        try:
            # Copied: an array may change once a call is given up or a method returned, while ZeroMQ still sends it.
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        except zmq.Again as refusal:
            self._break(refusal)
        self._look_soon()

    def close(self, linger_ms: int) -> None:
        """Stop receiving; what was sent gets `linger_ms` to go out."""
        if self._receive and not self._socket.closed:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close(linger=linger_ms)

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        try:
            while self._receive and not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & _IN:
                self._receive(self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False))
        except Exception as error:  # noqa: BLE001 - whoever owns the link decides
            self._break(error)

    def _break(self, error: Exception) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)
