"""Sizes that do not add up are refused before anything is written, with key, value, what is allowed and what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.cluster.checks import check_site
from contraflow.cluster.eks import render
from contraflow.cluster.instances import SYSTEM_GIB, SYSTEM_VCPU, find_instance
from contraflow.cluster.site import plan_site, quantity, read_nodes
from contraflow.config import load_recipe
from contraflow.errors import ConfigError

SERVED = ("engine.kind=vllm", "engine.device=cpu", "engine.kv_tokens=65536", "weights.carrier=blob")
RECIPES = Path(__file__).parents[2] / "recipes"


def refused(name: str, *overrides: str, nodes: Path | None = None) -> str:
    with pytest.raises(ConfigError) as fault:
        render(RECIPES / f"{name}.toml", overrides, nodes)
    return str(fault.value)


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        # GPUs and ranks
        (
            "eks_2_nodes",
            ["cluster.pools.train.nodes=2"],
            "train.parallel's ranks = 8, but cluster.pools.train has 2 x 8 = 16 GPUs: make them equal",
        ),
        (
            "eks_2_nodes",
            ["rollout.workers=6"],
            "rollout.workers x engine.parallel's ranks = 6, but cluster.pools.rollout",
        ),
        (
            "eks_8_nodes",
            ["rollout.workers=1", "engine.parallel.dp=12", "engine.parallel.ep=4", "cluster.pools.rollout.nodes=3"],
            "12 ranks of one model fill neither whole nodes of 8 GPUs nor an even part of one",
        ),
        (
            "eks_8_nodes",
            ["train.parallel.dp=2", "train.parallel.tp=16", "train.parallel.ep=16"],
            "train.parallel.tp = 16 does not divide the 8 GPUs of p5en.48xlarge",
        ),
        (
            "eks_48_nodes",
            ["train.parallel.dp=24", "train.parallel.pp=1", "train.parallel.ep=12", "cluster.pools.train.nodes=6"],
            "train.parallel.ep = 12 is neither part of the 8 GPUs of p5en.48xlarge nor a multiple",
        ),
        ("eks_8_nodes", ["train.parallel.domain_ranks=4"], "train.parallel.domain_ranks = 4, but NVLink joins 8 GPUs"),
        ("eks_2_nodes", ["train.device=cpu"], "train.device = 'cpu' on cluster.pools.train.instance = 'p5en.48xlarge'"),
        ("eks_2_nodes", ["train.device=cuda:1"], "train.device = 'cuda:1' on cluster.pools.train"),
        (
            "eks_2_nodes",
            ["cluster.pools.rollout.instance=m5.24xlarge"],
            "engine.device = 'cuda' on cluster.pools.rollout",
        ),
        ("eks_48_nodes", ["reward.model.device=cpu"], "reward.model.device = 'cpu' on cluster.pools.reward.instance"),
        # the model
        (
            "eks_2_nodes",
            ["train.parallel.ep=6", "train.parallel.dp=24", "cluster.pools.train.nodes=3"],
            "train.parallel: ep = 6 must divide the model's 128 experts",
        ),
        (
            "eks_48_nodes",
            ["train.parallel.tp=2", "train.parallel.dp=8"],
            "latent attention (deepseek_v3) is not cut by",
        ),
        ("eks_2_nodes", ["cluster.model_config_file=shapes/none.json"], "none.json is no config.json"),
        ("eks_2_nodes", ["cluster.model_config_file=eks_2_nodes.toml"], "eks_2_nodes.toml is no config.json"),
        # EFA
        (
            "eks_8_nodes",
            ["cluster.pools.buffer.efa=1"],
            "cluster.pools.buffer.efa = 1: only ranks on GPUs exchange over EFA; leave it at 0",
        ),
        ("eks_2_nodes", ["cluster.pools.train.efa=17"], "cluster.pools.train.efa = 17, but p5en.48xlarge has 16 EFA"),
        ("eks_2_nodes", ["cluster.pools.train.efa=12"], "cluster.pools.train.efa = 12 is not the same number for each"),
        # machines
        (
            "eks_2_nodes",
            ["cluster.pools.rollout.instance=p5n.48xlarge"],
            "cluster.pools.rollout.instance: instance type 'p5n.48xlarge' is not known: did you mean 'p5",
        ),
        (
            "eks_2_nodes",
            ["cluster.pools.rollout.group=train"],
            "cluster.pools.rollout.group = 'train' is the node group of",
        ),
        (
            "eks_48_nodes",
            ["cluster.pools.rollout.capacity=block", "cluster.pools.rollout.reservation=cr-0123456789abcdef0"],
            "cluster.pools.rollout.reservation = 'cr-0123456789abcdef0' is that of pool 'train' too",
        ),
        ("eks_2_nodes", ["cluster.pools.train.capacity=spot"], "a run ends with its train machines; use 'on_demand'"),
        (
            "eks_8_nodes",
            ["rollout.grace_s=300.0"],
            "rollout.grace_s = 300 with cluster.pools.rollout.capacity = 'spot'",
        ),
        ("eks_2_nodes", ["cluster.pools.buffer.pods=2"], "cluster.pools.buffer.pods = 2: only servers of 'env' share"),
        ("eks_8_nodes", ["cluster.pools.env.pods=64"], "with pods = 64 leaves a pod 0 vCPU and 1 GiB of the 30.9 vCPU"),
        # what holds on one machine only
        ("eks_2_nodes", ["weights.carrier=memory"], "weights.carrier = 'memory' stays on one machine"),
        ("eks_2_nodes", ["weights.carrier=ipc"], "use 'collective' or 'blob'"),
        (
            "eks_2_nodes",
            ["train.checkpoint_url=s3://other/cuts"],
            "train.checkpoint_url = 's3://other/cuts' is not below",
        ),
        (
            "eks_2_nodes",
            ["weights.carrier=blob", "weights.url=/shared/weights"],
            "weights.url = '/shared/weights' is not below cluster.storage",
        ),
        (
            "eks_2_nodes",
            ["runtime.kind=inline", "weights.carrier=blob", "train.parallel.dp=1", "train.parallel.ep=1"],
            "runtime.kind = 'inline' is one process; leave it at its default",
        ),
        (
            "eks_2_nodes",
            [*SERVED, "engine.launch.nodes=2", "engine.launch.address=10.0.0.1", "rollout.workers=1"],
            "engine.kind = 'vllm' over several nodes, or attached to by address: those servers are started by others",
        ),
        (
            "eks_2_nodes",
            [*SERVED, "rollout.workers=2"],
            "rollout.workers x engine.server.count x engine.launch.gpus_per_node = 16, but cluster.pools.rollout has",
        ),
        ("eks_2_nodes", ["model.folder=models/mine"], "model.folder = 'models/mine' is not in the pods"),
        ("eks_2_nodes", ["env.name=my_task.py:Sort"], "env.name = 'my_task.py:Sort' is a file, which pods do not have"),
        ("eks_48_nodes", ["reward.model.folder=reward"], "reward.model.folder = 'reward' is not in the pods"),
        (
            "eks_48_nodes",
            ["reward.parts.model=0.1", "cluster.pools.reward.group=train"],
            "is the node group of pool 'tr",
        ),
        ("eks_2_nodes", ["reward.parts.model=0.5"], "cluster.pools has no reward: give it machines"),
        ("eks_2_nodes", ["cluster.pools.reward.instance=g6.8xlarge"], "nothing would run there; leave the pool out"),
    ],
)
def test_what_does_not_add_up_is_named(name: str, overrides: list[str], says: str) -> None:
    assert says in refused(name, *overrides)


def test_every_fault_is_told_at_once() -> None:
    said = refused("eks_2_nodes", "weights.carrier=memory", "rollout.workers=6", "cluster.pools.train.efa=17")
    assert len(said.splitlines()) == 3


def test_a_recipe_without_a_cluster_is_told_what_one_is() -> None:
    assert "has no [cluster]: say in it where the run should stand" in refused("tiny_cpu")


def test_missing_pools_are_named(tmp_path: Path) -> None:
    text = (RECIPES / "eks_2_nodes.toml").read_text(encoding="utf-8")
    cut = text.replace('[cluster.pools.buffer]\ninstance = "r7i.8xlarge"\n', "")
    path = tmp_path / "recipe.toml"
    path.write_text(cut.replace("shapes/", f"{RECIPES}/shapes/"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cluster\.pools has no buffer: a run needs train, rollout, buffer, control"):
        render(path, [])


def test_a_pool_whose_ranks_cross_nodes_needs_efa() -> None:
    """No such type with GPUs is in the table, so one is made for the test."""
    from dataclasses import replace

    recipe = load_recipe(RECIPES / "eks_8_nodes.toml")
    site = plan_site(recipe)
    bare = replace(find_instance("p5en.48xlarge"), name="p5x.48xlarge", efa=0, efa_least=0)
    ask = replace(site.asks["train"], instance=bare, efa=0)
    with pytest.raises(ConfigError) as fault:
        check_site(replace(site, asks={**site.asks, "train": ask}))
    assert "cluster.pools.train.instance = 'p5x.48xlarge' has no EFA, but its ranks exchange between nodes" in str(
        fault.value
    )
    one_node = load_recipe(RECIPES / "eks_2_nodes.toml")
    site = plan_site(one_node)
    ask = replace(site.asks["rollout"], instance=bare, efa=0)
    with pytest.raises(ConfigError, match=r"weights\.carrier = 'collective' crosses nodes"):
        check_site(replace(site, asks={**site.asks, "rollout": ask}))


def listed(tmp_path: Path, **changes: str) -> Path:
    """What kubectl says of the nodes of eks_2_nodes, the train node's allocatable with `changes`."""
    kinds = {"train": "p5en.48xlarge", "rollout": "p5en.48xlarge", "buffer": "r7i.8xlarge", "control": "m5.4xlarge"}
    items: list[dict[str, Any]] = [
        {"metadata": {"labels": {}}, "status": {"allocatable": {"cpu": "4", "memory": "8Gi"}}}
    ]
    for pool, kind in kinds.items():
        facts = find_instance(kind)
        there = {"cpu": f"{facts.vcpu * 1000 - 500}m", "memory": f"{int(facts.memory_gib * 0.96 * 2**20)}Ki"}
        if facts.gpus:
            there |= {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "16", "hugepages-2Mi": "0"}
        if pool == "train":
            there |= changes
        items.append({"metadata": {"labels": {"contraflow/pool": pool}}, "status": {"allocatable": there}})
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"items": items}), encoding="utf-8")
    return path


