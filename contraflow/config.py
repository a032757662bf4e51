"""A run's configuration: one frozen section per room, read from a TOML recipe plus `--set section.key=value`.

Takes a file and overrides, gives a checked `Recipe` or a `ConfigError` that names the key, the value, what is allowed
and the nearest name. Does not import torch, start anything, or derive one section from another.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from contraflow.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Compute = Literal["float32", "bfloat16"]
Device = Annotated[str, Field(pattern="^(cpu|cuda|cuda:[0-9]{1,4})$")]


class Section(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Run(Section):
    """What a run is called, how long it goes on and what it writes."""

    seed: int = 0  # of everything random in the run
    steps: Count = 100  # in all, those before a resume included
    eval_every: Count = 10  # steps between looks at held-out tasks
    eval_tasks: Annotated[int, Field(ge=0)] = 256  # 0: never look
    stop_at_accuracy: Share = 0.0  # end early once held-out accuracy reaches it; 0: never
    keep_episodes: Annotated[int, Field(ge=0)] = 4  # groups a step written to episodes.jsonl for the report
    stall_s: Seconds = 120.0  # no wait in the loop may last longer; then the run stops and says who waited for what
    max_bad_steps: Count = 3  # steps in a row with a non-finite loss before the run stops


class Model(Section):
    """The policy to start from: a Hugging Face folder, or `builtin:NAME` for one shipped in the package."""

    folder: str = "builtin:tiny-moe"  # its tokenizer.json included


class Env(Section):
    """Which environment poses the tasks; `options` are checked by that environment."""

    name: str = "arithmetic"  # a shipped one, or `module:NAME` or `file.py:NAME` of your own
    options: dict[str, Any] = {}  # see docs/environment.md
    step_deadline_s: Seconds = 10.0  # an environment that has not answered by then costs the episode


class Reward(Section):
    """Named parts and their weights; the reward of an episode is the weighted sum."""

    parts: dict[str, float] = {"correct": 1.0}  # correct, format, partial, tool, or your own


class Rollout(Section):
    """How tasks become groups of episodes."""

    workers: Count = 1  # processes, each with an engine of its own
    episodes: Count = 8  # G: episodes of one group
    max_new_tokens: Count = 16  # per episode, over all its turns
    max_turns: Count = 1  # model turns per episode
    temperature: Annotated[float, Field(gt=0)] = 1.0  # of sampling; the trainer computes its ratios at the same one
    concurrency: Count = 64  # groups a worker plays at once
    group_deadline_s: Seconds = 60.0  # a group that takes longer is posed again


class Parallel(Section):
    """How one model is spread over ranks: pp * dp * cp * tp of them, the experts of a stage over ep of its ranks."""

    dp: Count = 1  # data parallel: each has samples (trainer) or sequences (engine) of its own
    ep: Count = 1  # ranks that share out the experts; divides dp * cp * tp
    tp: Count = 1  # tensor parallel: attention heads and dense MLPs; tokens of expert layers are shared out too
    cp: Count = 1  # context parallel: the tokens of each sequence; trainer only
    pp: Count = 1  # pipeline stages: the layers; trainer only
    schedule: Literal["1f1b", "interleaved"] = "1f1b"  # of the pipeline; interleaved has two stages a rank
    recompute: Literal["none", "layer"] = "none"  # activations kept, or computed again in the backward pass; trainer
    dispatch: Literal["auto", "per_expert", "all_to_all", "hierarchical", "overlapped", "deepep"] = (
        "auto"  # see docs/dispatch.md
    )
    domain_ranks: Annotated[int, Field(ge=0)] = 0  # ranks joined by NVLink; 0: those of one host
    wire: Literal["same", "bf16", "fp8"] = "same"  # precision of tokens on their way to experts
    deadline_s: Seconds = 60.0  # a rank that does not take part in an exchange by then is named and ends the run

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.pp * self.stage_ranks

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if self.domain_ranks and self.ranks % self.domain_ranks:
            raise ValueError(f"domain_ranks = {self.domain_ranks} does not divide the {self.ranks} ranks evenly")
        if self.stage_ranks % self.ep:
            raise ValueError(
                f"ep = {self.ep} does not divide dp * cp * tp = {self.stage_ranks}: the experts are shared out among"
                " the ranks of one stage"
            )
        return self


class Engine(Section):
    """Where tokens come from."""

    kind: Literal["native", "scripted"] = "native"  # scripted: answers without a model, to try a set-up
    context_tokens: Count = 256  # longest sequence, prompt included
    kv_tokens: Count = 65536  # KV-cache budget, over all sequences
    block_tokens: Count = 16  # tokens of one cache block
    max_sequences: Count = 256  # sequences decoded together
    prefill_tokens: Count = 2048  # prompt tokens computed in one step
    on_refresh: Literal["keep", "recompute"] = "keep"  # KV cache of unfinished sequences when weights change
    routes: bool = False  # record each token's experts
    device: Device = "cpu"  # cpu, cuda or cuda:N: rank r takes GPU N + r, further workers the ones behind
    compute: Compute = "float32"  # of the forward pass; bfloat16 keeps weights so, but for router and head
    replace_every: Annotated[int, Field(ge=0)] = 0  # refreshes between placements of experts by load; 0: in order
    spare_experts: Annotated[int, Field(ge=0)] = 0  # slots of each rank for replicas of popular experts
    parallel: Parallel = Parallel()  # how each worker's model is spread; cache and sequences are those of a dp rank

    @model_validator(mode="after")
    def _ranks_can_generate(self) -> Self:
        if self.parallel.cp > 1 or self.parallel.pp > 1:
            raise ValueError(
                f"engine.parallel has cp = {self.parallel.cp} and pp = {self.parallel.pp}: an engine is spread over dp,"
                " tp and ep only; leave both at 1"
            )
        if self.kind == "scripted" and self.parallel.ranks > 1:
            raise ValueError(
                f"engine.parallel has {self.parallel.ranks} ranks, but engine.kind = 'scripted' has no model to spread"
            )
        return self

    @model_validator(mode="after")
    def _placement_needs_ranks(self) -> Self:
        if self.spare_experts and not self.replace_every:
            raise ValueError(
                f"spare_experts = {self.spare_experts} with replace_every = 0: nothing would ever lie in those slots;"
                " say after how many refreshes experts are placed by load, such as replace_every = 1"
            )
        if self.replace_every and self.parallel.ep == 1:
            raise ValueError(
                f"replace_every = {self.replace_every} with parallel.ep = 1: one rank has all experts in any case;"
                " leave it at 0, or share the experts out among ranks"
            )
        return self


class Buffer(Section):
    """The window and the tickets: how old a trained token may be, and how much may be in flight."""

    groups_per_step: Count = 16  # P
    max_age: Annotated[int, Field(ge=0)] = 2  # eta; 0 is the synchronous trainer
    expiry: Literal["hold", "mask", "repose"] = "hold"  # what happens to a group about to expire
    no_signal: Literal["drop", "keep"] = "drop"  # groups whose episodes all earned the same

    @property
    def tickets(self) -> int:
        """Groups in flight at most: (eta + 1) * P."""
        return (self.max_age + 1) * self.groups_per_step


class Loss(Section):
    """The policy objective."""

    advantages: Literal["grpo", "centred"] = "grpo"  # divide by the group's standard deviation, or only centre
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: Annotated[float, Field(gt=0)] = 0.2  # larger than clip_low is DAPO's "clip higher"
    reduction: Literal["token", "sequence"] = "token"  # mean over all tokens, or over episodes of their token means
    kl_weight: Annotated[float, Field(ge=0)] = 0.0  # to the model the run began with; 0 keeps no reference copy
    balance_weight: Annotated[float, Field(ge=0)] = 0.0  # load-balancing loss of the router


class Train(Section):
    """How groups become a new version."""

    epochs: Count = 1  # e: passes over one take
    updates: Count = 1  # m: optimizer updates per pass
    tokens_per_batch: Count = 8192  # budget of one packed micro-batch
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3  # AdamW, constant after the warm-up
    warmup_updates: Annotated[int, Field(ge=0)] = 5  # over which the learning rate rises to its value
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # AdamW's
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # AdamW's
    clip_norm: Annotated[float, Field(gt=0)] = 1.0  # of the whole gradient
    device: Device = "cpu"  # cpu, cuda or cuda:N: rank r takes GPU N + r
    compute: Compute = "float32"  # of forward and backward pass; weights, router, head and optimizer stay float32
    compile: Literal["none", "blocks"] = "none"  # blocks: what lies between matmuls; pays on a GPU with many tokens
    checkpoint_every: Count = 20  # steps between cuts
    keep_checkpoints: Count = 2  # older ones are removed
    step_deadline_s: Seconds = 120.0  # a step that takes longer ends the run
    parallel: Parallel = Parallel()  # how the trained model is spread


class Weights(Section):
    """How a version travels from trainer to engine, and how its arrival is proven."""

    carrier: Literal["memory", "blob"] = "memory"  # shared memory of one host, or a folder or S3
    url: str = ""  # for `blob`: a folder or s3://bucket/prefix; empty is RUN/weights
    chunk_bytes: Count = 1 << 20  # one digest each
    probe_prompts: Count = 4  # random token rows whose log-probabilities must arrive
    probe_tokens: Count = 16  # of each
    probe_tolerance: Annotated[float, Field(gt=0)] = 1e-3  # largest difference that still counts as equal
    refresh_deadline_s: Seconds = 30.0  # an engine that takes longer ends the run


class Runtime(Section):
    """Where workers live."""

    kind: Literal["local", "inline"] = "local"  # a process per worker, or all in this one, deterministically
    threads: Count = 1  # torch threads of each worker


class Recipe(Section):
    """A whole run. Every section has defaults that work on two CPU cores."""

    run: Run = Run()
    model: Model = Model()
    env: Env = Env()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    engine: Engine = Engine()
    buffer: Buffer = Buffer()
    loss: Loss = Loss()
    train: Train = Train()
    weights: Weights = Weights()
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _ranks_have_processes(self) -> Self:
        for name, parallel in (("engine", self.engine.parallel), ("train", self.train.parallel)):
            if self.runtime.kind == "inline" and parallel.ranks > 1:
                raise ValueError(
                    f"runtime.kind = 'inline' is one process, {name}.parallel has {parallel.ranks} ranks;"
                    " use runtime.kind = 'local'"
                )
        return self

    @model_validator(mode="after")
    def _signal_needs_company(self) -> Self:
        if self.rollout.episodes == 1 and self.buffer.no_signal == "drop":
            raise ValueError(
                "rollout.episodes = 1 with buffer.no_signal = 'drop': one episode has none to be compared with, so"
                " every group would be dropped; ask for at least 2 episodes"
            )
        return self


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


R = TypeVar("R", bound=Section)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `section.key=value` overrides (values are TOML; a bare word is a string)."""
    return _check(Recipe, _read(path, overrides))


