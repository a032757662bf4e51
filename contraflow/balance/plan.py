"""How a run's nodes are best used: memory, speeds of layouts, the split between the pools, refresh, cost, and why.

Takes a recipe, a model's shape, a workload and factors; gives a `Plan`. Pure: nothing is measured or started.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from contraflow.balance.plan_cost import Cost, Place, refresh_seconds, to_experts, usable
from contraflow.balance.plan_factors import Factors, read_factors
from contraflow.balance.plan_layout import (
    PREFILL_TOKENS,
    Engines,
    Workload,
    all_engines,
    all_trainers,
    cache_room,
    engine_bytes,
    engines_of,
    gigabytes,
    shown,
    step_cost,
    trainer_bytes,
)
from contraflow.balance.plan_sizes import Sizes
from contraflow.cluster.instances import Instance, find_instance
from contraflow.config import Parallel, Recipe, load_recipe
from contraflow.errors import ConfigError, ModelError
from contraflow.model.builtin import model_folder
from contraflow.model.families import ModelConfig

ROWS = 5  # layouts that a plan tells of, a pool
CARRIERS = ("collective", "broadcast", "blob")
STEPS = 1000


Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Machines of the two pools that a plan splits; `usd` an hour of one node, 0: not known."""

    train: Instance
    train_nodes: int
    rollout: Instance
    rollout_nodes: int
    usd: tuple[float, float] = (0.0, 0.0)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a plan: a thing, its value with unit, and what limits it."""

    what: str
    value: float
    unit: str
    detail: str
    why: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a plan says, section by section, each of rows."""

    model: str
    workload: str
    sections: dict[str, list[Row]]


def pools_of(recipe: Recipe, machines: str = "") -> Pools:
    """The pools of a recipe's cluster, or `machines` (TYPE:NODES) halved between both.

    Raises: ConfigError for an unknown instance, one without GPUs, and a pool of several nodes on one without EFA.
    """
    if machines:
        name, _, wanted = machines.partition(":")
        found, nodes = find_instance(name), int(wanted) if wanted.isdecimal() else 0
        if nodes < 2:
            raise ConfigError(
                f"--machines {machines!r} is not TYPE:NODES with 2 nodes or more, for trainer and engines, such as"
                " p5en.48xlarge:16"
            )
        price = found.usd_per_hour or 0.0
        half = nodes // 2
        pools = Pools(train=found, train_nodes=half, rollout=found, rollout_nodes=nodes - half, usd=(price, price))
    elif {"train", "rollout"} <= set(recipe.cluster.pools):
        train, rollout = (recipe.cluster.pools[name] for name in ("train", "rollout"))
        kinds = find_instance(train.instance), find_instance(rollout.instance)
        prices = [
            pool.usd_per_hour or (kind.usd_per_hour or 0.0 if pool.capacity == "on_demand" else 0.0)
            for pool, kind in zip((train, rollout), kinds, strict=True)
        ]
        pools = Pools(
            train=kinds[0],
            train_nodes=train.nodes,
            rollout=kinds[1],
            rollout_nodes=rollout.nodes,
            usd=(prices[0], prices[1]),
        )
    else:
        raise ConfigError(
            "the recipe has no cluster.pools for train and rollout: name machines, such as --machines p5en.48xlarge:16"
        )
    check_pools(recipe, pools)
    return pools


def check_pools(recipe: Recipe, pools: Pools) -> None:
    """Raise ConfigError for a pool without GPUs, or one whose ranks span nodes that have no EFA."""
    for name, kind, count, ranks in (
        ("train", pools.train, pools.train_nodes, pools.train_nodes * pools.train.gpus),
        ("rollout", pools.rollout, pools.rollout_nodes, recipe.engine.parallel.ranks),
    ):
        if not kind.gpus:
            raise ConfigError(f"pool {name!r}: instance {kind.name!r} has no GPU; name one with, such as p5en.48xlarge")
        if ranks > kind.gpus and not kind.efa:
            raise ConfigError(
                f"pool {name!r}: {ranks} ranks take {count} nodes of {kind.name!r}, which has no EFA: ranks of several"
                " nodes exchange tokens and weights over it; use one node, or an instance with EFA"
            )


