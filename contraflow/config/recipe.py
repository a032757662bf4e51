"""The sections of a run, and the `Recipe` that holds them all."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from contraflow.config.alarms import Alarms
from contraflow.config.base import Compute, Count, Decay, Device, Seconds, Section, Share
from contraflow.config.cluster import Cluster
from contraflow.config.critic import Critic
from contraflow.config.curriculum import Curriculum
from contraflow.config.engine import Engine, Parallel
from contraflow.config.judge import Judge
from contraflow.config.loss import Loss
from contraflow.config.preference import Scorer
from contraflow.config.sandbox import Sandbox


class Run(Section):
    """What a run is called, how long it goes on and what it writes."""

    seed: int = 0  # of everything random in the run
    steps: Count = 100  # in all, those before a resume included
    eval_every: Count = 10  # steps between looks at held-out tasks
    eval_tasks: Annotated[int, Field(ge=0)] = 256  # 0: never look
    eval_samples: Count = 1  # answers to each of them; with several, pass@k is told too
    eval_temperature: Annotated[float, Field(ge=0)] = 0.0  # of these answers; 0 is greedy, which wants 1 sample
    stop_at_accuracy: Share = 0.0  # end early once held-out accuracy reaches it; 0: never
    keep_episodes: Annotated[int, Field(ge=0)] = 4  # groups a step written to episodes.jsonl for the report
    mismatch_every: Annotated[int, Field(ge=0)] = 0  # steps between looks at where log-ratios come from; 0: never
    mismatch_tokens: Count = 512  # sampled tokens that such a look scores again
    stall_s: Seconds = 120.0  # no wait in the loop may last longer; then the run stops and says who waited for what
    max_bad_steps: Count = 3  # steps in a row with a non-finite loss before the run stops
    restarts: Annotated[int, Field(ge=0)] = (
        3  # from the last cut when trainer or buffer died, in a row without a newer one
    )


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

    parts: dict[str, float] = {"correct": 1.0}  # a shipped one (see docs/environment.md), or your own
    correct: str = "correct"  # the part that says whether an answer is right; held-out accuracy is its mean
    sandbox: Sandbox = Sandbox()  # where `math`, `code` and `code_share` run programs
    judge: Judge = Judge()  # who is asked by the part `judge`
    model: Scorer = Scorer()  # the reward model that is asked by the part `model`


class Rollout(Section):
    """How tasks become groups of episodes."""

    workers: Count = 1  # processes, each with an engine of its own
    episodes: Count = 8  # G: episodes of one group
    max_new_tokens: Count = 16  # per episode, over all its turns
    max_turns: Count = 1  # model turns per episode
    temperature: Annotated[float, Field(gt=0)] = 1.0  # of sampling; the trainer computes its ratios at the same one
    concurrency: Count = 64  # groups a worker plays at once
    group_deadline_s: Seconds = 60.0  # a group that takes longer is overdue
    overdue: Literal["repose", "continue", "partial", "drop"] = (
        "repose"  # posed again, from the start or from where it was; trained as far as it is whole; or dropped
    )
    continue_from: Annotated[int, Field(ge=0)] = (
        8  # sampled tokens from which an unfinished episode goes on elsewhere; one with fewer begins anew; 0: all do
    )
    grace_s: Seconds = 30.0  # a worker told to leave finishes what it can by then; the rest goes on elsewhere
    replace: bool = True  # start another worker in place of one that left


class Buffer(Section):
    """The window and the tickets: how old a trained token may be, and how much may be in flight."""

    groups_per_step: Count = 16  # P
    max_age: Annotated[int, Field(ge=0)] = 2  # eta; 0 is the synchronous trainer
    expiry: Literal["hold", "mask", "repose"] = "hold"  # what happens to a group about to expire
    no_signal: Literal["drop", "keep"] = "drop"  # groups whose episodes all earned the same
    dead_line: Literal["train", "repose"] = "train"  # groups of versions a restart undid, if young enough to train
    keep_payloads: Literal["until_cut", "all"] = "until_cut"  # of trained groups; all: they can be trained again
    curriculum: Curriculum = Curriculum()  # which tasks are left out before they are sampled

    @property
    def tickets(self) -> int:
        """Groups in flight at most: (eta + 1) * P."""
        return (self.max_age + 1) * self.groups_per_step


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
    routing: Literal["own", "r2", "r3"] = (
        "own"  # whose experts: its routers', r2 those of a step's first pass, r3 those the engine recorded
    )
    missing_routes: Literal["own", "drop", "refuse"] = (
        "own"  # r3 where an engine gave none: the router's own, sample left out, run ended
    )
    freeze_router: bool = False  # routers stay as they are; what they are given still changes
    compile: Literal["none", "blocks"] = "none"  # blocks: what lies between matmuls; pays on a GPU with many tokens
    offload: Literal["none", "optimizer", "all"] = "none"  # to the host between steps: its moments, or weights too
    checkpoint_every: Count = 20  # steps between cuts
    exact_checkpoints: bool = False  # a cut waits until it holds what is under way; a resume goes on from just there
    keep_checkpoints: Count = 2  # older ones are removed
    checkpoint_url: str = ""  # a folder or s3://bucket/prefix of this run alone; empty is RUN/checkpoints
    checkpoint_deadline_s: Seconds = 300.0  # a cut that takes longer to write ends the run
    step_deadline_s: Seconds = 120.0  # a step that takes longer ends the run
    parallel: Parallel = Parallel()  # how the trained model is spread


class Weights(Section):
    """How a version travels from trainer to engine, and how its arrival is proven."""

    carrier: Literal["memory", "blob", "collective", "ipc"] = "memory"  # see docs/weights.md
    url: str = ""  # for `blob`: a folder or s3://bucket/prefix; empty is RUN/weights
    chunk_bytes: Count = 1 << 20  # one digest each
    dtype: Literal["float32", "bfloat16", "float8"] = "float32"  # as which weights travel; router and head stay float32
    full_every: Count = 1  # versions from one that travels whole to the next; those between travel as what changed
    bucket_bytes: Annotated[int, Field(ge=64, le=1 << 29)] = 1 << 26  # the same for `collective` and `ipc`
    probe_prompts: Count = 4  # random token rows whose log-probabilities must arrive
    probe_tokens: Count = 16  # of each
    probe_tolerance: Annotated[float, Field(gt=0)] = 1e-3  # largest difference that still counts as equal
    refresh_deadline_s: Seconds = 30.0  # an engine that takes longer ends the run

    @property
    def plain(self) -> Compute:
        """As which weights travel that are neither router nor head nor, in float8, experts' matrices."""
        return "float32" if self.dtype == "float32" else "bfloat16"

    @property
    def in_parts(self) -> bool:
        """Whether each rank of an engine is brought its own part, and no rank holds a version whole."""
        return self.carrier in ("collective", "ipc")


