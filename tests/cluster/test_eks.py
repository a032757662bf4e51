"""The objects of three clusters: of valid schemas, the same bytes as last time, and as safe and as large as said.

After a wanted change: `python -m tests.cluster.test_eks` writes the golden files anew; look at the difference.
"""

import copy
import json
import math
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from contraflow.cluster import written
from contraflow.cluster.eks import render
from contraflow.cluster.instances import find_instance
from contraflow.cluster.site import HUGEPAGES_MIB
from contraflow.config import load_recipe
from tests.cluster.schemas import CORE, FILES, WITHOUT, check, pod_specs, schema_folder

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
NAMES = ("eks_2_nodes", "eks_8_nodes", "eks_48_nodes")


def recipe_file(name: str) -> Path:
    return ROOT / "recipes" / f"{name}.toml"


@cache
def objects(name: str, *overrides: str) -> list[dict[str, Any]]:
    """Read only: the same list is given to all tests."""
    found = render(recipe_file(name), overrides)
    texts = [text for file, text in found.items() if file.endswith(".yaml") and not file.startswith("values.")]
    return [one for text in texts for one in yaml.safe_load_all(text)]


def only(name: str, kind: str, *overrides: str) -> dict[str, Any]:
    (one,) = [one for one in objects(name, *overrides) if one["kind"] == kind]
    return one


def schemas() -> Path:
    folder = schema_folder()
    if folder is None:
        pytest.skip("no schemas: set CONTRAFLOW_SCHEMAS to a folder with those of KubeRay, eksctl, Karpenter and Kueue")
    return folder


ALL = [(name, ()) for name in NAMES] + [
    ("eks_8_nodes", ("cluster.nodes_by=eksctl", "cluster.queue=rl")),
    ("eks_48_nodes", ("cluster.nodes_by=karpenter", "cluster.queue=")),
]


@pytest.mark.parametrize(("name", "overrides"), ALL)
def test_every_object_is_what_its_schema_says(name: str, overrides: tuple[str, ...]) -> None:
    folder = schemas()
    version = load_recipe(recipe_file(name)).cluster.kubernetes
    for one in objects(name, *overrides):
        if one["kind"] not in WITHOUT:
            check(one, folder, version)


def test_every_kind_is_held_to_a_schema_or_said_to_have_none() -> None:
    kinds = {one["kind"] for name, overrides in ALL for one in objects(name, *overrides)}
    assert kinds == {*CORE, *FILES, *WITHOUT, "ClusterConfig"}


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("RayJob", ("spec",)),
        ("RayJob", ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "resources")),
        ("RayJob", ("spec", "rayClusterSpec", "workerGroupSpecs", 0)),
        ("ClusterConfig", ("managedNodeGroups", 0)),
        ("NodePool", ("spec", "template", "spec")),
        ("EC2NodeClass", ("spec", "metadataOptions")),
        ("ClusterQueue", ("spec", "resourceGroups", 0)),
        ("NetworkPolicy", ("spec",)),
        ("Deployment", ("spec", "template", "spec", "containers", 0)),
    ],
)
def test_a_misspelt_field_would_be_found(kind: str, path: tuple[str | int, ...]) -> None:
    """The oracle's own test: without strictness these would pass."""
    folder = schemas()
    found = [*objects("eks_8_nodes", "cluster.queue=rl")]
    one = copy.deepcopy(next(one for one in found if one["kind"] == kind))
    node: Any = one
    for step in path:
        node = node[step]
    node["mispelt"] = "1"
    with pytest.raises(jsonschema.ValidationError, match=r"mispelt"):
        check(one, folder, "1.34")


