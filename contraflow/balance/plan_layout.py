"""What fits into a GPU's memory, and which layout of a trainer or an engine is the fastest that does.

Sizes in bytes of one GPU. A trainer keeps 16 bytes a parameter (fp32 weights, gradients, two moments), shared out over
all its ranks. An engine keeps bf16 weights, and gives what is left to keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from contraflow.balance.plan_cost import Cost, Place, decode_cost, prefill_cost, train_cost
from contraflow.balance.plan_sizes import VALUE, Sizes
from contraflow.config import Parallel
from contraflow.errors import ConfigError
from contraflow.parallel.layout import check_fit

STATE = 16  # bytes of one trained parameter
POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL_TOKENS = 8192  # of one prefill, a rank


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step takes: `groups` of `episodes` with a mean prompt and answer of so many tokens, at most `age` old."""

    prompt: int
    output: int
    groups: int
    episodes: int
    age: int
    batch_tokens: int
    passes: int = 1  # over a step's tokens
    updates: int = 1  # of each pass

    @property
    def tokens(self) -> int:
        """That a step trains, prompts among them."""
        return self.groups * self.episodes * (self.prompt + self.output)

    @property
    def in_flight(self) -> int:
        """Sequences that tickets let be generated at once."""
        return (self.age + 1) * self.groups * self.episodes


@dataclass(frozen=True, kw_only=True)
class Engines:
    """So many engines of one layout: tokens a second of all, and what a step of one is made of."""

    layout: Parallel
    count: int
    batch: float  # sequences at once on each data-parallel rank
    room: float  # tokens of cache there
    tokens_s: float
    prefill_tokens_s: float
    decode: Cost
    prefill: Cost
    asked: float  # sequences in flight

    @property
    def short(self) -> bool:
        """Whether the cache, and not the tickets, says how many sequences are decoded at once."""
        return self.batch * self.count * self.layout.dp < 0.999 * self.asked


def engine_bytes(sizes: Sizes, layout: Parallel) -> float:
    """Weights of one rank of an engine."""
    return VALUE * (sizes.rest / layout.tp + sizes.experts / layout.ep)


def cache_room(place: Place, layout: Parallel) -> float:
    """Tokens of context that one data-parallel rank of an engine can keep; negative: weights alone do not fit."""
    free = place.gpu.memory_gb * 1e9 * (1 - place.factors.memory_kept) - engine_bytes(place.sizes, layout)
    return free / (place.sizes.cache_bytes / layout.tp)


def trainer_bytes(sizes: Sizes, layout: Parallel, batch_tokens: int) -> float:
    """State, gathered weights of two layers, and activations of one rank of a trainer."""
    c, tokens = sizes.config, batch_tokens / (layout.cp * layout.tp)
    ffn = c.top_k * (3 * c.expert_ffn + 2 * c.dim) if c.experts else 3 * c.ffn
    layer = VALUE * (8 * c.dim + 2 * (c.heads + 2 * c.kv_heads) * c.head_dim + ffn) * tokens
    edges = VALUE * c.dim * tokens * c.layers
    acts = edges + 2 * layer if layout.recompute == "layer" else c.layers * layer
    gathered = 0.0
    if layout.dp * layout.cp > 1:
        gathered = 2 * VALUE * (sizes.rest / layout.tp + sizes.experts / layout.ep) / c.layers
    return STATE * sizes.parameters / layout.ranks + gathered + acts


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def _fits(place: Place, layout: Parallel) -> bool:
    try:
        check_fit(place.sizes.config, layout)
    except ConfigError:
        return False
    return True


def engine_layouts(place: Place, most: int) -> Iterator[Parallel]:
    """Layouts of one engine of at most `most` GPUs that the model allows, small ones first."""
    for gpus in POWERS:
        for tp in (tp for tp in (1, 2, 4, 8) if gpus <= most and tp <= min(gpus, place.instance.gpus)):
            for ep in (ep for ep in POWERS if gpus % ep == 0 and ep in (1, gpus, place.instance.gpus)):
                layout = Parallel(dp=gpus // tp, tp=tp, ep=ep)
                if _fits(place, layout):
                    yield layout


def trainer_layouts(place: Place, gpus: int, work: Workload) -> Iterator[Parallel]:
    """Layouts of a trainer of `gpus` GPUs that the model allows."""
    for pp in (1, 2, 4, 8):
        for tp in (tp for tp in (1, 2, 4, 8) if tp <= place.instance.gpus):
            for cp in (cp for cp in (1, 2, 4, 8) if gpus % (pp * tp * cp) == 0):
                for ep in (ep for ep in POWERS if (gpus // pp) % ep == 0):
                    dp = gpus // (pp * tp * cp)
                    if dp <= work.groups * work.episodes and _fits(place, Parallel(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep)):
                        yield Parallel(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep)
                        yield Parallel(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, recompute="layer")


def engines_of(place: Place, layout: Parallel, gpus: int, work: Workload) -> Engines | None:
    """What `gpus` GPUs generate as engines of this layout; None if not even one sequence fits."""
    count, room = gpus // layout.ranks, cache_room(place, layout)
    longest = work.prompt + work.output
    if not count or room < longest:
        return None
    batch = min(work.in_flight / (count * layout.dp), room / longest)
    decode = decode_cost(place, layout, batch, work.prompt + work.output / 2)
    prefill = prefill_cost(place, layout, PREFILL_TOKENS, work.prompt)
    fed = batch * work.prompt / (work.episodes * work.output)  # prompt tokens for each step: a group shares its prompt
    return Engines(
        layout=layout,
        count=count,
        batch=batch,
        room=room,
        tokens_s=count * layout.dp * batch / (decode.seconds + fed * prefill.seconds / PREFILL_TOKENS),
        prefill_tokens_s=count * layout.dp * PREFILL_TOKENS / prefill.seconds,
        decode=decode,
        prefill=prefill,
        asked=work.in_flight,
    )


def all_engines(place: Place, gpus: int, work: Workload) -> list[Engines]:
    """Engines of every layout that fits, the fastest first; GPUs that would slow them are left idle."""
    found = []
    for layout in engine_layouts(place, gpus):
        counts = {gpus // layout.ranks} | {n for n in POWERS if n * layout.ranks <= gpus}
        of = [engines_of(place, layout, n * layout.ranks, work) for n in counts]
        fitting = [one for one in of if one is not None]
        if fitting:
            found.append(max(fitting, key=lambda one: one.tokens_s))
    return sorted(found, key=lambda one: -one.tokens_s)


def step_cost(place: Place, layout: Parallel, work: Workload) -> tuple[float, Cost]:
    """Seconds that a trainer takes for a step, and what one of its updates is made of."""
    cost = train_cost(place, layout, work.tokens / work.updates, work.prompt + work.output, work.batch_tokens)
    return cost.seconds * work.updates * work.passes, cost


def all_trainers(place: Place, gpus: int, work: Workload) -> list[tuple[Parallel, float, Cost]]:
    """Layouts that fit, with seconds of a step, the fastest first."""
    memory = place.gpu.memory_gb * 1e9 * (1 - place.factors.memory_kept)
    found = [
        (layout, *step_cost(place, layout, work))
        for layout in trainer_layouts(place, gpus, work)
        if trainer_bytes(place.sizes, layout, work.batch_tokens) <= memory
    ]
    return sorted(found, key=lambda one: one[1])


def shown(layout: Parallel) -> str:
    """Its sizes, those of 1 left out."""
    sizes = [f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "pp", "cp", "ep") if getattr(layout, name) > 1]
    return ", ".join(sizes + ["recompute"] * (layout.recompute == "layer")) or "one GPU"