def asked(found: dict[str, str], pool: str) -> dict[str, str]:
    import yaml

    spec = yaml.safe_load(found["rayjobs.yaml"])["spec"]["rayClusterSpec"]
    (group,) = [group for group in spec["workerGroupSpecs"] if group["groupName"] == pool]
    limits: dict[str, str] = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return limits


def test_fifteen_efa_interfaces_of_sixteen_are_asked_for_where_only_fifteen_are(tmp_path: Path) -> None:
    nodes = listed(tmp_path, **{"vpc.amazonaws.com/efa": "15"})
    found = render(RECIPES / "eks_2_nodes.toml", [], nodes)
    assert asked(found, "train")["vpc.amazonaws.com/efa"] == "15"
    assert asked(found, "rollout")["vpc.amazonaws.com/efa"] == "16"
    by_hand = render(RECIPES / "eks_2_nodes.toml", ["cluster.pools.train.efa=15"])
    assert asked(by_hand, "train")["vpc.amazonaws.com/efa"] == "15"


def test_pods_ask_for_what_the_nodes_have_and_not_for_what_the_table_says(tmp_path: Path) -> None:
    nodes = listed(tmp_path, memory="1000Gi", cpu="100500m")
    limits = asked(render(RECIPES / "eks_2_nodes.toml", [], nodes), "train")
    assert (limits["cpu"], limits["memory"]) == (f"{int(100.5 - SYSTEM_VCPU)}", f"{int(1000 - SYSTEM_GIB)}Gi")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vpc.amazonaws.com/efa": "14"}, "a node of pool 'train' can give 14 vpc.amazonaws.com/efa, its pods need 15"),
        ({"vpc.amazonaws.com/efa": "0"}, "is the EFA plugin there?"),
        ({"nvidia.com/gpu": "7"}, "can give 7 nvidia.com/gpu, its pods need 8: is the NVIDIA device plugin there?"),
        ({"memory": "1Gi"}, "leaves a pod"),
    ],
)
def test_nodes_that_offer_too_little_are_named(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    assert says in refused("eks_2_nodes", nodes=listed(tmp_path, **changes))


def test_hugepages_have_to_be_set_aside(tmp_path: Path) -> None:
    said = refused("eks_2_nodes", "train.parallel.dispatch=deepep", nodes=listed(tmp_path))
    assert "can give 0 hugepages-2Mi in MiB, its pods need 5120: were they set aside at its start?" in said


def test_nodes_of_a_pool_that_the_recipe_lacks_are_named(tmp_path: Path) -> None:
    path = listed(tmp_path)
    tree = json.loads(path.read_text(encoding="utf-8"))
    tree["items"].append({"metadata": {"labels": {"contraflow/pool": "env"}}, "status": tree["items"][-1]["status"]})
    path.write_text(json.dumps(tree), encoding="utf-8")
    assert "there are nodes of a pool 'env', which cluster.pools does not have" in refused("eks_2_nodes", nodes=path)


def test_a_rehearsal_without_gpus_needs_no_device_plugins() -> None:
    pools = [f"cluster.pools.{pool}.instance=m5.24xlarge" for pool in ("train", "rollout")]
    there = ["train.device=cpu", "engine.device=cpu", *pools]
    found = render(RECIPES / "eks_2_nodes.toml", there)
    assert not any(name.startswith("values.") for name in found)
    assert "values." not in found["ORDER.md"]
    assert set(asked(found, "train")) == {"cpu", "memory"}


def test_fewer_nodes_than_said_are_counted(tmp_path: Path) -> None:
    said = refused("eks_2_nodes", "cluster.pools.control.nodes=3", nodes=listed(tmp_path))
    assert "pool 'control' has 1 nodes, cluster.pools.control.nodes = 3" in said


@pytest.mark.parametrize(
    "text", ["{}", "[]", "not json", '{"items": [{}]}', '{"items": [{"metadata": {"labels": 3}}]}']
)
def test_a_file_that_kubectl_did_not_write_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is not what `kubectl get nodes -o json` writes"):
        read_nodes(path)


def test_nodes_of_another_cluster_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text('{"items": []}', encoding="utf-8")
    with pytest.raises(ConfigError, match="none of 0 nodes has the label contraflow/pool"):
        read_nodes(path)


@given(number=st.integers(0, 10**6), suffix=st.sampled_from(["", "m", "k", "Ki", "M", "Mi", "G", "Gi", "T", "Ti"]))
def test_quantities_are_read_as_kubernetes_means_them(number: int, suffix: str) -> None:
    power = {"": 0, "m": -1, "k": 1, "M": 2, "G": 3, "T": 4}[suffix.rstrip("i").replace("K", "k")]
    assert quantity(f"{number}{suffix}") == pytest.approx(number * (1024 if suffix.endswith("i") else 1000) ** power)


@pytest.mark.parametrize("text", ["", "Gi", "1Xi", "1iG", "0x10"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        quantity(text)