def load_sft_recipe(path: Path, overrides: Sequence[str] = ()) -> SftRecipe:
    """The same for a recipe that makes a model by supervised training."""
    return _check(SftRecipe, _read(path, overrides))


def check_section(kind: type[R], tree: Mapping[str, Any]) -> R:
    """One section from plain values, or the key that is wrong."""
    return _check(kind, tree)


def check_recipe(tree: Mapping[str, Any]) -> Recipe:
    """Turn a tree of plain values into a `Recipe`, or say exactly which key is wrong."""
    return _check(Recipe, tree)


def _read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"recipe {str(path)!r} does not exist; see recipes/ for ones to start from") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise ConfigError(f"recipe {str(path)!r} is not TOML: {fault}") from None
    for override in overrides:
        _apply(tree, override)
    return tree


def _check(kind: type[R], tree: Mapping[str, Any]) -> R:
    try:
        # By way of JSON, since JSON's rules fit TOML: a list may stand for a tuple, and nothing else is converted.
        return kind.model_validate_json(json.dumps(tree))
    except TypeError as fault:
        raise ConfigError(f"a recipe holds numbers, strings, booleans, lists and tables only: {fault}") from None
    except ValidationError as fault:
        raise ConfigError("\n".join(_explain(kind, error) for error in fault.errors())) from None


def recipe_toml(recipe: Recipe) -> str:
    """The recipe as TOML, every value written out: what a run really used."""
    lines = []
    for name, section in recipe.model_dump(mode="json").items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml(value)}" for key, value in section.items()]
        lines.append("")
    return "\n".join(lines)


def _apply(tree: dict[str, Any], override: str) -> None:
    path, found, text = override.partition("=")
    keys = path.strip().split(".")
    if not found or len(keys) < 2 or not all(keys):
        raise ConfigError(f"--set {override!r}: write section.key=value, such as buffer.max_age=0")
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {key!r} is a value, not a section")
    node[keys[-1]] = _parse(text.strip())


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(kind: type[BaseModel], error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if not path:
        return str(error["ctx"]["error"])
    if error["type"] == "value_error":  # of one of our validators, which says all there is to say
        return f"{path}: {error['ctx']['error']}"
    if error["type"] == "extra_forbidden":
        return f"unknown key {path!r}{_nearest(kind, error['loc'])}"
    return f"{path} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _nearest(section: type[BaseModel], loc: tuple[Any, ...]) -> str:
    for part in loc[:-1]:
        inner = section.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ""
        section = inner
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(names)}"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value)
