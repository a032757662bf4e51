"""Sections of a recipe that makes a reward model from preferences, and of a run that is rewarded by one."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from contraflow.config.base import Compute, Count, Decay, Device, Seconds, Section


class Scorer(Section):
    """A reward model behind the part `model`: one process, asked by all rollout workers. See docs/rlhf.md."""

    folder: str = ""  # of the reward model
    device: Device = "cpu"  # cpu, cuda or cuda:N
    compute: Compute = "float32"  # of the forward pass; router and heads stay float32
    clip: Annotated[float, Field(gt=0)] = 5.0  # rewards, in spreads from the mean of held-out answers, end at +-clip
    max_tokens: Count = 4096  # of a conversation; a longer one is an error and costs its episode
    batch: Count = 64  # conversations of one pass, at most
    gather_s: Annotated[float, Field(ge=0)] = 0.003  # how long the first of a batch waits for others
    deadline_s: Seconds = 10.0  # for one reward in all, a restart of the process included


class Preferences(Section):
    """Pairs of answers of which one was preferred: rows of a file, or made by a stated rule."""

    file: str = ""  # {"prompt", "chosen", "rejected"} a line, "margin" if there is one; empty: made by the rule
    held_out_file: str = ""  # rows looked at; empty: the last held_out rows of file, which are then not learned
    pairs: Count = 4000  # to learn from, at most
    held_out: Count = 512  # to look at, of other tasks
    max_tokens: Count = 2048  # of prompt and answer; longer pairs are left out and counted
    margins: bool = False  # whether margins of rows count; the rule gives the distance of the golden rewards
    gold: str = "even"  # the rule: a reward part of text, shipped or your own, that says what is better
    temperature: Annotated[float, Field(ge=0)] = 0.05  # of the choice between two answers; 0: the better one, always
    characters: Annotated[str, Field(min_length=1)] = "0123456789"  # of which the rule draws answers
    shortest: Count = 1  # characters of a drawn answer
    longest: Count = 6  # the same, at most
    repeats: bool = True  # whether a drawn answer may use a character twice

    @model_validator(mode="after")
    def _lengths_in_order(self) -> Self:
        if self.longest < self.shortest:
            raise ValueError(f"longest = {self.longest} is less than shortest = {self.shortest}")
        if len(set(self.characters)) ** self.longest < 2:
            raise ValueError(f"characters = {self.characters!r}: no two answers can differ")
        kinds = len(set(self.characters))
        if not self.repeats and self.longest > kinds:
            raise ValueError(f"repeats = false with longest = {self.longest}: characters has {kinds} different ones")
        return self


class RewardTraining(Section):
    """Supervised training of a reward model."""

    seed: int = 0  # of pairs and order
    pairs_per_update: Count = 128  # batch size
    passes: Count = 3  # over all pairs
    tokens_per_batch: Count = 8192  # budget of one packed micro-batch
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3  # AdamW, constant after the warm-up
    warmup_updates: Annotated[int, Field(ge=0)] = 10  # over which the learning rate rises to its value
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # AdamW's
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # AdamW's
    clip_norm: Annotated[float, Field(gt=0)] = 1.0  # of the whole gradient
    look_every: Count = 20  # updates between looks at held-out pairs
    device: Device = "cpu"  # cpu, cuda or cuda:N
    compute: Compute = "float32"  # of forward and backward pass; weights, router, head and optimizer stay float32