def check_layouts(recipe: Recipe, train: Place, rollout: Place, pools: Pools, work: Workload) -> None:
    """Refuse layouts that a recipe names (more than one rank) and that cannot fit.

    Raises: ConfigError with the bytes over, and the fastest layout that fits.
    """
    engine, trainer = recipe.engine.parallel, recipe.train.parallel
    longest = work.prompt + work.output
    if engine.ranks > 1 and cache_room(rollout, engine) < longest:
        need = engine_bytes(rollout.sizes, engine) + longest * rollout.sizes.cache_bytes / engine.tp
        most = pools.rollout_nodes * rollout.instance.gpus
        best = [shown(one.layout) for one in all_engines(rollout, most, work)]
        raise ConfigError(_over("engine.parallel", engine, rollout, need, best))
    need = trainer_bytes(train.sizes, trainer, work.batch_tokens)
    if trainer.ranks > 1 and need > _room(train):
        gpus = pools.train_nodes * train.instance.gpus
        best = [shown(layout) for layout, _, _ in all_trainers(train, gpus, work)]
        raise ConfigError(_over("train.parallel", trainer, train, need, best))


def _room(place: Place) -> float:
    return place.gpu.memory_gb * 1e9 * (1 - place.factors.memory_kept)


def _over(name: str, layout: Parallel, place: Place, need: float, best: Sequence[str]) -> str:
    over = need - _room(place)
    fits = f"what fits on this pool: {best[0]}" if best else "nothing fits on this pool: add nodes"
    return (
        f"{name} = {shown(layout)} needs {gigabytes(need)} on each {place.gpu.name}, {gigabytes(over)}"
        f" ({over:.0f} bytes) more than the {gigabytes(_room(place))} it can use; {fits}"
    )


def plan(recipe: Recipe, sizes: Sizes, work: Workload, pools: Pools, factors: Factors) -> Plan:
    """The whole plan. Raises: ConfigError when a named layout, or every layout, does not fit."""
    train = Place(sizes=sizes, instance=pools.train, factors=factors)
    rollout = Place(sizes=sizes, instance=pools.rollout, factors=factors)
    check_layouts(recipe, train, rollout, pools, work)
    gpus = pools.train_nodes * pools.train.gpus, pools.rollout_nodes * pools.rollout.gpus
    trainers, engines = all_trainers(train, gpus[0], work), all_engines(rollout, gpus[1], work)
    if not trainers:
        least = trainer_bytes(sizes, Parallel(dp=gpus[0], recompute="layer"), work.batch_tokens)
        raise ConfigError(
            f"no trainer layout fits on {gpus[0]} {train.gpu.name}: shared out evenly it is {gigabytes(least)} on each,"
            f" {gigabytes(max(least - _room(train), 0))} over; add nodes to the pool 'train', or lower"
            " train.tokens_per_batch"
        )
    if not engines:
        raise ConfigError(
            f"no engine layout fits on {gpus[1]} {rollout.gpu.name} with sequences of {work.prompt + work.output}"
            f" tokens: weights are {gigabytes(2 * sizes.parameters)}; add nodes to the pool 'rollout'"
        )
    layout, train_s, _ = trainers[0]
    sections = {
        "engines": [
            *(_engine_row(one) for one in engines[:ROWS]),
            *(_engine_row(one, "recipe: ") for one in _named_engines(recipe, rollout, gpus[1], work)),
        ],
        "trainer": [
            *(_trainer_row(one, sizes, work) for one in trainers[:ROWS]),
            *(_trainer_row(one, sizes, work, "recipe: ") for one in _named_trainer(recipe, train, work)),
        ],
        "experts": [
            *_phase("train", train, layout, work.batch_tokens / (layout.cp * layout.tp), 4),
            *_phase("prefill", rollout, engines[0].layout, PREFILL_TOKENS / engines[0].layout.tp, 2),
            *_phase("decode", rollout, engines[0].layout, engines[0].batch / engines[0].layout.tp, 2),
        ],
        "refresh": [
            Row(
                what=carrier,
                value=refresh_seconds(train, carrier, layout.ranks, pools.rollout_nodes),
                unit="s",
                detail=f"{gigabytes(2 * sizes.parameters)} as bf16",
                why={
                    "collective": "each trainer GPU sends its part: bound by what one sender reaches",
                    "broadcast": "one GPU sends it all: bound by its link",
                    "blob": "through an object store: bound by what one node reads of it",
                }[carrier],
            )
            for carrier in CARRIERS
        ],
        "split": _split(train, rollout, pools, work, (train_s, engines[0])),
    }
    return Plan(
        model=f"{sizes.config.family}, {sizes.parameters / 1e9:.1f}B parameters, {sizes.active / 1e9:.1f}B at work,"
        f" {sizes.cache_bytes:,} bytes of cache a token",
        workload=f"{work.groups} groups of {work.episodes}, prompt {work.prompt}, answer {work.output} tokens on"
        f" average, eta {work.age}: {work.tokens:,} tokens a step, {work.in_flight:,} sequences in flight",
        sections=sections,
    )