def kept(name: str) -> dict[str, str]:
    """The files without the recipe in them, which has a test of its own and changes with every new setting."""
    found = render(recipe_file(name), [])
    carried = re.compile(r"^  recipe\.toml: \|\n(    .*\n|\n)*", re.MULTILINE)
    digest = re.compile(r"(recipe-sha256: )['0-9a-f]+")
    return {file: digest.sub(r"\1...", carried.sub("  recipe.toml: ...\n", text)) for file, text in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_the_same_as_last_time(name: str) -> None:
    found = kept(name)
    assert set(found) == {path.name for path in (GOLDEN / name).iterdir()}
    for file, text in found.items():
        assert text == (GOLDEN / name / file).read_text(encoding="utf-8"), f"{name}/{file}"


@pytest.mark.parametrize("name", NAMES)
def test_yaml_comes_back_as_what_was_written(name: str) -> None:
    for text in render(recipe_file(name), []).values():
        if text.startswith("apiVersion"):
            parts = list(yaml.safe_load_all(text))
            assert list(yaml.safe_load_all(written.write_objects(parts))) == parts


@pytest.mark.parametrize("name", NAMES)
def test_pods_that_compute_are_guaranteed_and_fit_their_node(name: str) -> None:
    job, recipe = only(name, "RayJob"), load_recipe(recipe_file(name))
    cluster = job["spec"]["rayClusterSpec"]
    for spec in pod_specs(cluster):
        pool = recipe.cluster.pools[spec["nodeSelector"]["contraflow/pool"]]
        facts = find_instance(pool.instance)
        memory_gib = 0.0
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            assert container["resources"]["requests"] == container["resources"]["limits"]  # QoS Guaranteed
        asked = spec["containers"][0]["resources"]["limits"]
        memory_gib = int(asked["memory"].removesuffix("Gi")) + int(asked.get("hugepages-2Mi", "0Mi")[:-2]) / 1024
        assert memory_gib <= facts.allocatable_gib
        assert int(asked["cpu"]) <= facts.allocatable_vcpu
        assert int(asked.get("nvidia.com/gpu", 0)) == facts.gpus
        assert int(asked.get("vpc.amazonaws.com/efa", 0)) == (facts.efa if facts.gpus else 0)


def test_sixteen_nodes_train_and_thirty_two_generate() -> None:
    job = only("eks_48_nodes", "RayJob")
    groups = {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    assert {name: group["replicas"] for name, group in groups.items()} == {
        "train": 16,
        "rollout": 32,
        "reward": 1,
        "buffer": 1,
    }
    train = groups["train"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert train["vpc.amazonaws.com/efa"] == "16"
    assert train["hugepages-2Mi"] == f"{HUGEPAGES_MIB}Mi"  # dispatch = "deepep"
    assert len(groups) <= 7  # what Kueue takes of a RayJob
    config = only("eks_48_nodes", "ClusterConfig")
    by_name = {group["name"]: group for group in config["managedNodeGroups"]}
    assert by_name["train"]["instanceMarketOptions"] == {"marketType": "capacity-block"}
    assert by_name["rollout"]["spot"] is True
    assert by_name["train"]["efaEnabled"] is True
    assert "efaEnabled" not in by_name["control"]
    pages = next(line for line in by_name["train"]["preBootstrapCommands"] if "nr_hugepages" in line)
    assert int(re.search(r"= (\d+)", pages)[1]) * 2 == HUGEPAGES_MIB  # type: ignore[index]
    assert {zone for group in by_name.values() for zone in group["availabilityZones"]} == {"us-west-2b"}


@pytest.mark.parametrize("name", NAMES)
def test_ray_nodes_offer_their_pool_as_a_resource(name: str) -> None:
    """As Ray's command line gets it: the value is a word in double quotes for the shell, JSON inside."""
    import shlex

    spec = only(name, "RayJob")["spec"]["rayClusterSpec"]
    groups = {"control": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}
    for pool, group in groups.items():
        (word,) = shlex.split(group["rayStartParams"]["resources"])
        assert list(json.loads(word)) == [f"contraflow_{pool}"]
        assert json.loads(word)[f"contraflow_{pool}"] >= 1
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert spec["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("name", NAMES)
def test_no_pod_has_a_token_and_every_capability_is_dropped(name: str) -> None:
    for spec in pod_specs(objects(name)):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec.get("hostNetwork")
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"]


def test_an_environment_can_reach_nobody_and_write_nothing() -> None:
    found = objects("eks_8_nodes")
    (deployment,) = [one for one in found if one["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    assert deployment["spec"]["replicas"] == 16
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    there = [one for one in found if one["kind"] == "NetworkPolicy" and one["metadata"]["namespace"].endswith("-env")]
    assert [one["spec"]["podSelector"] for one in there] == [{}]  # one, for all pods
    assert there[0]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in there[0]["spec"]
    (source,) = there[0]["spec"]["ingress"][0]["from"]
    assert source["podSelector"]["matchLabels"]["contraflow/pool"] == "rollout"
    (space,) = [one for one in found if one["kind"] == "Namespace" and one["metadata"]["name"].endswith("-env")]
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    account = spec["serviceAccountName"]
    roles = only("eks_8_nodes", "ClusterConfig")["iam"]["podIdentityAssociations"]
    assert account not in {role["serviceAccountName"] for role in roles}


@pytest.mark.parametrize("name", NAMES)
def test_policies_are_in_force_and_closed_where_nothing_is_said(name: str) -> None:
    addons = {addon["name"]: addon for addon in only(name, "ClusterConfig")["addons"]}
    assert json.loads(addons["vpc-cni"]["configurationValues"]) == {"enableNetworkPolicy": "true"}
    policies = [one for one in objects(name) if one["kind"] == "NetworkPolicy"]
    spaces = {one["metadata"]["name"] for one in objects(name) if one["kind"] == "Namespace"}
    for space in spaces:
        shut = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
        ours = [one["spec"] for one in policies if one["metadata"]["namespace"] == space]
        assert any(spec | shut == spec and "egress" not in spec for spec in ours)
    blocks = [
        to["ipBlock"]
        for one in policies
        for rule in one["spec"].get("egress", [])
        for to in rule.get("to", [])
        if "ipBlock" in to
    ]
    assert {block["cidr"] for block in blocks} == {"0.0.0.0/0", "169.254.170.23/32"}
    assert all("169.254.0.0/16" in block["except"] for block in blocks if block["cidr"] == "0.0.0.0/0")


@pytest.mark.parametrize("name", NAMES)
def test_pods_may_touch_the_runs_prefix_only(name: str) -> None:
    storage = load_recipe(recipe_file(name)).cluster.storage.removeprefix("s3://")
    bucket, _, prefix = storage.partition("/")
    roles = only(name, "ClusterConfig")["iam"]["podIdentityAssociations"]
    for role in roles:
        for statement in role["permissionPolicy"]["Statement"]:
            assert all(action.startswith("s3:") and "*" not in action for action in statement["Action"])
            listing = statement["Action"] == ["s3:ListBucket"]
            wanted = [f"arn:aws:s3:::{bucket}"] if listing else [f"arn:aws:s3:::{bucket}/{prefix}/*"]
            assert statement["Resource"] == wanted
            assert listing == ("Condition" in statement)
    writes = {role["serviceAccountName"]: "s3:PutObject" in json.dumps(role) for role in roles}
    assert writes == {"run": True, "reader": False}
    spec = only(name, "RayJob")["spec"]["rayClusterSpec"]
    accounts = {
        group["groupName"]: group["template"]["spec"]["serviceAccountName"] for group in spec["workerGroupSpecs"]
    }
    assert (accounts["train"], accounts["rollout"]) == ("run", "reader")


@pytest.mark.parametrize("name", NAMES)
def test_the_run_gets_the_recipe_with_what_lasts_in_storage(name: str, tmp_path: Path) -> None:
    (carried,) = [one for one in objects(name) if one["kind"] == "ConfigMap" and one["metadata"]["name"] == "recipe"]
    path = tmp_path / "recipe.toml"
    path.write_text(carried["data"]["recipe.toml"], encoding="utf-8")
    there, here = load_recipe(path), load_recipe(recipe_file(name))
    assert there.train.checkpoint_url == f"{here.cluster.storage}/checkpoints"
    again = there.model_copy(update={"train": there.train.model_copy(update={"checkpoint_url": ""})})
    assert again == here
    digests = {spec["contraflow/recipe-sha256"] for spec in _annotations(objects(name))}
    assert len(digests) == 1


def _annotations(tree: Any) -> list[dict[str, str]]:
    if isinstance(tree, list):
        return [found for part in tree for found in _annotations(part)]
    if not isinstance(tree, dict):
        return []
    here = [tree["annotations"]] if "contraflow/recipe-sha256" in (tree.get("annotations") or {}) else []
    return here + [found for part in tree.values() for found in _annotations(part)]


def test_quotas_admit_the_run_once_and_no_more() -> None:
    quota: dict[str, dict[str, str]] = {}
    for flavour in only("eks_48_nodes", "ClusterQueue")["spec"]["resourceGroups"][0]["flavors"]:
        quota[flavour["name"]] = {one["name"]: one["nominalQuota"] for one in flavour["resources"]}
    assert quota["rl-large-train"]["nvidia.com/gpu"] == 128
    assert quota["rl-large-rollout"]["vpc.amazonaws.com/efa"] == 512
    job = only("eks_48_nodes", "RayJob")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rl"
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        asked = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        have = quota[f"rl-large-{group['groupName']}"]
        assert int(asked["cpu"]) * group["replicas"] == have["cpu"]


def test_a_board_is_whole_json_and_shows_what_is_exported() -> None:
    (board,) = [one for one in objects("eks_2_nodes") if one["metadata"]["name"].startswith("board-")]
    (text,) = board["data"].values()
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all("ray_node_" in panel["targets"][0]["expr"] for panel in panels)
    monitor = only("eks_2_nodes", "PodMonitor")
    ports = {
        port["name"]
        for spec in pod_specs(only("eks_2_nodes", "RayJob"))
        for container in spec["containers"]
        for port in container.get("ports", [])
    }
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports


def test_the_bill_is_the_sum_of_the_nodes() -> None:
    page = render(recipe_file("eks_48_nodes"), ["cluster.pools.train.usd_per_hour=40.0"])["ORDER.md"]
    row = next(line for line in page.splitlines() if line.startswith("| all |"))
    known = 16 * 40.0 + 32 * 26.57
    assert f"at least {known:,.2f}" in row
    priced = [f"cluster.pools.{pool}.usd_per_hour=1.0" for pool in ("buffer", "control")]
    page = render(recipe_file("eks_2_nodes"), priced)["ORDER.md"]
    assert f"| all | 4 | | | {2 * 63.296 + 2:,.2f} |" in page


def test_every_file_that_the_order_names_is_written_and_every_file_is_named() -> None:
    for name in NAMES:
        found = render(recipe_file(name), [])
        named = set(re.findall(r"[a-z0-9.]+\.yaml", found["ORDER.md"]))
        assert named == set(found) - {"ORDER.md"}


def test_the_command_writes_the_files_and_does_not_touch_others(tmp_path: Path) -> None:
    from contraflow.cli import app

    folder = tmp_path / "out"
    said = CliRunner().invoke(app, ["eks", "render", str(recipe_file("eks_2_nodes")), "--out", str(folder)])
    assert said.exit_code == 0, said.output
    assert {path.name for path in folder.iterdir()} == set(render(recipe_file("eks_2_nodes"), []))
    CliRunner().invoke(
        app, ["eks", "render", str(recipe_file("eks_2_nodes")), "--out", str(folder)], catch_exceptions=False
    )
    (folder / "mine.txt").write_text("keep me", encoding="utf-8")
    said = CliRunner().invoke(app, ["eks", "render", str(recipe_file("eks_2_nodes")), "--out", str(folder)])
    assert said.exit_code == 1
    assert "holds mine.txt, which this recipe does not give" in str(said.exception)


def test_grace_is_longer_than_what_workers_take_to_leave() -> None:
    for name in NAMES:
        recipe = load_recipe(recipe_file(name))
        groups = only(name, "RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        (rollout,) = [group for group in groups if group["groupName"] == "rollout"]
        assert rollout["template"]["spec"]["terminationGracePeriodSeconds"] > math.ceil(recipe.rollout.grace_s)


def test_shipped_recipes_say_what_they_change() -> None:
    for name in NAMES:
        assert "cluster" in tomllib.loads(recipe_file(name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    for stem in NAMES:
        target = GOLDEN / stem
        target.mkdir(parents=True, exist_ok=True)
        for old in target.iterdir():
            old.unlink()
        for written_name, written_text in kept(stem).items():
            (target / written_name).write_text(written_text, encoding="utf-8")
