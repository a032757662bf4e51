"""The pods of Ray's head and workers: one a node, with the node's GPUs and EFA interfaces, and a copy of the model.

No pod gets a token for the cluster's API. Root in a GPU container is what `IPC_LOCK` needs to be in force (NCCL and EFA
pin memory); every other capability is dropped.
"""

import json
import math

from contraflow.cluster.nodes import READER, WRITER, taints
from contraflow.cluster.site import MODELS, OBJECT_STORE_GIB, POOL_LABEL, Ask, Site
from contraflow.cluster.written import Object
from contraflow.config import PoolName

RECIPE_FOLDER = "/etc/contraflow"
RUNS = "/runs"
METRICS_PORT = 8080  # Ray's own
LAYERS = tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (1, 2, 3))  # from the far end of the network
START_S = 1800  # until a pod's Ray answers: an image of 20 GB is pulled and a model copied before
LEAVE_S: dict[PoolName, int] = {"train": 600, "reward": 60, "buffer": 120, "control": 120}  # to end in order


def labels(site: Site, pool: str) -> dict[str, str]:
    """What policies and monitors find a pod by."""
    return {"app.kubernetes.io/part-of": "contraflow", "contraflow/cluster": site.cluster.name, POOL_LABEL: pool}


def pod_template(site: Site, ask: Ask) -> Object:
    """The pod of a pool: the head's for `control`, a worker's for the others."""
    head = ask.pool == "control"
    spec: Object = {
        "serviceAccountName": READER if ask.pool in ("rollout", "reward") else WRITER,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": {POOL_LABEL: ask.pool, "topology.kubernetes.io/zone": site.cluster.zone},
        "tolerations": _tolerations(ask),
        "terminationGracePeriodSeconds": _leave_s(site, ask.pool),
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(site, ask)],
        "volumes": _volumes(site, ask),
    }
    if not head:
        spec["restartPolicy"] = "Never"  # a worker that died is started anew by the run, in a new pod
    if ask.pool in ("train", "rollout") and ask.section.nodes > 1 and not site.cluster.queue:
        spec["affinity"] = {"podAffinity": _near(site, ask.pool)}
    spec["initContainers"] = [
        _versions_container(site, ask),
        *(_model_container(site, ask, name) for name in site.models(ask.pool)),
    ]
    return {"metadata": {"labels": labels(site, ask.pool), "annotations": _annotations(site, ask)}, "spec": spec}


def _container(site: Site, ask: Ask) -> Object:
    added = {"add": ["IPC_LOCK"]} if ask.gpus else {}
    port, path = (8265, "/api/gcs_healthz") if ask.pool == "control" else (52365, "/api/local_raylet_healthz")
    probe: Object = {"httpGet": {"port": port, "path": path}, "periodSeconds": 10, "timeoutSeconds": 10}
    container: Object = {
        "name": "ray",
        "image": site.cluster.gpu_image if ask.gpus else site.cluster.cpu_image,
        "resources": ask.resources(),
        "env": [{"name": name, "value": value} for name, value in _environment(site, ask).items()],
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **added}},
        "startupProbe": probe | {"failureThreshold": START_S // 10},
        "livenessProbe": probe | {"failureThreshold": 12},
        "readinessProbe": probe | {"failureThreshold": 3},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "runs", "mountPath": RUNS},
            {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
        ],
    }
    if site.models(ask.pool):
        container["volumeMounts"].append({"name": "models", "mountPath": MODELS, "readOnly": True})
    if ask.hugepages_mib:
        container["volumeMounts"].append({"name": "hugepages", "mountPath": "/dev/hugepages"})
    return container


def _environment(site: Site, ask: Ask) -> dict[str, str]:
    """What libraries cannot find out by themselves. FI_PROVIDER and its kin are not set: they do, by now."""
    known = {"AWS_REGION": site.cluster.region, "RAY_memory_monitor_refresh_ms": "0"}
    if not ask.gpus:
        return known | {"NVIDIA_VISIBLE_DEVICES": "void"}  # no driver is mounted into a pod without GPUs
    known |= {"NCCL_SOCKET_IFNAME": "^lo,docker", "NVIDIA_GDRCOPY": "enabled"}  # a list of what not: names differ
    if not ask.hugepages_mib:
        known["FI_EFA_USE_HUGE_PAGE"] = "0"  # pages a forked process cannot have
    if ask.instance.name.startswith("p6-b300"):
        known["NCCL_IB_HCA"] = "rdmap"  # two of its 18 verbs devices are not EFA
    return known


