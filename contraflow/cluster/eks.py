"""From a recipe to all objects of its cluster, as files: one for each kind, and ORDER.md, which says what comes first.

Starts nothing and asks no cloud. The same recipe gives the same bytes.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from contraflow.cluster.board import board, pod_monitors
from contraflow.cluster.checks import check_site
from contraflow.cluster.karpenter import node_classes, node_pools
from contraflow.cluster.nodes import cluster_config
from contraflow.cluster.order import order
from contraflow.cluster.plugins import efa_values, nvidia_values
from contraflow.cluster.queue import queue_objects
from contraflow.cluster.rayjob import accounts, ray_job, recipe_map
from contraflow.cluster.site import Site, plan_site, read_nodes
from contraflow.cluster.walls import env_server, namespaces, network_policies
from contraflow.cluster.written import Object, write_objects
from contraflow.config import Recipe, load_recipe
from contraflow.errors import ConfigError, ModelError
from contraflow.model.builtin import model_folder
from contraflow.model.families import ModelConfig


def render(recipe_file: Path, overrides: Sequence[str], nodes_file: Path | None = None) -> dict[str, str]:
    """Names and texts of the files of a recipe's cluster.

    `nodes_file`: what `kubectl get nodes -o json` wrote, when the nodes are there; pods then ask for what these offer.

    Raises: ConfigError, before anything is written, naming each key that does not fit, its value and what is allowed.
    """
    recipe = load_recipe(recipe_file, overrides)
    if not recipe.cluster.name:
        raise ConfigError(
            f"{recipe_file} has no [cluster]: say in it where the run should stand (name, region, zone, storage,"
            " images, pools; docs/eks.md), or run it on this machine by contraflow run"
        )
    nodes = read_nodes(nodes_file) if nodes_file is not None else None
    site = plan_site(recipe, nodes)
    check_site(site, read_shape(recipe, recipe_file.parent), nodes)
    return files(site, recipe_file.name)


def files(site: Site, source: str) -> dict[str, str]:
    """The objects of a site that fits, as files."""
    found = {f"{_plural(kind)}.yaml": write_objects(objects) for kind, objects in _objects(site).items()}
    if any(ask.gpus for ask in site.asks.values()):
        found["values.efa.yaml"] = write_objects([efa_values(site)], about="values of eks/aws-efa-k8s-device-plugin")
        found["values.nvidia.yaml"] = write_objects([nvidia_values(site)], about="values of nvdp/nvidia-device-plugin")
    found["ORDER.md"] = order(site, source)
    return dict(sorted(found.items()))


def _objects(site: Site) -> Mapping[str, list[Object]]:
    """All objects by kind."""
    every = [
        cluster_config(site),
        *namespaces(site),
        *accounts(site),
        *network_policies(site),
        recipe_map(site),
        ray_job(site),
        *pod_monitors(site),
        board(site),
    ]
    if site.cluster.nodes_by == "karpenter":
        every += [*node_classes(site), *node_pools(site)]
    if "env" in site.asks:
        every += env_server(site)
    if site.cluster.queue:
        every += [one for objects in queue_objects(site).values() for one in objects]
    kinds: dict[str, list[Object]] = defaultdict(list)
    for one in every:
        kinds[one["kind"]].append(one)
    return kinds


def _plural(kind: str) -> str:
    lower = kind.lower()
    return f"{lower[:-1]}ies" if lower.endswith("y") else f"{lower}es" if lower.endswith("ss") else f"{lower}s"


def read_shape(recipe: Recipe, beside: Path) -> ModelConfig | None:
    """The model's shape, of `cluster.model_config_file`, else of `model.folder` if it is here, else None.

    Raises: ConfigError or ModelError for a file that is there and no model's.
    """
    named = recipe.cluster.model_config_file
    if not named and not recipe.model.folder.startswith("builtin:") and not Path(recipe.model.folder).is_dir():
        return None
    file = beside / named if named else model_folder(recipe.model.folder) / "config.json"
    try:
        return ModelConfig.from_hf(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as fault:
        raise ConfigError(f"cluster.model_config_file: {file} is no config.json ({fault}); give the model's") from None
    except ModelError as fault:
        raise ModelError(f"{file}: {fault}") from None


def write(found: Mapping[str, str], folder: Path) -> None:
    """Put the files into `folder`, over those of the same names.

    Raises: ConfigError when it holds a file of another name, which would be taken for one of these: nothing is written.
    """
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    strange = sorted(there - set(found))
    if strange or (there and "ORDER.md" not in there):
        raise ConfigError(
            f"--out {folder} holds {', '.join(strange or sorted(there))}, which this recipe does not give: remove that,"
            " or give a new folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        (folder / name).write_text(text, encoding="utf-8")
