"""What a recipe's cluster comes to: for each pool its machines, and what one of its pods asks for.

Takes a checked recipe and, if they are there already, what the cluster's nodes say they can give. Gives a `Site`, which
all objects are written from. Does not judge whether the sizes do: `checks` does.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contraflow.cluster.instances import Instance, find_instance
from contraflow.config import Cluster, Pool, PoolName, Recipe, recipe_toml
from contraflow.errors import ConfigError

POOL_LABEL = "contraflow/pool"  # of nodes and pods, and the key of the taint that keeps others off
MODELS = "/models"  # where pods find the models of `storage`/models
HUGEPAGES_MIB = 5120  # of 2 MiB each, that a pod with DeepEP asks for (AWS' own benchmarks of it do)
OBJECT_STORE_GIB = 2  # Ray's own share of /dev/shm: payloads do not go through it
ON_NODES = ("train", "rollout", "reward", "buffer")  # pools that Ray's workers are on, one pod a node


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What one pod of a pool asks for, and is held to: requests equal limits, so its QoS is Guaranteed."""

    pool: PoolName
    section: Pool
    instance: Instance
    vcpu: int
    memory_gib: int  # hugepages not among it
    gpus: int
    efa: int
    hugepages_mib: int

    @property
    def group(self) -> str:
        """Name of the node group."""
        return self.section.group or self.pool

    @property
    def most(self) -> int:
        """Nodes it may grow to."""
        return self.section.most or self.section.nodes

    @property
    def shm_gib(self) -> int:
        """Of /dev/shm: memory of the pod, taken when used."""
        return max(self.memory_gib // 4, 1)

    def resources(self) -> dict[str, dict[str, str]]:
        """Requests and limits of its one container."""
        asked = {"cpu": str(self.vcpu), "memory": f"{self.memory_gib}Gi"}
        if self.gpus:
            asked["nvidia.com/gpu"] = str(self.gpus)
        if self.efa:
            asked["vpc.amazonaws.com/efa"] = str(self.efa)
        if self.hugepages_mib:
            asked["hugepages-2Mi"] = f"{self.hugepages_mib}Mi"
        return {"requests": dict(asked), "limits": dict(asked)}


@dataclass(frozen=True, kw_only=True)
class Site:
    """A recipe for a cluster, and what each pool asks for, in the order of `PoolName`."""

    recipe: Recipe
    asks: Mapping[PoolName, Ask]

    @property
    def cluster(self) -> Cluster:
        return self.recipe.cluster

    @property
    def bucket(self) -> str:
        return self.cluster.storage.removeprefix("s3://").partition("/")[0]

    @property
    def prefix(self) -> str:
        """Of the run's keys, without a slash at its end."""
        return self.cluster.storage.removeprefix("s3://").partition("/")[2]

    @property
    def env_namespace(self) -> str:
        return f"{self.cluster.namespace}-env"

    @property
    def partition(self) -> str:
        """Of AWS, as it stands in ARNs."""
        return {"cn": "aws-cn", "us-gov": "aws-us-gov"}.get(self.cluster.region.rsplit("-", 2)[0], "aws")

    def models(self, pool: PoolName) -> list[str]:
        """Names of the models that a pool's pods copy from `storage` before they start."""
        folders = {
            "train": [self.recipe.model.folder],
            "rollout": [self.recipe.model.folder],
            "reward": [self.recipe.reward.model.folder],
            "control": [self.recipe.model.folder],  # its head reads the shape and the tokenizer
        }.get(pool, [])
        return [folder.removeprefix(f"{MODELS}/") for folder in folders if folder.startswith(f"{MODELS}/")]

    def recipe_text(self) -> str:
        """The recipe as the run gets it: what has to last lies in `storage`."""
        return recipe_toml(in_storage(self.recipe))

    def recipe_digest(self) -> str:
        """SHA-256 of `recipe_text`, hexadecimal: the same on all pods of one run."""
        return hashlib.sha256(self.recipe_text().encode()).hexdigest()


def in_storage(recipe: Recipe) -> Recipe:
    """The recipe with cuts and, if they go by blobs, weights in the cluster's `storage`, unless it says where."""
    storage = recipe.cluster.storage
    train, weights = recipe.train, recipe.weights
    if not train.checkpoint_url:
        train = train.model_copy(update={"checkpoint_url": f"{storage}/checkpoints"})
    if weights.carrier == "blob" and not weights.url:
        weights = weights.model_copy(update={"url": f"{storage}/weights"})
    return recipe.model_copy(update={"train": train, "weights": weights})


def wants_hugepages(recipe: Recipe, pool: PoolName) -> bool:
    """Whether the pool's ranks exchange tokens by DeepEP."""
    if pool == "rollout" and recipe.engine.served:
        return recipe.engine.launch.deepep
    sections = {"train": recipe.train.parallel, "rollout": recipe.engine.parallel}
    return pool in sections and sections[pool].dispatch == "deepep"


def plan_site(recipe: Recipe, nodes: Mapping[PoolName, Mapping[str, float]] | None = None) -> Site:
    """Size every pool's pods: by the instance table, or by what the pool's `nodes` can give (see `read_nodes`).

    Raises: ConfigError for an instance type that is not known.
    """
    asks: dict[PoolName, Ask] = {}
    for pool, section in sorted(recipe.cluster.pools.items(), key=lambda item: list(POOLS).index(item[0])):
        try:
            instance = find_instance(section.instance)
        except ConfigError as fault:
            raise ConfigError(f"cluster.pools.{pool}.instance: {fault}") from None
        asks[pool] = _ask(recipe, pool, section, instance, (nodes or {}).get(pool, {}))
    return Site(recipe=recipe, asks=asks)


POOLS: tuple[PoolName, ...] = ("train", "rollout", "reward", "env", "buffer", "control")


def _ask(recipe: Recipe, pool: PoolName, section: Pool, instance: Instance, node: Mapping[str, float]) -> Ask:
    """A pod has its node to itself, but for those of `env` (several servers a node) and `control` (half a node)."""
    share = {"env": 1 / section.pods, "control": 0.5}.get(pool, 1.0)
    hugepages = HUGEPAGES_MIB if instance.gpus and wants_hugepages(recipe, pool) else 0
    memory = node.get("memory_gib", instance.allocatable_gib - hugepages / 1024)
    return Ask(
        pool=pool,
        section=section,
        instance=instance,
        vcpu=math.floor(node.get("vcpu", instance.allocatable_vcpu) * share),
        memory_gib=math.floor(memory * share),
        gpus=instance.gpus,
        efa=(section.efa or min(int(node.get("efa", instance.efa)), instance.efa)) if instance.gpus else 0,
        hugepages_mib=hugepages,
    )


def read_nodes(path: Path) -> dict[PoolName, dict[str, float]]:
    """What nodes that are there can give to pods, the least of each pool, from `kubectl get nodes -o json`.

    Of each pool: "vcpu", "memory_gib" (hugepages are not among it), "gpus", "efa", "hugepages_mib", and "nodes", how
    many there are. vCPU and memory are less what DaemonSets take (`SYSTEM_VCPU`, `SYSTEM_GIB`).

    Raises: ConfigError when the file is not that, or no node carries a pool's label.
    """
    try:
        items = json.loads(path.read_text(encoding="utf-8"))["items"]
        found: dict[PoolName, dict[str, float]] = {}
        for item in items:
            pool = item["metadata"]["labels"].get(POOL_LABEL)
            if pool in POOLS:
                seen = _allocatable(item["status"]["allocatable"])
                before = found.get(pool, {})
                found[pool] = {key: min(value, before.get(key, value)) for key, value in seen.items()}
                found[pool]["nodes"] = before.get("nodes", 0) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise ConfigError(
            f"{path} is not what `kubectl get nodes -o json` writes ({type(fault).__name__}: {fault}); write it anew"
        ) from None
    if not found:
        raise ConfigError(f"{path}: none of {len(items)} nodes has the label {POOL_LABEL}; are they of this cluster?")
    return found


def _allocatable(given: Mapping[str, Any]) -> dict[str, float]:
    from contraflow.cluster.instances import SYSTEM_GIB, SYSTEM_VCPU

    return {
        "vcpu": quantity(given["cpu"]) - SYSTEM_VCPU,
        "memory_gib": quantity(given["memory"]) / 2**30 - SYSTEM_GIB,
        "gpus": quantity(given.get("nvidia.com/gpu", "0")),
        "efa": quantity(given.get("vpc.amazonaws.com/efa", "0")),
        "hugepages_mib": quantity(given.get("hugepages-2Mi", "0")) / 2**20,
    }


_SUFFIXES = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SUFFIXES |= {f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGT", 1)}


def quantity(text: str) -> float:
    """A quantity as Kubernetes writes it: `500m`, `16`, `2031Gi`. Raises: ValueError when it is none."""
    number = text.rstrip("mkMGTKi")
    suffix = text[len(number) :]
    if suffix not in _SUFFIXES:
        raise ValueError(f"{text!r} is no quantity of Kubernetes")
    return float(number) * _SUFFIXES[suffix]
