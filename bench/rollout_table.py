"""Our rows of a rollout beside vLLM's, case by case: tokens a second and their ratio.

    python -m bench.rollout_table olmoe-1b-7b FOLDER

Reads rollout_gpu_SHAPE.json and vllm_SHAPE.json in FOLDER, prints a table, and keeps the peer's rows with ours in
bench/results. Batches with other lengths are not compared.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench.record import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    ours = json.loads((options.folder / f"rollout_gpu_{options.shape}.json").read_text(encoding="utf-8"))
    peer = options.folder / f"vllm_{options.shape}.json"
    if peer.exists():
        ours["peer"] = json.loads(peer.read_text(encoding="utf-8"))
        for place in (RESULTS, options.folder):
            file = place / f"rollout_gpu_{options.shape}.json"
            file.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
    show(options.shape, ours["rows"], ours.get("peer", {}))


def show(shape: str, rows: list[dict[str, Any]], peer: dict[str, Any]) -> None:
    """Print the table; a refreshed case stands beside the peer's plain one."""
    theirs = {row["case"]: row for row in peer.get("rows", [])}
    print(f"{shape:<34}{'ours tok/s':>12}{'step ms':>9}{peer.get('engine', 'no peer'):>14}{'ratio':>8}  note")
    for row in rows:
        other = theirs.get(row["case"].split(",")[0])
        if other is not None and other["lengths_sha256"] != row["lengths_sha256"]:
            raise SystemExit(f"case {row['case']}: the peer had other lengths; run both with one seed and size")
        note = f"kept {row['tokens_kept']}, stall {row['stall_ms']} ms" if "tokens_kept" in row else ""
        beside = f"{other['tokens_s']:>14}{row['tokens_s'] / other['tokens_s']:>8.2f}" if other else " " * 22
        print(f"{row['case']:<34}{row['tokens_s']:>12}{row['step_ms']:>9}{beside}  {note}")


if __name__ == "__main__":
    main()
