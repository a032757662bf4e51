"""The run itself: a RayJob of KubeRay with a cluster of its own, one worker group per pool; and its recipe."""

from contraflow.cluster.nodes import READER, WRITER
from contraflow.cluster.pods import RECIPE_FOLDER, RUNS, labels, pod_template, start_parameters
from contraflow.cluster.site import ON_NODES, POOL_LABEL, Ask, Site
from contraflow.cluster.versions import RAY
from contraflow.cluster.written import Object

SUBMITTER = "submitter"
KEEP_S = 600  # a finished run's pods, for a look at their logs


def recipe_map(site: Site) -> Object:
    """The recipe as the run reads it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "recipe",
            "namespace": site.cluster.namespace,
            "annotations": {"contraflow/recipe-sha256": site.recipe_digest()},
        },
        "data": {"recipe.toml": site.recipe_text()},
    }


def accounts(site: Site) -> list[Object]:
    """Service accounts: roles for S3 hang on their names, and none has a token for the cluster's API."""
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": name, "namespace": site.cluster.namespace},
            "automountServiceAccountToken": False,
        }
        for name in (WRITER, READER)
    ]


def entrypoint(site: Site) -> str:
    """The command line of the run."""
    return f"contraflow run {RECIPE_FOLDER}/recipe.toml --folder {RUNS}/{site.cluster.name} --runtime ray --plain"


def ray_job(site: Site) -> Object:
    """The job. It is not tried again by itself: `contraflow resume` goes on from the newest cut."""
    cluster = site.cluster
    metadata: Object = {"name": cluster.name, "namespace": cluster.namespace, "labels": labels(site, "control")}
    if cluster.queue:
        metadata["labels"] = metadata["labels"] | {"kueue.x-k8s.io/queue-name": cluster.queue}
    del metadata["labels"][POOL_LABEL]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            "entrypoint": entrypoint(site),
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEEP_S,
            "submitterPodTemplate": _submitter(site),
            "rayClusterSpec": {
                "rayVersion": RAY,
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": False,
                "headGroupSpec": {
                    "rayStartParams": start_parameters(site.asks["control"]),
                    "template": pod_template(site, site.asks["control"]),
                },
                "workerGroupSpecs": [_group(site, ask) for ask in site.asks.values() if ask.pool in ON_NODES],
            },
        },
    }


def _group(site: Site, ask: Ask) -> Object:
    return {
        "groupName": ask.pool,
        "replicas": ask.section.nodes,
        "minReplicas": ask.section.nodes,
        "maxReplicas": ask.most,
        "rayStartParams": start_parameters(ask),
        "template": pod_template(site, ask),
    }


def _submitter(site: Site) -> Object:
    asked = {"cpu": "500m", "memory": "1Gi"}
    return {
        "metadata": {"labels": labels(site, SUBMITTER)},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "nodeSelector": {POOL_LABEL: "control"},
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "submitter",
                    "image": site.cluster.cpu_image,
                    "resources": {"requests": asked, "limits": dict(asked)},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
