"""What root's tests cannot show: the same corpus as an ordinary user, by namespaces and by filters."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="an ordinary user's own tests show it")
def test_an_ordinary_user_is_held_as_well_by_namespaces_and_by_filters():
    with tempfile.TemporaryDirectory() as home:  # pytest's own folder is closed to other users
        corpus = ["-m", "pytest", "-q", "-rs", f"--basetemp={home}/t", "tests/rewards/test_escapes.py"]
        command = [sys.executable, "-m", "tests.rewards.laptop", home, sys.executable, *corpus]
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "cannot be had" not in done.stdout
