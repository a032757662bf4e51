"""What a step leaves behind for people to look at: sampled episodes, and batches that could not be trained.

Takes groups with their credit, or the batches of a refused update; gives plain records and files. Does not train.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from contraflow.errors import TrainingError
from contraflow.model.tokenizer import Tokenizer
from contraflow.train.batcher import Credit, group_credit
from contraflow.types import Batch, Episode, Group

_DECIMALS = 5  # of a log-probability or advantage: enough to look at, and keeps the file small


def episode_records(
    groups: Sequence[Group], tokenizer: Tokenizer, *, step: int, keep: int, credit: Credit
) -> Iterator[dict[str, Any]]:
    """`keep` groups of a take, spread evenly over it (a take is oldest first), as RUN/episodes.jsonl stores them.

    Each episode has one entry per token in `pieces`, `roles`, `logprobs`, `advantages` (what its episode earned) and
    `versions` (-1 where the model did not sample it). Numbers that are not finite, which JSON cannot hold, are null.
    """
    places = np.unique(np.linspace(0, len(groups) - 1, min(keep, len(groups))).round().astype(int))
    for group in (groups[place] for place in places.tolist()):
        credit_G = group_credit(group, credit).tolist()
        yield {
            "step": step,
            "group": group.ticket.group,
            "attempt": group.ticket.attempt,
            "prompt": group.task.prompt,
            "reference": group.task.reference,
            "episodes": [_episode(e, c, tokenizer) for e, c in zip(group.episodes, credit_G, strict=True)],
        }


def write_aside(path: Path, batches: Sequence[Batch], fault: str) -> None:
    """Store a refused update for inspection: `numpy.load(path)` gives `fault`, and `i.FIELD` of each micro-batch i.

    Raises TrainingError when the file cannot be written.
    """
    arrays: dict[str, Any] = {"fault": np.array(fault)}
    for place, batch in enumerate(batches):
        fields = msgspec.structs.asdict(batch)
        arrays |= {f"{place}.{name}": values for name, values in fields.items() if values is not None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise TrainingError(f"{fault}; the batch could not be written to {path}: {error}") from error


def _episode(episode: Episode, advantage: float, tokenizer: Tokenizer) -> dict[str, Any]:
    roles, versions = [""] * episode.tokens.size, [-1] * episode.tokens.size
    for turn in episode.turns:
        roles[turn.start : turn.end] = [turn.role] * (turn.end - turn.start)
    for span in episode.spans:
        versions[span.start : span.end] = [span.version.n] * (span.end - span.start)
    return {
        "pieces": tokenizer.pieces(episode.tokens.tolist()),
        "roles": roles,
        "logprobs": [_plain(value) for value in episode.logprobs.tolist()],
        "advantages": [_plain(advantage) if trained else 0.0 for trained in episode.trained.tolist()],
        "versions": versions,
        "reward": _plain(episode.reward),
        "parts": {name: _plain(value) for name, value in episode.parts.items()},
        "stop": str(episode.stop),
        "error": episode.error,
    }


def _plain(value: float) -> float | None:
    return round(value, _DECIMALS) if math.isfinite(value) else None
