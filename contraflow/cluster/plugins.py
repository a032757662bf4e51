"""Values of the charts that make GPUs and EFA interfaces something a pod can ask for."""

from contraflow.cluster.nodes import GPU_TAINT
from contraflow.cluster.site import POOL_LABEL, Site
from contraflow.cluster.versions import EFA_PLUGIN
from contraflow.cluster.written import Object


def _tolerations() -> list[Object]:
    return [
        {"key": POOL_LABEL, "operator": "Exists", "effect": "NoSchedule"},
        {"key": GPU_TAINT["key"], "operator": "Exists", "effect": "NoSchedule"},
    ]


def efa_values(site: Site) -> Object:
    """Of the chart eks/aws-efa-k8s-device-plugin: on the cluster's own types only."""
    types = sorted({ask.instance.name for ask in site.asks.values() if ask.efa})
    return {
        "image": {"tag": EFA_PLUGIN},
        "supportedInstanceLabels": {"keys": ["node.kubernetes.io/instance-type"], "values": types},
        "tolerations": _tolerations(),
    }


def nvidia_values(site: Site) -> Object:
    """Of the chart nvdp/nvidia-device-plugin: on pools with GPUs, with GDRCopy's device for pods that ask."""
    pools = [ask.pool for ask in site.asks.values() if ask.gpus]
    on_pools = {"matchExpressions": [{"key": POOL_LABEL, "operator": "In", "values": pools}]}
    return {
        "gdrcopyEnabled": True,
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [on_pools]}}
        },
        "tolerations": _tolerations(),
    }
