"""Where a benchmark's numbers go: bench/results/NAME.json with command, machine and date; and their spread."""

import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write(name: str, rows: Sequence[dict[str, Any]], **facts: Any) -> Path:
    """Write `rows` and `facts` with what a reader needs to run it again."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    record = {"command": command(), **machine(), **facts, "rows": list(rows)}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def command() -> str:
    """The command line, as typed from the repository's root."""
    return " ".join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """What a number depends on beside the code."""
    import torch

    models = {line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {', '.join(models) or platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg(),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
