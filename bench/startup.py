"""How long `contraflow --help` takes, as a process of its own, beside the bare interpreter.

python -m bench.startup [--times 15]
"""

import argparse
import subprocess
import sys
import time

from bench.record import spread, write

COMMANDS = {
    "contraflow --help": [sys.executable, "-c", "from contraflow.cli import main; main()", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=15)
    times = parser.parse_args().times
    rows = []
    for name, command in COMMANDS.items():
        seconds = [timed(command) for _ in range(times + 1)][1:]  # the first reads files from the disk
        rows.append({"what": name, "seconds": spread(seconds)})
        print(rows[-1])
    print("wrote", write("startup", rows, times=times))


def timed(command: list[str]) -> float:
    """Wall seconds of one process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
