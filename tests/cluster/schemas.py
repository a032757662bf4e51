"""Schemas that rendered objects are held to: unknown fields are errors.

Kinds of Kubernetes itself come with the package kubernetes-validate. Those of others are data files in a folder that is
no part of this repository: CONTRAFLOW_SCHEMAS names it, else it is looked for beside the repository.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

FILES = {
    "RayJob": "kuberay.rayjobs.yaml",
    "NodePool": "karpenter.sh_nodepools.yaml",
    "EC2NodeClass": "karpenter.k8s.aws_ec2nodeclasses.yaml",
    "ClusterQueue": "kueue.clusterqueues.yaml",
    "LocalQueue": "kueue.localqueues.yaml",
    "ResourceFlavor": "kueue.resourceflavors.yaml",
    "Topology": "kueue.topologies.yaml",
}
FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of files of a megabyte
EKSCTL = "eksctl.v1alpha5.schema.json"
CORE = {"Namespace", "ServiceAccount", "NetworkPolicy", "ConfigMap", "Deployment", "Service"}
WITHOUT = {"PodMonitor"}  # of the Prometheus operator, whose schema is not there


def schema_folder() -> Path | None:
    """Where the data files are, or None."""
    named = os.environ.get("CONTRAFLOW_SCHEMAS")
    folder = Path(named) if named else Path(__file__).parents[2].parent / "shared" / "schemas"
    return folder if (folder / EKSCTL).is_file() else None


def strict(schema: Any) -> Any:
    """An openAPIV3Schema as a JSON schema in which a field that is not listed is an error."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: strict(value) for key, value in schema.items() if key not in ("properties", "description", "default")}
    if "properties" in schema:
        made["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            made["additionalProperties"] = False
    return made


@cache
def _schema(folder: Path, kind: str, version: str) -> Any:
    """Of a CRD."""
    crd = yaml.load((folder / FILES[kind]).read_text(encoding="utf-8"), Loader=FAST)
    assert crd["spec"]["names"]["kind"] == kind
    group = crd["spec"]["group"]
    found = {f"{group}/{one['name']}": one for one in crd["spec"]["versions"] if one["served"]}
    whole = found[version]["schema"]["openAPIV3Schema"]
    properties = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": {"type": "object"}}
    return _validator(strict(whole | {"properties": whole["properties"] | properties}))


@cache
def _eksctl(folder: Path) -> Any:
    return _validator(json.loads((folder / EKSCTL).read_text(encoding="utf-8")))


def _validator(schema: Any) -> Any:
    """Made once: `jsonschema.validate` would look through the whole schema each time."""
    return jsonschema.validators.validator_for(schema)(schema)


def check(one: Mapping[str, Any], folder: Path, kubernetes: str) -> None:
    """Raise unless the object is what its schema says."""
    kind = one["kind"]
    if kind in CORE:
        kubernetes_validate.validate(one, kubernetes, strict=True)
    elif kind == "ClusterConfig":
        _eksctl(folder).validate(one)
    else:
        _schema(folder, kind, one["apiVersion"]).validate(one)
    for spec in pod_specs(one):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, kubernetes, strict=True)


def pod_specs(tree: Any) -> list[Any]:
    """The specs of all pods that an object would bring."""
    if isinstance(tree, list):
        return [spec for part in tree for spec in pod_specs(part)]
    if not isinstance(tree, Mapping):
        return []
    here = [tree] if "containers" in tree else []
    return here + [spec for part in tree.values() for spec in pod_specs(part)]
