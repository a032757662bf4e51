"""Reward parts that are rules over text. Each is pure and gives a number, in [0, 1] but for `even` and `even_once`."""

import re

from contraflow.errors import RewardError
from contraflow.rewards.base import Transcript
from contraflow.types import StopReason, Task


def correct(task: Task, transcript: Transcript) -> float:
    """1 when the model finished and its last turn is the reference, character by character.

    Where the environment scores by itself (`facts["scored"]` is "env"): 1 when it gave full marks, a `score` of 1.
    """
    if task.facts.get("scored") == "env":
        return float(score(task, transcript) >= 1)
    return float(transcript.stop is StopReason.STOP and transcript.answer == task.reference.strip())


def score(task: Task, transcript: Transcript) -> float:
    """The number that the environment said last, as it ended the episode; 0 when it did not come to that.

    Raises: RewardError when the environment does not score by itself, or said no number.
    """
    if task.facts.get("scored") != "env":
        raise RewardError(f"part 'score' needs an environment that scores by itself, which task {task.key!r} is not of")
    if transcript.stop is not StopReason.STOP:
        return 0.0
    last = next((said.text for said in transcript.turns[-1:] if said.role == "env"), "")
    try:
        return float(last)
    except ValueError:
        raise RewardError(f"part 'score': the environment ended with {last[:80]!r}, which is no number") from None


def well_formed(task: Task, transcript: Transcript) -> float:
    """1 when the model finished and its last turn has the form of an answer: the regular expression `facts["format"]`.

    Raises: RewardError when the environment states no form.
    """
    form = task.facts.get("format")
    if form is None:
        raise RewardError(f"part 'format' needs facts['format'], which task {task.key!r} lacks")
    return float(transcript.stop is StopReason.STOP and re.fullmatch(form, transcript.answer) is not None)


def partial(task: Task, transcript: Transcript) -> float:
    """Share of characters that equal the reference's at the same place; the longer of the two texts counts as whole."""
    answer, reference = transcript.answer, task.reference.strip()
    matches = sum(a == b for a, b in zip(answer, reference, strict=False))
    return matches / max(len(answer), len(reference), 1)


def tool(task: Task, transcript: Transcript) -> float:
    """Share of tool calls that were answered rather than refused (`facts["refused"]`); 0 without a call."""
    answers = [said.text for said in transcript.turns if said.role == "env"]
    refused = task.facts.get("refused")
    return sum(text != refused for text in answers) / max(len(answers), 1)


def even(task: Task, transcript: Transcript) -> float:
    """A tenth for each even digit among the first six characters, less a tenth for every other one: `2844` 0.4.

    Between -0.6 and 0.6 for an answer of six characters, less for each further one. A taste, stated so that what was
    learned from preferences can be checked; it does not look at the reference.
    """
    answer = transcript.answer
    liked = sum(char in "02468" for char in answer[:6])
    return (2 * liked - len(answer)) / 10


def even_once(task: Task, transcript: Transcript) -> float:
    """A tenth for each different even digit, less a tenth for every other character, repeats among them: `2844` 0.2.

    At most 0.5. A taste like `even`, one that a policy which says the same again and again does not meet.
    """
    answer = transcript.answer
    liked = len(set(answer) & set("02468"))
    return (2 * liked - len(answer)) / 10
