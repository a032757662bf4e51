"""A C source made into a library that this process calls, by the machine's own compiler and for its processor.

Takes a source file and compilers to look for; gives the library or, for people, why there is none. Knows no kernel.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: it would lose what is no number, and set how all of the process treats denormals.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared")
DEADLINE_S = 60.0


def build_library(
    source: Path, compilers: Sequence[str] = COMPILERS, *, flags: Sequence[str] = ()
) -> ctypes.CDLL | str:
    """The library of `source`, by the first of `compilers` that there is; or why there is none. Takes a second."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        return f"no C compiler: none of {', '.join(compilers)} is on the PATH"
    with tempfile.TemporaryDirectory(prefix="contraflow-") as folder:
        target = Path(folder, "kernels.so")
        command = [compiler, *FLAGS, *flags, "-o", str(target), str(source), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
            if done.returncode:
                return f"{compiler} gave {done.returncode}: {done.stderr.strip()[:200] or 'and said nothing'}"
            return ctypes.CDLL(str(target))  # what is mapped outlives its file
        except (OSError, subprocess.TimeoutExpired) as fault:
            return f"{compiler} gave no library: {fault}"
