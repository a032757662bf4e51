"""Ledgers opened without a buffer around them, by the rule most tests want."""

from pathlib import Path

from contraflow.buffer import opening
from contraflow.buffer.ledger import Ledger
from contraflow.buffer.opening import Opening
from contraflow.buffer.salvage import Keep
from contraflow.buffer.segments import damage
from contraflow.buffer.window import Window


def open_ledger(folder: Path, *, resume_step: int | None, run_id: int = 0) -> tuple[Ledger, Opening]:
    """P = 2, eta = 1, payloads checked where they lie."""
    window = Window(policy="hold", groups_per_step=2, max_age=1)
    keep = Keep(window=window, dead_line="train", damage=lambda place: damage(folder, place))
    return opening.open_ledger(folder, resume_step=resume_step, keep=keep, run_id=run_id)
