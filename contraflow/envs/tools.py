"""Arithmetic with a calculator to call: an episode of several turns.

    12+34*5=     [34*5]     170=     [12+170]     182=     182
    prompt       model      env      model        env      model: the final answer

A turn that holds a bracket is a call; any other turn is the final answer and ends the episode. A malformed call, or one
that asks too much, is answered `?=`. A call beyond `max_calls` ends the episode unanswered, which is never right.
"""

from typing import Annotated, Literal

from pydantic import Field

from contraflow.envs.base import Observation, Session, Split
from contraflow.envs.draws import Draws, in_test_split
from contraflow.envs.expression import evaluate
from contraflow.envs.options import Options
from contraflow.errors import ConfigError
from contraflow.types import Task

_TRIES = 20_000
REFUSED = "?="  # what a call that cannot be worked out is answered


class Kind(Options):
    """One sort of question: `operands` numbers of `digits` digits, joined by operators drawn from `ops`."""

    operands: Annotated[int, Field(ge=2, le=6)] = 2
    digits: Annotated[int, Field(ge=1, le=6)] = 2
    ops: Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1)] = ("+", "-", "*")
    weight: Annotated[float, Field(gt=0)] = 1.0


class CalculatorOptions(Options):
    """What to ask and what the calculator does."""

    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = (Kind(), Kind(operands=3))
    operands_per_call: Annotated[int, Field(ge=2, le=6)] = 2  # fewer than a question has: several calls are needed
    max_calls: Annotated[int, Field(ge=1)] = 4
    seed: int = 0
    test_share: Annotated[float, Field(ge=0.01, le=0.5)] = 0.1


class Calculator:
    """The environment. Stateless: a task depends on options, split and index alone."""

    name = "calculator"
    bounded = True

    def __init__(self, options: CalculatorOptions) -> None:
        self._options = options
        self._weights = [kind.weight for kind in options.kinds]
        for place, kind in enumerate(options.kinds):
            for split in ("train", "test"):
                if self._draw(Draws(options.seed, "check", split, place), kind, split) is None:
                    raise ConfigError(
                        f"env.options.kinds.{place}: no {split} question of this kind was found in {_TRIES} draws; "
                        "give it more digits or operands, or choose another test_share or seed"
                    )

    def task(self, split: Split, index: int) -> Task:
        """`12+34*5=` with reference `182`; facts give the number of operands and the form of an answer."""
        draws = Draws(self._options.seed, split, index)
        kind = self._options.kinds[draws.pick(self._weights)]
        question = self._draw(draws, kind, split)
        if question is None:
            raise ConfigError(f"task {split}/{index}: no question of kind {kind!r} in {_TRIES} draws")
        return Task(
            key=f"{split}/{index}",
            prompt=f"{question}=",
            reference=str(evaluate(question, max_operands=kind.operands)),
            facts={"kind": f"{kind.operands}x{kind.digits}", "format": "-?[0-9]+", "refused": REFUSED},
        )

    def open(self, task: Task) -> Session:
        """A calculator with all its calls left."""
        return _Calls(self._options)

    def _draw(self, draws: Draws, kind: Kind, split: Split) -> str | None:
        for _ in range(_TRIES):
            low = 0 if kind.digits == 1 else 10 ** (kind.digits - 1)
            numbers = [low + draws.below(10**kind.digits - low) for _ in range(kind.operands)]
            ops = [kind.ops[draws.below(len(kind.ops))] for _ in range(kind.operands - 1)]
            # All orders of the same numbers and operators share one fate: stricter than equal value needs.
            question = " ".join([*sorted(map(str, numbers)), *sorted(ops)])
            if in_test_split(self._options.seed, question, self._options.test_share) == (split == "test"):
                return str(numbers[0]) + "".join(f"{op}{n}" for op, n in zip(ops, numbers[1:], strict=True))
        return None


class _Calls:
    """Invariant: `_left` calls may still be answered."""

    def __init__(self, options: CalculatorOptions) -> None:
        self._left = options.max_calls
        self._max_operands = options.operands_per_call

    def step(self, action: str) -> Observation:
        if "[" not in action and "]" not in action:
            return Observation("", done=True)
        if self._left == 0:
            return Observation("", done=True)
        self._left -= 1
        return Observation(self._answer(action.strip()), done=False)

    def _answer(self, call: str) -> str:
        if not (call.startswith("[") and call.endswith("]")):
            return REFUSED
        try:
            return f"{evaluate(call[1:-1], max_operands=self._max_operands)}="
        except ValueError:
            return REFUSED
