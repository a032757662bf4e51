"""How far a run has come, and how it ended. Takes the reports of steps, gives what views and people are told.

Does not decide anything. `Progress` is written by the loop only.
"""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from contraflow.algo.lengths import Lengths, length_record
from contraflow.train.report import StepReport


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended: steps done in all, the last held-out accuracy (-1: never looked), whether it was cut short."""

    steps: int
    accuracy: float
    stopped: bool
    model: str = ""  # folder of the last cut's model, readable by transformers; of a run that came to its end
    because: str = ""  # the alarm that stopped it

    def told(self, folder: Path) -> str:
        """The outcome in a line or two."""
        if self.stopped:
            why = f"{self.because}\n" if self.because else ""
            return f"{why}stopped after {self.steps} steps; go on with: contraflow resume {folder}"
        looked = f", held-out accuracy {self.accuracy:.3f}" if self.accuracy >= 0 else ""
        return f"done: {self.steps} steps{looked}; the model is {self.model}"


@dataclass
class Progress:
    """How far a run has come; written by `Loop` only."""

    steps: int  # done, earlier lines included
    accuracy: float = -1.0
    rewards: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    trained_tokens: int = 0
    age_mean: float = 0.0  # of the last step
    age_max: int = 0  # of the run
    note: str = ""  # the last thing worth a line
    model: str = ""  # folder of the trained model, once the run came to its end
    posed: Lengths = field(default_factory=Lengths)  # of episodes whose groups came to an end, in this life of the run
    trained: Lengths = field(default_factory=Lengths)
    cut: int = 0  # episodes that were not finished by their deadline

    because: str = ""  # the alarm that stopped the run

    def lengths(self) -> dict[str, object]:
        """See `length_record`."""
        return length_record(self.posed, self.trained, self.cut)

    def count(self, report: StepReport) -> None:
        """A step is done."""
        self.steps = report.step + 1
        self.rewards.append(report.reward)
        self.trained_tokens += report.trained_tokens
        self.trained.add(report.lengths)
        self.age_mean, self.age_max = report.age_mean, max(self.age_max, report.age_max)
        if not report.applied:
            self.note = f"step {report.step} was not applied: {report.fault}; see {report.bad_batch}"
