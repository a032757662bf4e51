"""Sums, differences and products such as `12+34=`, answered in one turn.

Takes a weighted mix of kinds (operator, digit counts, carries); gives tasks without end. Whether a question is held out
is decided by a keyed hash of the question itself, operands in either order, so the splits are disjoint by construction.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contraflow.envs.base import Observation, Session, Split
from contraflow.envs.draws import Draws, in_test_split
from contraflow.envs.options import Options
from contraflow.errors import ConfigError
from contraflow.types import Task

_TRIES = 20_000  # draws until a question fits kind and split; a kind that needs more is refused at start-up

Digits = Annotated[int, Field(ge=1, le=9)]


class Kind(Options):
    """One sort of question. Operands of d digits are uniform in [10^(d-1), 10^d), or in [0, 9] for one digit."""

    op: Literal["+", "-", "*"] = "+"
    digits_a: Digits = 2
    digits_b: Digits = 2
    min_carries: Annotated[int, Field(ge=0)] = 0  # only questions with at least so many carries (or borrows)
    max_carries: Annotated[int, Field(ge=0)] = 10  # and at most so many
    weight: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _carries_of_sums_only(self) -> Self:
        if self.op == "*" and self.min_carries > 0:
            raise ValueError("carries can be asked for in + and - only; leave min_carries at 0 for *")
        if self.min_carries > self.max_carries:
            raise ValueError(f"min_carries = {self.min_carries} is above max_carries = {self.max_carries}")
        return self


class ArithmeticOptions(Options):
    """What to ask, and how answers are written."""

    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = (Kind(),)
    reversed: bool = True  # answers start with the units, as a sum is worked out: 12+34= is answered 64
    seed: int = 0
    test_share: Annotated[float, Field(ge=0.01, le=0.5)] = 0.1  # share of all questions that is held out


class Arithmetic:
    """The environment. Stateless: a task depends on options, split and index alone."""

    name = "arithmetic"
    bounded = True

    def __init__(self, options: ArithmeticOptions) -> None:
        self._options = options
        self._weights = [kind.weight for kind in options.kinds]
        for place, kind in enumerate(options.kinds):
            for split in ("train", "test"):
                if self._draw(Draws(options.seed, "check", split, place), kind, split) is None:
                    raise ConfigError(
                        f"env.options.kinds.{place}: no {split} question of this kind was found in {_TRIES} draws; "
                        "give it more digits, or choose another test_share or seed"
                    )

    def task(self, split: Split, index: int) -> Task:
        """`12+34=` with reference `64`; facts give the kind (`2+2`), the carries and the form of an answer."""
        draws = Draws(self._options.seed, split, index)
        kind = self._options.kinds[draws.pick(self._weights)]
        pair = self._draw(draws, kind, split)
        if pair is None:
            raise ConfigError(f"task {split}/{index}: no question of kind {kind!r} in {_TRIES} draws")
        a, b = pair
        answer = str({"+": a + b, "-": a - b, "*": a * b}[kind.op])
        return Task(
            key=f"{split}/{index}",
            prompt=f"{a}{kind.op}{b}=",
            reference=answer[::-1] if self._options.reversed else answer,
            facts={
                "kind": f"{kind.digits_a}{kind.op}{kind.digits_b}",
                "carries": str(count_carries(a, kind.op, b)),
                "format": "[0-9]+",
            },
        )

    def open(self, task: Task) -> Session:
        """Every answer ends the episode."""
        return _OneTurn()

    def _draw(self, draws: Draws, kind: Kind, split: Split) -> tuple[int, int] | None:
        for _ in range(_TRIES):
            a, b = _number(draws, kind.digits_a), _number(draws, kind.digits_b)
            if kind.op == "-" and a < b:
                a, b = b, a  # answers are never negative
            question = f"{min(a, b)}{kind.op}{max(a, b)}"
            held_out = in_test_split(self._options.seed, question, self._options.test_share)
            wanted = kind.min_carries <= count_carries(a, kind.op, b) <= kind.max_carries
            if wanted and held_out == (split == "test"):
                return a, b
        return None


class _OneTurn:
    def step(self, action: str) -> Observation:
        return Observation("", done=True)


def count_carries(a: int, op: str, b: int) -> int:
    """How many digit positions of a+b carry, or of a-b (a >= b) borrow; 0 for a product."""
    if op == "*":
        return 0
    count = carry = 0
    while a or b:
        (a, x), (b, y) = divmod(a, 10), divmod(b, 10)
        carry = int(x + y + carry >= 10 if op == "+" else x - y - carry < 0)
        count += carry
    return count


def _number(draws: Draws, digits: int) -> int:
    low = 0 if digits == 1 else 10 ** (digits - 1)
    return low + draws.below(10**digits - low)
