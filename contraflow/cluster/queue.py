"""For Kueue, which admits all pods of a run or none: its queue, quotas, and the layers of the network."""

from collections.abc import Mapping

from contraflow.cluster.pods import LAYERS
from contraflow.cluster.site import POOL_LABEL, Ask, Site
from contraflow.cluster.written import Object


def queue_objects(site: Site) -> Mapping[str, list[Object]]:
    """The network's layers, the pools as flavours with their quota, and the queue, by kind."""
    cluster, layers = site.cluster, [*LAYERS, "kubernetes.io/hostname"]
    on_ray = [ask for ask in site.asks.values() if ask.pool != "env"]
    return {
        "Topology": [_kueue("Topology", "aws", levels=[{"nodeLabel": label} for label in layers])],
        "ResourceFlavor": [
            _kueue(
                "ResourceFlavor",
                _flavour(site, ask),
                nodeLabels={POOL_LABEL: ask.pool},
                **({"topologyName": "aws"} if ask.gpus else {}),
            )
            for ask in on_ray
        ],
        "ClusterQueue": [
            _kueue(
                "ClusterQueue",
                cluster.queue,
                namespaceSelector={"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}},
                resourceGroups=[_quota(site, on_ray)],
            )
        ],
        "LocalQueue": [_kueue("LocalQueue", cluster.queue, cluster.namespace, clusterQueue=cluster.queue)],
    }


def _kueue(kind: str, name: str, namespace: str = "", **spec: object) -> Object:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata, "spec": spec}


def _flavour(site: Site, ask: Ask) -> str:
    return f"{site.cluster.name}-{ask.group}"


def _quota(site: Site, asks: list[Ask]) -> Object:
    """What all nodes of each pool can give; of the control pool the head takes half, the submitter of the rest."""
    names = ["cpu", "memory", "nvidia.com/gpu", "vpc.amazonaws.com/efa", "hugepages-2Mi"]
    flavours = []
    for ask in asks:
        nodes, whole = ask.most, ask.pool != "control"
        have = {
            "cpu": nodes * (ask.vcpu if whole else 2 * ask.vcpu),
            "memory": f"{nodes * (ask.memory_gib if whole else 2 * ask.memory_gib)}Gi",
            "nvidia.com/gpu": nodes * ask.gpus,
            "vpc.amazonaws.com/efa": nodes * ask.efa,
            "hugepages-2Mi": f"{nodes * ask.hugepages_mib}Mi",
        }
        quota = [{"name": name, "nominalQuota": have[name]} for name in names]
        flavours.append({"name": _flavour(site, ask), "resources": quota})
    return {"coveredResources": names, "flavors": flavours}
