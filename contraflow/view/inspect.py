"""`contraflow inspect`: where every group of a run is, as lines a person can add up, and what is wrong if they don't.

Takes a run's folder, gives text. Reads the ledger, or for
log-ratios the metrics, and nothing else, so it works on a live, ended or killed run.
"""

from pathlib import Path

from contraflow.buffer.accounts import accounts
from contraflow.buffer.audit import audit
from contraflow.errors import RunFolderError
from contraflow.telemetry import read_journal
from contraflow.view.mismatch import mismatch_lines


def describe(folder: Path) -> str:
    """The accounts of a run. Raises RunFolderError when there is no run, LedgerError when it cannot be read."""
    a = accounts(folder)
    lines = [
        f"{folder}: line {a.line}, newest checkpoint holds {a.cut} steps",
        f"posed    {a.posed:7d}   = trained + dropped + held",
        f"trained  {a.trained:7d}   of which {a.final} are in a checkpoint",
        f"dropped  {sum(a.dropped.values()):7d}   {_reasons(a.dropped)}",
        f"held     {a.held:7d}   waiting {a.waiting}, running {a.running}, ready {a.ready}, due again {a.due},"
        f" taken {a.taken}",
        f"attempts given up and posed again: {sum(a.reposed.values())}  {_reasons(a.reposed)}",
        f"late or doubled reports refused:   {sum(a.refused.values())}  {_reasons(a.refused)}",
        f"taken by a step that a resume undid: {a.superseded}",
    ]
    return "\n".join(lines)


def prove(folder: Path) -> list[str]:
    """What is wrong with the groups of a run; nothing when each is in exactly one end state. Raises as `describe`."""
    return audit(folder)


def mismatch(folder: Path) -> str:
    """Where log-ratios of a run come from. Raises RunFolderError when there is no run."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise RunFolderError(f"{folder} holds no metrics.jsonl: it is not the folder of a run, or none has begun there")
    return "\n".join(mismatch_lines([record for record in read_journal(path) if record["kind"] == "step"]))


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
