"""A metadata service as EC2's answers (IMDSv2), on a real socket: a token by PUT, without which every GET is 401."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
SOON = {"action": "terminate", "time": "2030-01-01T08:22:00Z"}


class Imds:
    """`answers` by path: a status and a body; every other path is 404. `slow_s` is how long each answer takes."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.third = threading.Event()  # the third time that it is asked for a notice of interruption
        self.tokens = 0
        self.valid: set[str] = set()
        self.slow_s = 0.0
        self.token_status = 200
        self.url = ""

    def say(self, path: str, body: Any, status: int = 200) -> None:
        self.answers[path] = status, body if isinstance(body, bytes) else json.dumps(body).encode()

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, bytes]:
        self.asked.append(f"{method} {path}")
        if self.asked.count(f"GET {ACTION}") >= 3:
            self.third.set()
        if method == "PUT":
            if path != "/latest/api/token" or not headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
                return 400, b""
            self.tokens += 1
            self.valid = {f"token-{self.tokens}"}
            return self.token_status, f"token-{self.tokens}".encode()
        if headers.get("X-aws-ec2-metadata-token") not in self.valid:
            return 401, b""
        return self.answers.get(path, (404, b"<html>not found</html>"))


@contextmanager
def imds() -> Iterator[Imds]:
    """One that answers until the end of the block."""
    service = Imds()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            time.sleep(service.slow_s)
            status, body = service.answer(self.command, self.path, self.headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = _answer

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield service
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