def _named_engines(recipe: Recipe, place: Place, gpus: int, work: Workload) -> list[Engines]:
    """Those of the layout that the recipe names, if it does."""
    layout = recipe.engine.parallel
    made = engines_of(place, layout, gpus, work) if layout.ranks > 1 else None
    return [made] if made is not None else []


def _named_trainer(recipe: Recipe, place: Place, work: Workload) -> list[tuple[Parallel, float, Cost]]:
    """The same for the trainer."""
    layout = recipe.train.parallel
    return [(layout, *step_cost(place, layout, work))] if layout.ranks > 1 else []


def _trainer_row(one: tuple[Parallel, float, Cost], sizes: Sizes, work: Workload, whose: str = "") -> Row:
    layout, seconds, cost = one
    held = gigabytes(trainer_bytes(sizes, layout, work.batch_tokens))
    return Row(what=whose + shown(layout), value=seconds, unit="s a step", detail=f"{held} a GPU", why=cost.reason)


def _engine_row(one: Engines, whose: str = "") -> Row:
    cut = "; the cache, not the tickets, bounds the batch" if one.short else ""
    return Row(
        what=f"{whose}{one.count} x {shown(one.layout)}",
        value=one.tokens_s,
        unit="tokens/s",
        detail=f"prefill {one.prefill_tokens_s:,.0f} tokens/s, batch {one.batch:.0f}, room for {one.room:,.0f} tokens",
        why=f"decode {one.decode.reason}; prefill {one.prefill.reason}{cut}",
    )


def _phase(name: str, place: Place, layout: Parallel, tokens: float, crossings: int) -> list[Row]:
    """The backend of a phase, beside what the others would take."""
    if layout.ep == 1:
        return []
    found = {b: to_experts(place, layout.ep, tokens, crossings, b)[0] for b in usable(place, layout.ep)}
    best, *others = sorted(found, key=found.__getitem__)
    return [
        Row(
            what=name,
            value=1000 * found[best],
            unit="ms",
            detail=f"{best}; {tokens:,.0f} tokens a rank, ep {layout.ep}",
            why="the others: " + (", ".join(f"{b} {1000 * found[b]:.1f} ms" for b in others) or "none can run here"),
        )
    ]


def _split(train: Place, rollout: Place, pools: Pools, work: Workload, given: tuple[float, Engines]) -> list[Row]:
    """The recipe's split, and the best one of as many nodes if both pools are of one type."""
    rows = [_split_row("as given", pools, work, *given, train)]
    nodes = pools.train_nodes + pools.rollout_nodes
    if pools.train != pools.rollout:
        return rows
    made = fastest([all_engines(rollout, n * rollout.instance.gpus, work)[:1] for n in range(1, nodes)], _slowness)
    trained = fastest([all_trainers(train, n * train.instance.gpus, work)[:1] for n in range(1, nodes)], _seconds)
    choices = [
        (_step(train, pools, work, trainer[1], engines), n + 1, trainer[1], engines)
        for n, (engines, trainer) in enumerate(zip(made, reversed(trained), strict=True))
        if engines and trainer
    ]
    best = min(choices, key=lambda choice: choice[0], default=None)
    if best:
        moved = Pools(
            train=pools.train, train_nodes=nodes - best[1], rollout=pools.rollout, rollout_nodes=best[1], usd=pools.usd
        )
        rows.append(_split_row("in balance", moved, work, best[2], best[3], train))
    return rows


def fastest(found: list[list[Found]], slowness: Callable[[Found], float]) -> list[Found | None]:
    """For each count of nodes the fastest of what as many or fewer can do: nodes that do not divide well stay idle."""
    best: list[Found | None] = []
    for here in found:
        known = here + [one for one in best[-1:] if one is not None]
        best.append(min(known, key=slowness, default=None))
    return best


