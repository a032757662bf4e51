"""The memory carrier on its own: locks, room, and what happens around it in other processes."""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from contraflow.errors import CarrierError
from contraflow.types import Manifest, Probe, Version
from contraflow.weights.carrier import derive_run_id
from contraflow.weights.fetch import fetch
from contraflow.weights.manifest import encode_manifest
from contraflow.weights.memory import MemoryCarrier, shared_folder
from contraflow.weights.publish import publish
from tests.processes import forking

WAIT_S = 60.0


@pytest.fixture
def run_id(tmp_path: Path) -> str:
    return derive_run_id(tmp_path)


@pytest.fixture
def root(run_id: str) -> Iterator[Path]:
    """A corner of shared memory for this test: runs that begin elsewhere remove what killed publishers left."""
    root = shared_folder() / f"test-{run_id}"
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def carrier(root: Path, run_id: str) -> Iterator[MemoryCarrier]:
    carrier = MemoryCarrier(root, run_id)
    carrier.claim()
    yield carrier
    carrier.close()


def send(carrier: MemoryCarrier, n: int = 0) -> Manifest:
    return publish(
        {"w": torch.arange(1000.0)},
        version=Version(1, n),
        parent=None,
        model="m",
        probe=Probe((np.array([1, 2], np.int32),), (np.array([0.1], np.float32),), 1e-3),
        carrier=carrier,
        chunk_bytes=512,
    )


def test_only_this_user_can_enter(carrier: MemoryCarrier) -> None:
    path = Path(send(carrier).location)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_publisher_of_a_run_is_refused_while_the_first_lives(
    carrier: MemoryCarrier, root: Path, run_id: str
) -> None:
    manifest = send(carrier)
    second = MemoryCarrier(root, run_id)
    with pytest.raises(CarrierError, match="belongs to a publisher that is alive"):
        second.claim()
    second.close()
    assert torch.equal(fetch(manifest, second).tensors["w"], torch.arange(1000.0))
    carrier.close()
    second.claim()
    assert second.versions() == []
    second.close()


def test_a_folder_of_somebody_else_or_none_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "contraflow-file").write_text("in the way")
    with pytest.raises(CarrierError, match=r"cannot use .*contraflow-file"):
        MemoryCarrier(tmp_path, "file").claim()
    theirs = tmp_path / "contraflow-theirs"
    theirs.mkdir()
    if os.geteuid() == 0:  # only root can make a folder somebody else's
        os.chown(theirs, 12345, 12345)
        with pytest.raises(CarrierError, match="another user"):
            MemoryCarrier(tmp_path, "theirs").claim()


def test_claiming_twice_is_one_claim(carrier: MemoryCarrier) -> None:
    manifest = send(carrier)
    carrier.claim()
    assert carrier.versions() == [manifest.version]


def test_a_version_without_room_is_refused_at_once_and_leaves_nothing(carrier: MemoryCarrier) -> None:
    with pytest.raises(CarrierError, match=r"no room for 1125899906842624 bytes .* --shm-size"):
        carrier.create(Version(1, 0), 1 << 50, 1 << 49)
    carrier.create(Version(1, 0), 64, 64).discard()


def test_a_sound_manifest_cannot_make_a_reader_touch_another_file(carrier: MemoryCarrier, tmp_path: Path) -> None:
    manifest = send(carrier)
    (tmp_path / "secret").write_bytes(b"x" * 4096)
    elsewhere = type(manifest)(
        **{name: getattr(manifest, name) for name in manifest.__struct_fields__ if name != "location"},
        location=str(tmp_path / "secret"),
    )
    with pytest.raises(CarrierError, match="of another run"):
        fetch(elsewhere, carrier)


def test_closing_after_somebody_emptied_shared_memory_is_no_error(carrier: MemoryCarrier) -> None:
    folder = Path(send(carrier).location).parent
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    carrier.close()


def _hold(root: Path, run_id: str, answers: Connection) -> None:
    carrier = MemoryCarrier(root, run_id)
    carrier.claim()
    answers.send(send(carrier))
    signal.pause()


def test_a_killed_publisher_gives_up_its_lock_and_a_reader_keeps_its_map(root: Path, run_id: str) -> None:
    answers, given = forking().Pipe()
    process = forking().Process(target=_hold, args=(root, run_id, given))
    process.start()
    assert answers.poll(WAIT_S)
    manifest = answers.recv()
    successor = MemoryCarrier(root, run_id)
    with pytest.raises(CarrierError, match="alive"):
        successor.claim()
    fetched = fetch(manifest, successor)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)
    successor.claim()
    assert not Path(manifest.location).exists()
    assert torch.equal(fetched.tensors["w"], torch.arange(1000.0))
    successor.close()


READER = """
import sys
from pathlib import Path
from contraflow.weights.fetch import fetch
from contraflow.weights.manifest import decode_manifest
from contraflow.weights.memory import MemoryCarrier
manifest = decode_manifest(Path(sys.argv[2]).read_bytes(), "argument")
tensors = fetch(manifest, MemoryCarrier(Path(sys.argv[3]), sys.argv[1])).tensors
print(tensors["w"].sum().item())
"""


def test_a_reader_that_ends_unlinks_nothing_and_warns_of_nothing(
    carrier: MemoryCarrier, root: Path, run_id: str, tmp_path: Path
) -> None:
    manifest = send(carrier)
    (tmp_path / "manifest").write_bytes(encode_manifest(manifest))
    command = [sys.executable, "-W", "error", "-c", READER, run_id, str(tmp_path / "manifest"), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "499500.0", "")
    assert torch.equal(fetch(manifest, carrier).tensors["w"], torch.arange(1000.0))


def test_a_run_that_begins_removes_what_killed_runs_left_and_nothing_else(root: Path, carrier: MemoryCarrier) -> None:
    manifest = send(carrier)
    dead = root / "contraflow-dead"
    dead.mkdir()
    (dead / "1.0.weights").write_bytes(b"x")
    (root / "contraflow-file").write_text("x")
    (root / "somebody").mkdir()
    other = MemoryCarrier(root, "other")
    other.claim()
    theirs = send(other)
    third = MemoryCarrier(root, "third")
    third.claim()
    assert sorted(path.name for path in root.iterdir()) == sorted(
        [carrier.folder.name, "contraflow-other", "contraflow-third", "contraflow-file", "somebody"]
    )
    assert torch.equal(fetch(manifest, carrier).tensors["w"], fetch(theirs, other).tensors["w"])
    other.close()
    third.close()


def test_a_folder_removed_while_it_is_being_locked_is_made_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "contraflow-run"
    folder.mkdir(parents=True)
    flock, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        """Between opening the folder and locking it, its last owner removes it."""
        if not removed:
            removed.append(folder.rmdir())
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    carrier = MemoryCarrier(root, "run")
    carrier.claim()
    assert removed
    assert torch.equal(fetch(send(carrier), MemoryCarrier(root, "run")).tensors["w"], torch.arange(1000.0))
    carrier.close()
