"""The process of a worker on a cluster: it opens a sealed socket on its machine, then is a worker to its end.

What a cluster starts, and all that the cluster ever calls. No call or payload of a worker comes this way.
"""

import os
import socket
import tempfile

import msgspec
import zmq

from contraflow.runtime.channel import FLUSH_MS, new_socket
from contraflow.runtime.process import Setup, live
from contraflow.runtime.seal import Guard, listen, new_key


class Door(msgspec.Struct, frozen=True):
    """How the process is reached: its sealed endpoint, its id, a private folder for files, a free port for a gang."""

    endpoint: str
    pid: int
    folder: str
    port: int


class Actor:
    """`open`, then `live`, each once and in the process's main thread."""

    def open(self, host: str, callers: bytes, folder: str) -> Door:
        """Listen on `host` to whoever has the key pair of `callers`. Without a `folder`, one is made."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = Guard(self._context, callers)
        self._socket = new_socket(self._context, zmq.ROUTER)
        endpoint = listen(self._socket, host, new_key())
        return Door(endpoint, os.getpid(), folder or tempfile.mkdtemp(prefix="contraflow-"), _free_port(host))

    def live(self, setup: Setup, keeper: int) -> None:
        """Be a worker until told to stop, or until process `keeper` is gone; 0: the one that started this process."""
        live(setup, self._context, self._socket, keeper=os.pidfd_open(keeper or os.getppid()))
        self._guard.close()
        self._context.destroy(linger=FLUSH_MS)


def _free_port(host: str) -> int:
    """A port that nobody has now. Somebody may take it before it is used; a gang then fails to meet, and says so."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port: int = server.getsockname()[1]
        return port