class Runtime(Section):
    """Where workers live."""

    kind: Literal["local", "inline", "ray"] = (
        "local"  # a process per worker here; all in this process, deterministically; or a process each on a Ray cluster
    )
    threads: Count = 1  # torch threads of each worker
    hang_s: Annotated[float, Field(ge=5)] = (
        60.0  # a worker without a sign of life for so long is killed, its stacks kept
    )
    notice_url: Annotated[str, Field(pattern=r"^(http://[^/\s]+/?)?$")] = (
        ""  # metadata service to ask whether this machine is to go, `http://169.254.169.254` on EC2; empty: none
    )
    notice_every_s: Seconds = 5.0  # between two such questions; an answer that takes longer is none


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
    critic: Critic = Critic()
    train: Train = Train()
    weights: Weights = Weights()
    alarms: Alarms = Alarms()
    runtime: Runtime = Runtime()
    cluster: Cluster = Cluster()  # of a run on EKS; one machine needs none

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
    def _exact_cuts_hold_what_is_under_way(self) -> Self:
        if self.train.exact_checkpoints and self.rollout.continue_from == 0:
            raise ValueError(
                "train.exact_checkpoints with rollout.continue_from = 0: every cut would throw away all that is under"
                " way; set rollout.continue_from to 1 or more, or leave exact_checkpoints out"
            )
        return self

    @model_validator(mode="after")
    def _mismatch_is_looked_at_through_all_layers(self) -> Self:
        if self.run.mismatch_every and self.train.parallel.pp > 1:
            raise ValueError(
                f"run.mismatch_every = {self.run.mismatch_every} with train.parallel.pp = {self.train.parallel.pp}: a"
                " look follows an engine's cache through all layers, which pipeline stages have on several ranks; use"
                " pp = 1 (dp, ep, tp and cp may be any), or mismatch_every = 0"
            )
        return self

    @model_validator(mode="after")
    def _bitwise_is_of_both_pools(self) -> Self:
        wanted = {"device": "cpu", "compute": "float32", "compile": "none"}
        wrong = [
            f"train.{key} = {getattr(self.train, key)!r}, use {one!r}"
            for key, one in wanted.items()
            if getattr(self.train, key) != one
        ]
        if self.train.parallel.ranks > 1:
            wrong.append(f"train.parallel has {self.train.parallel.ranks} ranks, use one")
        if self.engine.bitwise and wrong:
            raise ValueError(f"engine.bitwise = true with {'; '.join(wrong)}; or set engine.bitwise = false")
        return self

    @model_validator(mode="after")
    def _servers_have_time_and_processes(self) -> Self:
        if not self.engine.served:
            return self
        server, workers = self.engine.server, self.rollout.workers
        if self.weights.dtype == "float8":
            raise ValueError(
                f"weights.dtype = 'float8' with engine.kind = {self.engine.kind!r}: servers load folders without "
                "scales; send 'bfloat16' or 'float32'"
            )
        if self.weights.refresh_deadline_s < server.start_deadline_s:
            raise ValueError(
                f"weights.refresh_deadline_s = {self.weights.refresh_deadline_s} is less than "
                f"engine.server.start_deadline_s = {server.start_deadline_s}: a first refresh waits for its servers"
            )
        if server.urls and len(server.urls) % workers:
            raise ValueError(
                f"engine.server.urls has {len(server.urls)} servers for rollout.workers = {workers}: each worker needs "
                "as many of its own"
            )
        return self

    @model_validator(mode="after")
    def _weights_arrive_as_computed(self) -> Self:
        if self.weights.dtype != "float32" and self.engine.compute == "float32":
            raise ValueError(
                f"weights.dtype = {self.weights.dtype!r} with engine.compute = 'float32': the engine would compute with"
                " rounded weights and fail the proof of every version; use engine.compute = 'bfloat16', or send"
                " 'float32'"
            )
        return self

    @model_validator(mode="after")
    def _replayed_routes_are_recorded(self) -> Self:
        if self.train.routing == "r3" and not self.engine.routes:
            raise ValueError(
                "train.routing = 'r3' with engine.routes = false: no experts would come with the samples; set"
                " engine.routes = true, or use 'r2', which needs none"
            )
        return self

    @model_validator(mode="after")
    def _float8_leaves_from_one_rank(self) -> Self:
        ranks, carrier = self.train.parallel.ranks, self.weights.carrier
        if self.weights.dtype == "float8" and (ranks > 1 or carrier not in ("memory", "blob")):
            raise ValueError(
                f"weights.dtype = 'float8' with {ranks} trainer ranks and weights.carrier = {carrier!r}: experts are"
                " rounded where they are whole; use one rank and 'memory' or 'blob', or send 'bfloat16'"
            )
        return self

    @model_validator(mode="after")
    def _parts_have_a_way(self) -> Self:
        if not self.weights.in_parts:
            return self
        wrong = []
        if self.weights.carrier == "ipc" and "cpu" in (self.train.device, self.engine.device):
            wrong.append(
                f"train.device = {self.train.device!r} and engine.device = {self.engine.device!r}: 'ipc' is for GPUs"
            )
        if self.runtime.kind == "inline":
            wrong.append("runtime.kind = 'inline' is one process; use 'local'")
        if self.engine.kind != "native":
            wrong.append(f"engine.kind = {self.engine.kind!r} takes no parts of tensors; use 'native'")
        if self.engine.replace_every:
            wrong.append(f"engine.replace_every = {self.engine.replace_every} moves experts between ranks; use 0")
        if self.weights.full_every != 1:
            wrong.append(f"weights.full_every = {self.weights.full_every} makes deltas of whole versions; use 1")
        if wrong:
            raise ValueError(
                f"weights.carrier = {self.weights.carrier!r} brings each rank its part: "
                + "; ".join(wrong)
                + "; or use another carrier"
            )
        return self

    @model_validator(mode="after")
    def _greedy_answers_are_all_the_same(self) -> Self:
        if self.run.eval_samples > 1 and self.run.eval_temperature == 0:
            raise ValueError(
                f"run.eval_samples = {self.run.eval_samples} with run.eval_temperature = 0: greedy answers to a task"
                " are all the same; use 1 sample, or a temperature above 0"
            )
        return self

    @model_validator(mode="after")
    def _signal_needs_company(self) -> Self:
        if self.loss.compares and self.rollout.episodes == 1:
            raise ValueError(
                "rollout.episodes = 1: one episode has none of its task to be compared with, so every advantage would"
                f" be 0 and nothing learned; ask for at least 2, or for another loss.advantages than"
                f" {self.loss.advantages!r}"
            )
        if not self.loss.compares and self.buffer.no_signal == "drop":
            raise ValueError(
                f"buffer.no_signal = 'drop' with loss.advantages = {self.loss.advantages!r}: groups whose episodes all"
                " earned the same teach it too; use buffer.no_signal = 'keep'"
            )
        return self

    @model_validator(mode="after")
    def _critics_are_asked(self) -> Self:
        if self.loss.advantages != "gae" and self.critic != Critic():
            raise ValueError(
                f"[critic] with loss.advantages = {self.loss.advantages!r}: there is no critic, so its settings would"
                " do nothing; use loss.advantages = 'gae', or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _judges_have_time(self) -> Self:
        reward, step_s = self.reward, self.env.step_deadline_s
        for name, deadline_s in (("judge", reward.judge.deadline_s), ("model", reward.model.deadline_s)):
            if name in (*reward.parts, reward.correct) and step_s < deadline_s:
                raise ValueError(
                    f"env.step_deadline_s = {step_s:g} with reward.{name}.deadline_s = {deadline_s:g}: rewards are"
                    " given up after env.step_deadline_s, so it would be cut off; raise the one or lower the other"
                )
        return self
