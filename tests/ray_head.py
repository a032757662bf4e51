"""A real head of Ray on this machine, for tests: with a token, killed when the tests are done."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

TOKEN = "a-token-of-these-tests-alone-0123456789"
START_S = 120.0
WITHOUT = "Ray is not installed; `make test-ray` has an environment with it"

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason=WITHOUT)


class Head:
    """`ray start` in a session of its own, so that all its processes can be killed: a head, or one more machine.

    Machines of these tests are all this one; to Ray they are different ones, each with its own raylet.
    """

    def __init__(self, *, join: "Head | None" = None, cpus: int = 8, resources: str = "{}") -> None:
        """`join`: the head that the machine belongs to. `resources` as `ray start` wants them."""
        self.port = join.port if join else _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: sockets lie below it
        self._log = (self._folder / "head.log").open("w", encoding="utf-8")
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
        command += [f"--num-cpus={cpus}", f"--resources={resources}", f"--object-store-memory={80 << 20}"]
        command += [f"--temp-dir={self._folder}", "--disable-usage-stats"]
        if join:
            command += [f"--address={join.address}"]
        else:
            command += ["--head", f"--port={self.port}", "--include-dashboard=false"]
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        environment |= {"RAY_raylet_start_wait_time_s": str(int(START_S))}
        environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )

    def until_ready(self) -> "Head":
        deadline = time.monotonic() + START_S
        while "runtime started" not in self.said():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no head of Ray: {self.said()}")
            time.sleep(0.1)
        return self

    def point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have runs of this process join it."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    @property
    def environment(self) -> dict[str, str]:
        """What a process that is to join it has."""
        return {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}

    def said(self) -> str:
        return (self._folder / "head.log").read_text(encoding="utf-8")

    def members(self, name: str = "") -> list[int]:
        """Its processes, or those whose program is `name`."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    program = (entry / "cmdline").read_bytes().partition(b"\0")[0].decode()
                    ours = os.getsid(int(entry.name)) == self.process.pid or str(self._folder) in program
                except (ProcessLookupError, FileNotFoundError):
                    continue
                if ours and program.endswith(name):
                    found.append(int(entry.name))
        return found

    def kill(self, name: str) -> None:
        """Kill one of its programs, such as `gcs_server`."""
        (process,) = self.members(name)
        os.kill(process, signal.SIGKILL)

    def close(self) -> None:
        for process in self.members():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
