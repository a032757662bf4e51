"""A chat-completions endpoint on a free port of this host, which answers as a script says: well, badly, slowly."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[["JudgeTwin", BaseHTTPRequestHandler, str], None]  # is given the question, and writes the answer


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what some scripts are for."""


class JudgeTwin:
    """`questions`, `headers` and `paths` are what was asked, in order; `most` how many were open at once."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.questions: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.bodies: list[Any] = []
        self.open = self.most = 0
        self.released = threading.Event()
        self._lock = threading.Lock()
        twin = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                question = body["messages"][0]["content"]
                with twin._lock:
                    twin.paths.append(self.path)
                    twin.headers.append(dict(self.headers))
                    twin.bodies.append(body)
                    twin.questions.append(question)
                    twin.open += 1
                    twin.most = max(twin.most, twin.open)
                try:
                    twin.script(twin, self, question)
                finally:
                    with twin._lock:
                        twin.open -= 1

            def log_message(self, *words: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


def say(handler: BaseHTTPRequestHandler, text: Any, *, status: int = 200, headers: Any = (), raw: bytes = b"") -> None:
    """Answer with a chat completion of `text`, or with `raw` in its place."""
    data = raw or json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
    handler.send_response(status)
    for name, value in headers:
        handler.send_header(name, value)
    if "Content-Length" not in dict(headers):
        handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
