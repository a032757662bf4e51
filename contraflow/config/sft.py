"""Sections of a recipe that makes a model by supervised training; of one that makes a reward model, the whole."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from contraflow.config.base import Compute, Count, Decay, Device, Section, Share
from contraflow.config.preference import Preferences, RewardTraining
from contraflow.config.recipe import Env, Model


class NewModel(Section):
    """The model that supervised training starts from: a folder, or, when that is empty, a new one."""

    folder: str = ""  # a Hugging Face folder or `builtin:NAME`
    config: dict[str, Any] = {}  # config.json of a new model; the vocabulary's size follows the tokenizer
    alphabet: str = ""  # characters of a new tokenizer, one token each; empty is the standard one


class Chat(Section):
    """Conversations to learn from, a row a line of JSON, in place of an environment's answers. See docs/sft.md."""

    file: str = ""  # {"messages": [...]}, or {"prompt": ..., "completion": ...}; empty: learn from [env]
    held_out_file: str = ""  # rows looked at; empty: the last sft.held_out rows of file, which are then not learned
    turns: Literal["all", "last"] = "all"  # which of the model's turns in a conversation are learned
    max_tokens: Count = 2048  # of a row
    too_long: Literal["drop", "cut", "refuse"] = "drop"  # rows longer than that; cut: their end is left out


class Sft(Section):
    """Supervised training on an environment's reference answers, or on conversations."""

    seed: int = 0  # of weights and order
    examples: Count = 20_000  # tasks of the train split, or rows, at most; each seen once a pass
    examples_per_update: Count = 256  # batch size
    updates: Count = 2_000  # at most
    passes: Annotated[int, Field(ge=0)] = 0  # over all examples, at most; 0: as many as the updates take
    tokens_per_batch: Count = 8192  # budget of one packed micro-batch
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3  # AdamW, constant after the warm-up
    warmup_updates: Annotated[int, Field(ge=0)] = 20  # over which the learning rate rises to its value
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # AdamW's
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # AdamW's
    clip_norm: Annotated[float, Field(gt=0)] = 1.0  # of the whole gradient
    balance_weight: Annotated[float, Field(ge=0)] = 0.01  # load-balancing loss of the router
    held_out: Annotated[int, Field(ge=0)] = 256  # tasks of the test split, or rows, looked at; 0: never look
    look_every: Count = 20  # updates between looks
    stop_at_accuracy: Share = 1.0  # end as soon as a look reaches it
    save_every: Annotated[int, Field(ge=0)] = 0  # updates between copies of the model beside it; 0: none
    device: Device = "cpu"  # cpu, cuda or cuda:N
    compute: Compute = "float32"  # of forward and backward pass; weights, router, head and optimizer stay float32


class SftRecipe(Section):
    """How to make a model by supervised training."""

    model: NewModel = NewModel()
    env: Env = Env()
    look: Env | None = None  # the tasks looked at, when they are others than those taught
    chat: Chat = Chat()
    sft: Sft = Sft()

    @model_validator(mode="after")
    def _conversations_need_a_model_that_has_a_template(self) -> Self:
        if self.chat.file and not self.model.folder:
            raise ValueError("chat.file is for a model that has a tokenizer: set model.folder")
        return self


class RewardRecipe(Section):
    """How to make a reward model from preferences."""

    model: Model = Model()
    env: Env = Env()
    preferences: Preferences = Preferences()
    reward_model: RewardTraining = RewardTraining()
