"""Whether a cluster's sizes add up, before anything is written.

Takes a `Site`, the model's shape if it is known, and what the cluster's nodes say if they are there. Each fault names
the key, its value, what is allowed and what to do.
"""

from collections.abc import Iterator, Mapping

from contraflow.cluster.site import MODELS, Ask, Site, in_storage
from contraflow.config import Parallel, PoolName
from contraflow.errors import ConfigError
from contraflow.model.families import ModelConfig
from contraflow.parallel.layout import check_fit
from contraflow.rewards.model import MODEL

NEEDED: tuple[PoolName, ...] = ("train", "rollout", "buffer", "control")
STEADY: tuple[PoolName, ...] = ("train", "buffer", "control")  # a run does not outlive these
NOTICE_S = 120  # from a Spot notice to the end of the machine
LEAST_GIB, LEAST_VCPU = 2, 1  # of a pod; below it, no process of ours starts


def check_site(
    site: Site,
    config: ModelConfig | None = None,
    nodes: Mapping[PoolName, Mapping[str, float]] | None = None,
) -> None:
    """Raise a ConfigError with a line for each fault, if there is one."""
    missing = [pool for pool in NEEDED if pool not in site.asks]
    if missing:
        raise ConfigError(
            f"cluster.pools has no {' and no '.join(missing)}: a run needs {', '.join(NEEDED)}; add"
            f" [cluster.pools.{missing[0]}] with its instance"
        )
    wrong = [*_pools(site), *_run(site), *_models(site), *_requests(site), *_network(site), *_seen(site, nodes or {})]
    for name, pool in (("train", "train"), ("engine", "rollout")):
        wrong += _spread(site, name, site.asks[pool])  # type: ignore[index]
    if config is not None:
        wrong += _model(site, config)
    if wrong:
        raise ConfigError("\n".join(wrong))


def _pools(site: Site) -> Iterator[str]:
    """Each pool has machines of its own, of a kind that stays as long as it must."""
    groups: dict[str, str] = {}
    blocks: dict[str, str] = {}
    for pool, ask in site.asks.items():
        here = f"cluster.pools.{pool}"
        if ask.group in groups:
            yield (
                f"{here}.group = {ask.group!r} is the node group of pool {groups[ask.group]!r} too: pools that share"
                " machines take GPUs and EFA interfaces from each other; give each a group of its own"
            )
        groups[ask.group] = pool
        block = ask.section.reservation
        if block and block in blocks:
            yield (
                f"{here}.reservation = {block!r} is that of pool {blocks[block]!r} too: which of them gets its machines"
                " would be chance; reserve a block for each"
            )
        blocks[block] = pool
        if ask.section.capacity == "spot" and pool in STEADY:
            yield (
                f"{here}.capacity = 'spot': a run ends with its {pool} machines; use 'on_demand' or 'block' (Spot is"
                " for rollout, reward and env)"
            )
        if ask.section.pods > 1 and pool != "env":
            yield f"{here}.pods = {ask.section.pods}: only servers of 'env' share a node; leave it at 1"
    grace = site.recipe.rollout.grace_s
    if site.asks["rollout"].section.capacity == "spot" and grace > NOTICE_S - 30:
        yield (
            f"rollout.grace_s = {grace:g} with cluster.pools.rollout.capacity = 'spot': a Spot machine is gone"
            f" {NOTICE_S} s after its notice; use at most {NOTICE_S - 30}"
        )


def _run(site: Site) -> Iterator[str]:
    """What holds only on one machine is not asked for."""
    recipe = in_storage(site.recipe)
    if recipe.runtime.kind == "inline":
        yield "runtime.kind = 'inline' is one process; leave it at its default: the objects start the run on Ray"
    if recipe.weights.carrier in ("memory", "ipc"):
        yield (
            f"weights.carrier = {recipe.weights.carrier!r} stays on one machine, and trainer and engines are on"
            " different ones; use 'collective' or 'blob'"
        )
    for key, url in (("train.checkpoint_url", recipe.train.checkpoint_url), ("weights.url", recipe.weights.url)):
        if url and not url.startswith(f"{recipe.cluster.storage}/"):
            yield (
                f"{key} = {url!r} is not below cluster.storage = {recipe.cluster.storage!r}, and pods may write nowhere"
                " else; leave it empty, or put it there"
            )
    if ".py:" in recipe.env.name:
        yield f"env.name = {recipe.env.name!r} is a file, which pods do not have; put it into the image as module:NAME"
    if recipe.engine.served and (recipe.engine.launch.nodes > 1 or recipe.engine.server.urls):
        yield (
            f"engine.kind = {recipe.engine.kind!r} over several nodes, or attached to by address: those servers are"
            " started by others (contraflow plan-engine), and no object is written for them; use engine.kind ="
            " 'native', or servers of one node, which the workers start"
        )


