"""Sections of a recipe that makes a model by supervised training."""

from typing import Annotated, Any

from pydantic import Field

from contraflow.config.base import Count, Decay, Section, Share
from contraflow.config.recipe import Env


class NewModel(Section):
    """The model that supervised training starts from: a folder, or, when that is empty, a new one."""

    folder: str = ""  # a Hugging Face folder or `builtin:NAME`
    config: dict[str, Any] = {}  # config.json of a new model; the vocabulary's size follows the tokenizer
    alphabet: str = ""  # characters of a new tokenizer, one token each; empty is the standard one


class Sft(Section):
    """Supervised training on an environment's reference answers."""

    seed: int = 0  # of weights and order
    examples: Count = 20_000  # tasks of the train split, each seen once a pass
    examples_per_update: Count = 256  # batch size
    updates: Count = 2_000  # at most
    tokens_per_batch: Count = 8192  # budget of one packed micro-batch
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3  # AdamW, constant after the warm-up
    warmup_updates: Annotated[int, Field(ge=0)] = 20  # over which the learning rate rises to its value
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # AdamW's
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # AdamW's
    clip_norm: Annotated[float, Field(gt=0)] = 1.0  # of the whole gradient
    balance_weight: Annotated[float, Field(ge=0)] = 0.01  # load-balancing loss of the router
    held_out: Annotated[int, Field(ge=0)] = 256  # tasks of the test split looked at; 0: never look
    look_every: Count = 20  # updates between looks
    stop_at_accuracy: Share = 1.0  # end as soon as a look reaches it


class SftRecipe(Section):
    """How to make a model by supervised training."""

    model: NewModel = NewModel()
    env: Env = Env()
    look: Env | None = None  # the tasks looked at, when they are others than those taught
    sft: Sft = Sft()
