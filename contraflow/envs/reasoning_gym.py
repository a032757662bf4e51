"""Tasks and scores of `reasoning_gym` (Apache-2.0, an extra), any of its data sets by name, in one turn.

Takes a weighted mix of data sets with their own options; gives tasks without end, scored by the data set's own scorer.
Whether a question is held out is decided by a keyed hash of what is asked, so the splits are disjoint by construction.
The score is told as the episode's last observation, which the parts `score` and `correct` read.
"""

import copy
import functools
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, field_validator

from contraflow.envs.base import Observation, Session, Split
from contraflow.envs.draws import Draws, in_test_split
from contraflow.envs.options import Options
from contraflow.errors import ConfigError, TaskError
from contraflow.types import Task

_ITEMS = 1 << 31  # items that are drawn from, where a data set makes any of them on demand
_TRIES = 200  # draws until a question falls on the side of its split; each draw makes one item
_TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
# Items of these change with the process (reasoning_gym 0.1.25 draws from the global generator, or walks through a set):
# a group that is posed again would be another one.
_UNSTABLE = (
    "codeio",
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
_REMEMBERED = 1024  # items kept, since an item is looked at once for each of its episodes
_OURS = ("seed", "size")  # options of every data set that are set here


class DataSet(Protocol):
    """The part of a `reasoning_gym` data set that is used here."""

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


class Source(Options):
    """One data set of the mix; `options` are its own (its `*Config` in reasoning_gym)."""

    name: str
    options: Annotated[dict[str, Any], Field(default_factory=dict)]
    weight: Annotated[float, Field(gt=0)] = 1.0

    @field_validator("options")
    @classmethod
    def _seed_and_size_are_set_elsewhere(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := [key for key in _OURS if key in options]:
            raise ValueError(f"{taken[0]!r} is not for a recipe: use env.options.seed and env.options.listed")
        return options


class ReasoningGymOptions(Options):
    """What to ask, in which words, and what of a turn is the answer."""

    datasets: Annotated[tuple[Source, ...], Field(min_length=1)]
    answer: Literal["tagged", "whole"] = "tagged"  # text within the last <answer></answer>, or all of the turn
    ask: str = ""  # a regular expression: only its first match in the question is asked; empty: all of it
    prompt: str = "{question}"  # special tokens in it count, so that chat marks can be written
    listed: Annotated[int, Field(ge=10, le=20_000)] = 2_000  # items of data sets that list them when they are made
    seed: int = 0
    test_share: Annotated[float, Field(ge=0.05, le=0.5)] = 0.2  # share of all questions that is held out

    @field_validator("ask")
    @classmethod
    def _compiles(cls, ask: str) -> str:
        try:
            re.compile(ask)
        except re.error as fault:
            raise ValueError(f"no regular expression: {fault}") from None
        return ask

    @field_validator("prompt")
    @classmethod
    def _asks(cls, prompt: str) -> str:
        if "{question}" not in prompt:
            raise ValueError("it has to hold {question}")
        return prompt


class ReasoningGym:
    """The environment. Stateless: a task depends on options, split and index alone."""

    name = "reasoning_gym"
    bounded = False  # some data sets take seconds for an item, and some scorers may hang

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options
        self._weights = [source.weight for source in options.datasets]
        self._sets = [_made(place, source, options) for place, source in enumerate(options.datasets)]
        self._item = functools.lru_cache(_REMEMBERED)(lambda place, item: self._sets[place][0][item])

    def task(self, split: Split, index: int) -> Task:
        """A question with an answer that gets full marks; facts name the data set and the number of the item.

        Raises: TaskError when no item falls on the side of `split`, or none of an item's answers gets full marks.
        """
        draws = Draws(self._options.seed, split, index)
        place = draws.pick(self._weights)
        data, count = self._sets[place]
        for _ in range(_TRIES):
            item = draws.below(count)
            entry = self._item(place, item)
            asked = self._asked(str(entry["question"]))
            if in_test_split(self._options.seed, asked, self._options.test_share) == (split == "test"):
                break
        else:
            raise TaskError(
                f"{self._options.datasets[place].name}: no {split} question in {_TRIES} items; it has too few different"
                " ones, so give it other options or another env.options.test_share"
            )
        return Task(
            key=f"{split}/{index}",
            prompt=self._prompt(asked),
            reference=self._written(_reference(data, entry)),
            facts={"kind": self._options.datasets[place].name, "place": str(place), "item": str(item), "scored": "env"},
        )

    def open(self, task: Task) -> Session:
        """The first turn ends the episode. Raises: TaskError when the item is not the one that was posed."""
        place, item = int(task.facts["place"]), int(task.facts["item"])
        entry = self._item(place, item)
        if self._prompt(self._asked(str(entry["question"]))) != task.prompt:
            raise TaskError(f"{task.facts['kind']}: item {item} is not what it was when task {task.key!r} was posed")
        return _Marking(self._sets[place][0], entry, tagged=self._options.answer == "tagged")

    def _asked(self, question: str) -> str:
        found = re.search(self._options.ask, question) if self._options.ask else None
        return found.group() if found else question

    def _prompt(self, asked: str) -> str:
        return self._options.prompt.replace("{question}", asked)

    def _written(self, answer: str) -> str:
        return f"<answer>{answer}</answer>" if self._options.answer == "tagged" else answer


class _Marking:
    """One question waiting for its answer."""

    def __init__(self, data: DataSet, entry: dict[str, Any], *, tagged: bool) -> None:
        self._data, self._entry, self._tagged = data, entry, tagged

    def step(self, action: str) -> Observation:
        """The data set's own score of the answer, as text; 0 when there is none."""
        answer = extract(action) if self._tagged else action.strip()
        if answer is None:
            return Observation("0", done=True)
        return Observation(repr(float(self._data.score_answer(answer, copy.deepcopy(self._entry)))), done=True)


def extract(text: str) -> str | None:
    """What stands in the last <answer></answer>, without white space around it; None when there is none.

    >>> extract("it is <answer>5</answer>, no: <answer> 6 </answer>")
    '6'
    """
    found = _TAGGED.findall(text)
    return str(found[-1]) if found else None


def _reference(data: DataSet, entry: Mapping[str, Any]) -> str:
    """The first answer of an item that its own scorer gives full marks: sets with many right ones keep an example."""
    examples = [value for key, value in entry["metadata"].items() if "answer" in key]
    for answer in (entry["answer"], *examples):
        if isinstance(answer, str) and data.score_answer(answer, dict(entry)) >= 1:
            return answer
    raise TaskError("an item without an answer that its own scorer gives full marks; this data set can't be used")


def _made(place: int, source: Source, options: ReasoningGymOptions) -> tuple[DataSet, int]:
    """A data set, and how many of its items are drawn from. Raises: ConfigError."""
    where = f"env.options.datasets.{place}"
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as fault:
        raise ConfigError(
            f"env.name = 'reasoning_gym' needs pip install 'contraflow[reasoning-gym]': {fault}"
        ) from None
    if source.name not in DATASETS:
        raise ConfigError(f"{where}.name = {source.name!r} is none of reasoning_gym's: {', '.join(sorted(DATASETS))}")
    if source.name in _UNSTABLE:
        raise ConfigError(f"{where}.name = {source.name!r}: its items change from process to process; use another")
    kind, section = DATASETS[source.name]
    defaults = {field.name: field.default for field in fields(section)}
    if unknown := sorted(source.options.keys() - defaults.keys()):
        raise ConfigError(f"{where}.options: {source.name} has no {unknown[0]!r}; allowed: {', '.join(defaults)}")
    given = {
        key: tuple(value) if isinstance(defaults[key], tuple) and isinstance(value, list) else value
        for key, value in source.options.items()
    }
    try:
        data: DataSet = kind(config=section(**given, seed=options.seed, size=options.listed))
        return data, _count(data, options.listed)
    except Exception as fault:
        raise ConfigError(f"{where}: {source.name} refuses its options: {type(fault).__name__}: {fault}") from fault


def _count(data: DataSet, listed: int) -> int:
    try:
        data[_ITEMS - 1]
    except IndexError:
        return listed
    return _ITEMS