def _models(site: Site) -> Iterator[str]:
    """Models lie where pods find them, and a reward model has machines."""
    recipe = site.recipe
    folders = [("model.folder", recipe.model.folder)]
    if MODEL in recipe.reward.parts:
        folders.append(("reward.model.folder", recipe.reward.model.folder))
        if "reward" not in site.asks:
            yield (
                f"reward.parts has {MODEL!r}, a reward model, and cluster.pools has no reward: give it machines, in"
                " [cluster.pools.reward]"
            )
    elif "reward" in site.asks:
        yield (
            f"cluster.pools.reward has machines, but reward.parts has no {MODEL!r}: other rewards are computed by the"
            " rollout workers, and nothing would run there; leave the pool out"
        )
    reward = site.asks.get("reward")
    if reward is not None and (recipe.reward.model.device == "cpu") == bool(reward.gpus):
        yield (
            f"reward.model.device = {recipe.reward.model.device!r} on cluster.pools.reward.instance ="
            f" {reward.instance.name!r}: use {'cuda' if reward.gpus else 'cpu'!r}, or another instance"
        )
    for key, folder in folders:
        if not folder.startswith(("builtin:", f"{MODELS}/")):
            yield (
                f"{key} = {folder!r} is not in the pods: they find models below {MODELS}, copied from"
                f" {recipe.cluster.storage}/models; write {MODELS}/NAME"
            )


def _spread(site: Site, name: str, ask: Ask) -> Iterator[str]:
    """The ranks of trainer or engines fill the pool's GPUs, and groups of ranks fill whole nodes or part of one."""
    recipe, nodes, gpus = site.recipe, ask.section.nodes, ask.gpus
    section = recipe.train if name == "train" else recipe.engine
    here = f"cluster.pools.{ask.pool}"
    served = name == "engine" and recipe.engine.served
    if not served and (section.device != "cuda") == bool(gpus):
        allowed = "'cuda'" if gpus else "'cpu', or another instance"
        yield f"{name}.device = {section.device!r} on {here}.instance = {ask.instance.name!r}: use {allowed}"
        return
    if not gpus:
        return
    if served:
        each, copies = recipe.engine.server.count * recipe.engine.launch.ranks, recipe.rollout.workers
        what = "rollout.workers x engine.server.count x engine.launch.gpus_per_node"
    else:
        each = section.parallel.ranks
        copies = 1 if name == "train" else recipe.rollout.workers
        what = "train.parallel's ranks" if name == "train" else "rollout.workers x engine.parallel's ranks"
    if each * copies != nodes * gpus:
        yield (
            f"{what} = {each * copies}, but {here} has {nodes} x {gpus} = {nodes * gpus} GPUs: make them equal, or GPUs"
            " are paid for and not used"
        )
    if gpus % each and each % gpus:
        yield f"{what}: {each} ranks of one model fill neither whole nodes of {gpus} GPUs nor an even part of one"
    if not served:
        yield from _domains(name, section.parallel, ask)


def _domains(name: str, spread: Parallel, ask: Ask) -> Iterator[str]:
    gpus = ask.gpus
    if gpus % spread.tp:
        yield (
            f"{name}.parallel.tp = {spread.tp} does not divide the {gpus} GPUs of {ask.instance.name}: tensor parallel"
            f" ranks exchange in every layer and stay inside a node; use one of {_divisors(gpus)}"
        )
    if gpus % spread.ep and spread.ep % gpus:
        yield (
            f"{name}.parallel.ep = {spread.ep} is neither part of the {gpus} GPUs of {ask.instance.name} nor a"
            f" multiple: experts are shared out inside a node or over whole nodes; use one of {_divisors(gpus)}, or a"
            f" multiple of {gpus}"
        )
    if spread.ranks > gpus and spread.domain_ranks not in (0, gpus):
        yield (
            f"{name}.parallel.domain_ranks = {spread.domain_ranks}, but NVLink joins {gpus} GPUs of a node of"
            f" {ask.instance.name}; use {gpus}, or 0"
        )