def _versions_container(site: Site, ask: Ask) -> Object:
    """Ends the pod before its Ray starts, with a line for each library that is not the one the image was made of."""
    asked = {"cpu": "2", "memory": "4Gi"}
    return {
        "name": "versions",
        "image": site.cluster.gpu_image if ask.gpus else site.cluster.cpu_image,
        "command": ["contraflow", "eks", "versions", "--image", "gpu" if ask.gpus else "cpu"],
        "resources": {"requests": asked, "limits": dict(asked)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _model_container(site: Site, ask: Ask, name: str) -> Object:
    """Copies the model to the node's disks; the head, which computes nothing with it, gets no weights."""
    source, target = f"{site.cluster.storage}/models/{name}", f"{MODELS}/{name}"
    less = ["--exclude", "*.safetensors"] if ask.pool == "control" else []
    asked = {"cpu": "2", "memory": "4Gi"}
    return {
        "name": "model",
        "image": site.cluster.gpu_image if ask.gpus else site.cluster.cpu_image,
        "command": ["aws", "s3", "sync", source, target, "--only-show-errors", *less],
        "resources": {"requests": asked, "limits": dict(asked)},
        "env": [{"name": "AWS_REGION", "value": site.cluster.region}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "models", "mountPath": MODELS}],
    }


def _volumes(site: Site, ask: Ask) -> list[Object]:
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{ask.shm_gib}Gi"}},
        {"name": "runs", "emptyDir": {}},
        {"name": "recipe", "configMap": {"name": "recipe"}},
    ]
    if site.models(ask.pool):
        volumes.append({"name": "models", "emptyDir": {}})
    if ask.hugepages_mib:
        volumes.append({"name": "hugepages", "emptyDir": {"medium": "HugePages"}})
    return volumes


def _tolerations(ask: Ask) -> list[Object]:
    return [
        {"key": taint["key"], "operator": "Equal", "value": taint["value"], "effect": taint["effect"]}
        for taint in taints(ask)
    ]


def _annotations(site: Site, ask: Ask) -> dict[str, str]:
    notes = {"contraflow/recipe-sha256": site.recipe_digest()}
    if ask.pool in ("train", "buffer", "control"):
        notes["karpenter.sh/do-not-disrupt"] = "true"
    if site.cluster.queue and ask.pool in ("train", "rollout"):
        notes["kueue.x-k8s.io/podset-preferred-topology"] = LAYERS[-1]
    return notes


def _leave_s(site: Site, pool: PoolName) -> int:
    """Seconds from SIGTERM to SIGKILL."""
    return LEAVE_S[pool] if pool in LEAVE_S else math.ceil(site.recipe.rollout.grace_s) + 15


def _near(site: Site, pool: PoolName) -> Object:
    """Close to its own kind: on the same switch best, on neighbouring ones second."""
    selector = {"matchLabels": labels(site, pool)}
    return {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": weight, "podAffinityTerm": {"labelSelector": selector, "topologyKey": key}}
            for weight, key in zip((10, 30, 100), LAYERS, strict=True)
        ]
    }


def start_parameters(ask: Ask) -> dict[str, str]:
    """Of `ray start`: what the run's workers ask for by the pool's name, as many as GPUs, or vCPU without."""
    units = json.dumps({f"contraflow_{ask.pool}": ask.gpus or ask.vcpu})
    parameters = {
        "resources": json.dumps(units),  # a text within a shell's word
        "object-store-memory": str(OBJECT_STORE_GIB * 2**30),
        "metrics-export-port": str(METRICS_PORT),
    }
    return parameters | ({"dashboard-host": "0.0.0.0", "num-cpus": "0"} if ask.pool == "control" else {})
