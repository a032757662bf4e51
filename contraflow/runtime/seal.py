"""Who may call over a network: CURVE keys of ZeroMQ, so that a stranger's bytes are dropped before anyone reads them.

Every call of a sealed channel is encrypted and authenticated both ways. Callers of a run share one key pair, and a
server lets in nobody else; a server has a pair of its own, whose public half is part of its endpoint, so that a caller
never talks to another one that got the same port later. See the ZeroMQ guide, chapter 5, and RFC 26/CurveZMQ.
"""

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from contraflow.errors import ChannelError

DOMAIN = "contraflow"  # of sockets that ask the guard


class Key(msgspec.Struct, frozen=True):
    """A CURVE key pair, both halves in Z85 (40 bytes)."""

    public: bytes
    secret: bytes


def new_key() -> Key:
    return Key(*zmq.curve_keypair())


class Guard:
    """Lets only callers with one public key into sealed sockets of a context; a thread of its own until closed."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", callers: bytes) -> None:
        self._callers = callers
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a caller with this key may in; asked by the thread for each connection."""
        return key == self._callers

    def close(self) -> None:
        self._thread.stop()


def listen(socket: "zmq.Socket[bytes]", host: str, key: Key) -> str:
    """Bind a sealed server to a free TCP port of `host`; gives its endpoint, `tcp://HOST:PORT#PUBLIC-KEY-IN-HEX`.

    The socket's context must have a `Guard`: without one nobody is let in.
    """
    socket.zap_domain = DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = key.public, key.secret
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a caller that connects again after its link broke is still that caller
    place = f"[{host}]" if ":" in host else host
    socket.setsockopt(zmq.IPV6, int(":" in host))
    port = socket.bind_to_random_port(f"tcp://{place}")
    return f"tcp://{place}:{port}#{z85.decode(key.public).hex()}"


def connect(socket: "zmq.Socket[bytes]", endpoint: str, key: Key | None) -> None:
    """Connect a caller to an endpoint, sealed if it names a server's key. Raises: ChannelError, zmq.ZMQError."""
    place, _, server = endpoint.partition("#")
    if bool(server) != bool(key):
        raise ChannelError(f"{endpoint!r} is {'sealed' if server else 'open'}, and calls from here are not")
    if key:
        try:
            socket.curve_serverkey = z85.encode(bytes.fromhex(server))
        except (ValueError, zmq.ZMQError) as fault:
            raise ChannelError(f"{endpoint!r} ends in no key of a server: {fault}") from None
        socket.curve_publickey, socket.curve_secretkey = key.public, key.secret
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.IPV6, int("[" in place))
    socket.connect(place)