def _network(site: Site) -> Iterator[str]:
    """EFA where ranks of one model, or weights on their way, cross nodes."""
    recipe = site.recipe
    ranks: dict[PoolName, int] = {"train": recipe.train.parallel.ranks, "rollout": recipe.engine.parallel.ranks}
    for pool, ask in site.asks.items():
        here, facts = f"cluster.pools.{pool}", ask.instance
        crosses = ask.gpus and ranks.get(pool, 0) > ask.gpus
        carries = ask.gpus and pool in ranks and recipe.weights.carrier == "collective"
        if (crosses or carries) and not facts.efa:
            why = "its ranks exchange between nodes" if crosses else "weights.carrier = 'collective' crosses nodes"
            yield (
                f"{here}.instance = {facts.name!r} has no EFA, but {why}: TCP would be many times slower; use a type"
                " with EFA, such as 'p5en.48xlarge'"
            )
        if ask.section.efa and not ask.gpus:
            yield f"{here}.efa = {ask.section.efa}: only ranks on GPUs exchange over EFA; leave it at 0"
        elif ask.section.efa > facts.efa:
            yield (
                f"{here}.efa = {ask.section.efa}, but {facts.name} has {facts.efa} EFA interfaces: use at most"
                f" {facts.efa}, or 0 for all"
            )
        elif ask.section.efa and ask.efa < facts.efa_least and ask.efa % ask.gpus and ask.gpus % ask.efa:
            yield (
                f"{here}.efa = {ask.efa} is not the same number for each of {ask.gpus} GPUs: use a multiple or a"
                f" divisor of {ask.gpus}, {facts.efa_least}, or 0 for all"
            )


def _requests(site: Site) -> Iterator[str]:
    """A pod is large enough to start something in."""
    for pool, ask in site.asks.items():
        if ask.vcpu < LEAST_VCPU or ask.memory_gib < LEAST_GIB:
            how = f"with pods = {ask.section.pods} " if ask.section.pods > 1 else ""
            yield (
                f"cluster.pools.{pool}.instance = {ask.instance.name!r} {how}leaves a pod {ask.vcpu} vCPU and"
                f" {ask.memory_gib} GiB of the {ask.instance.allocatable_vcpu:.1f} vCPU and"
                f" {ask.instance.allocatable_gib:.0f} GiB that a node can give; it needs {LEAST_VCPU} and {LEAST_GIB}"
            )


def _seen(site: Site, nodes: Mapping[PoolName, Mapping[str, float]]) -> Iterator[str]:
    """What the nodes that are there offer is what the recipe counts on."""
    for pool, node in nodes.items():
        ask = site.asks.get(pool)
        if ask is None:
            yield f"there are nodes of a pool {pool!r}, which cluster.pools does not have; whose are they?"
            continue
        offers = (
            ("nvidia.com/gpu", node["gpus"], ask.gpus, "is the NVIDIA device plugin there?"),
            (
                "vpc.amazonaws.com/efa",
                node["efa"],
                ask.section.efa or ask.instance.efa_least,
                "is the EFA plugin there?",
            ),
            ("hugepages-2Mi in MiB", node["hugepages_mib"], ask.hugepages_mib, "were they set aside at its start?"),
        )
        for what, there, needed, ask_for in offers:
            if there < needed:
                yield f"a node of pool {pool!r} can give {there:g} {what}, its pods need {needed:g}: {ask_for}"
        if node["nodes"] < ask.section.nodes:
            yield f"pool {pool!r} has {node['nodes']:g} nodes, cluster.pools.{pool}.nodes = {ask.section.nodes}"


def _model(site: Site, config: ModelConfig) -> Iterator[str]:
    """The model can be spread as the recipe says."""
    for name, parallel in (("train", site.recipe.train.parallel), ("engine", site.recipe.engine.parallel)):
        try:
            check_fit(config, parallel)
        except ConfigError as fault:
            yield f"{name}.parallel: {fault}"


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