def _slowness(engines: Engines) -> float:
    return -engines.tokens_s


def _seconds(trainer: tuple[Parallel, float, Cost]) -> float:
    return trainer[1]


def _step(train: Place, pools: Pools, work: Workload, train_s: float, engines: Engines) -> float:
    made = work.groups * work.episodes * work.output / engines.tokens_s
    if work.age:
        return max(made, train_s)
    senders = pools.train_nodes * pools.train.gpus
    return made + train_s + refresh_seconds(train, "collective", senders, pools.rollout_nodes)


def _split_row(name: str, pools: Pools, work: Workload, train_s: float, engines: Engines, train: Place) -> Row:
    seconds = _step(train, pools, work, train_s, engines)
    made = work.groups * work.episodes * work.output / engines.tokens_s
    gpus = pools.train_nodes * pools.train.gpus + pools.rollout_nodes * pools.rollout.gpus
    hours = STEPS * seconds / 3600
    known = all(pools.usd)
    dollars = hours * (pools.train_nodes * pools.usd[0] + pools.rollout_nodes * pools.usd[1])
    cost = f"{dollars:,.0f} USD" if known else "cost not known: set usd_per_hour of both pools"
    waits = "engines" if made < train_s else "the trainer"
    why = f"generation {made:,.1f} s, training {train_s:,.1f} s: {waits} wait{'s' if waits != 'engines' else ''}"
    if not work.age:
        why = f"generation {made:,.1f} s, then training {train_s:,.1f} s, then a refresh: eta 0 overlaps nothing"
    return Row(
        what=f"{name}: {pools.train_nodes} train, {pools.rollout_nodes} rollout",
        value=seconds,
        unit="s a step",
        detail=f"{STEPS} steps: {STEPS * seconds * gpus:,.0f} GPU-seconds, {cost}",
        why=why,
    )


def read_plan(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    config: Path | None = None,
    machines: str = "",
    prompt: int = 0,
    answer: int = 0,
    factors: Path | None = None,
) -> Plan:
    """The plan of files, as the command line names them; sizes of 0 are the recipe's.

    Raises: ConfigError as `plan` does; ModelError for a config.json of a family that is not supported.
    """
    settings = load_recipe(recipe, list(overrides))
    shape = _shape(recipe, settings, config)
    output = answer or settings.rollout.max_new_tokens
    work = Workload(
        prompt=prompt or max(settings.engine.context_tokens - output, 1),
        output=output,
        groups=settings.buffer.groups_per_step,
        episodes=settings.rollout.episodes,
        age=settings.buffer.max_age,
        batch_tokens=settings.train.tokens_per_batch,
        passes=settings.train.epochs,
        updates=settings.train.updates,
    )
    if min(prompt, answer) < 0:
        raise ConfigError(f"--prompt {prompt} and --answer {answer} are tokens: at least 1, or 0 for the recipe's")
    sizes = Sizes.of(shape, latents=settings.engine.served)
    known = read_factors(factors) if factors else Factors()
    return plan(settings, sizes, work, pools_of(settings, machines), known)


def _shape(recipe: Path, settings: Recipe, config: Path | None) -> ModelConfig:
    """Of --config, else of cluster.model_config_file beside the recipe, else of the model's folder."""
    named = settings.cluster.model_config_file
    file = config or (recipe.parent / named if named else model_folder(settings.model.folder) / "config.json")
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise ConfigError(f"model config {file}: {fault}; name a config.json with --config") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"model config {file}: a {type(tree).__name__}, not an object; name a config.json")
    try:
        return ModelConfig.from_hf(tree)
    except ModelError as fault:
        raise ModelError(f"{file}: {fault}") from None


def lines(made: Plan) -> list[str]:
    """A table for people."""
    found = [f"model     {made.model}", f"workload  {made.workload}"]
    for name, rows in made.sections.items():
        found += ["", name]
        width = max([len(row.what) for row in rows], default=0)
        for row in rows:
            found.append(f"  {row.what:<{width}}  {row.value:>12,.1f} {row.unit}  {row.detail}")
            found.append(f"  {'':<{width}}  {row.why}")
    return found
