"""Keeps one server's process: `python -m contraflow.rollout.keeper WORD...` starts it, and ends it with its own parent.

Takes a command line, and a pipe as standard input that the parent holds open: when that closes, however the parent
ended, the server and all that it started are stopped. Should the keeper itself be killed, Linux asks the server to end.
Gives the server's exit status. Needs only the standard library.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_S = 10.0  # a server that takes longer to end is killed


def main(words: list[str]) -> int:
    """Run `words` until they end or standard input does."""
    server = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_bind(),  # noqa: PLW1509 - no other thread runs yet
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which stops us in order
    for how in (signal.SIGTERM, signal.SIGHUP):  # they may reach the whole group that we are in, and not the server's
        signal.signal(how, lambda *_: threading.Thread(target=_stop, args=(server,), daemon=True).start())
    threading.Thread(target=_watch, args=(server,), daemon=True).start()
    status = server.wait()
    _end(server, signal.SIGKILL)  # what it started must not outlive it
    return status if status >= 0 else 128 - status


def _watch(server: "subprocess.Popen[bytes]") -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    _stop(server)


def _stop(server: "subprocess.Popen[bytes]") -> None:
    _end(server, signal.SIGTERM)
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        _end(server, signal.SIGKILL)


def _bind() -> Callable[[], None] | None:
    """What the server's process does before it becomes the server, to be told when this one is killed."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec as little as can be is done
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(server: "subprocess.Popen[bytes]", how: signal.Signals) -> None:
    try:
        os.killpg(server.pid, how)
    except ProcessLookupError:
        return  # all of it is gone already


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
