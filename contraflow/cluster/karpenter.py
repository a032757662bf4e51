"""Machines by Karpenter instead of node groups: a NodePool and an EC2NodeClass per pool."""

from contraflow.cluster.nodes import commands, taints
from contraflow.cluster.site import POOL_LABEL, Ask, Site
from contraflow.cluster.written import Object

CAPACITY = {"on_demand": "on-demand", "spot": "spot", "block": "reserved"}


def brought(site: Site) -> list[Ask]:
    """The pools whose nodes Karpenter brings: all but control, where it runs itself."""
    return [ask for ask in site.asks.values() if ask.pool != "control"]


def placement_group(site: Site, ask: Ask) -> str:
    """Name of the EC2 placement group of a pool, or empty: blocks lie close together already."""
    return f"{site.cluster.name}-{ask.group}" if ask.efa and ask.section.capacity != "block" else ""


def node_classes(site: Site) -> list[Object]:
    """What machines are made from."""
    return [_node_class(site, ask) for ask in brought(site)]


def node_pools(site: Site) -> list[Object]:
    """When machines come and go: when pods wait for them, and a minute after the last pod has left."""
    return [_node_pool(site, ask) for ask in brought(site)]


def _node_class(site: Site, ask: Ask) -> Object:
    name = site.cluster.name
    spec: Object = {
        "role": f"KarpenterNodeRole-{name}",
        "amiSelectorTerms": [{"alias": "al2023@latest"}],
        "subnetSelectorTerms": [
            {"tags": {"alpha.eksctl.io/cluster-name": name, "kubernetes.io/role/internal-elb": "1"}}
        ],
        "securityGroupSelectorTerms": [{"tags": {"aws:eks:cluster-name": name}}],
        "blockDeviceMappings": [
            {
                "deviceName": "/dev/xvda",
                "ebs": {"volumeSize": f"{ask.section.disk_gb}Gi", "volumeType": "gp3", "encrypted": True},
            }
        ],
        # One hop: pods, which are a second one, do not reach the node's role.
        "metadataOptions": {"httpEndpoint": "enabled", "httpPutResponseHopLimit": 1, "httpTokens": "required"},
        "tags": {"contraflow/cluster": name},
    }
    if ask.instance.nvme_tb:
        spec["instanceStorePolicy"] = "RAID0"
    if ask.section.capacity == "block":
        spec["capacityReservationSelectorTerms"] = [{"id": ask.section.reservation}]
    if placement_group(site, ask):
        spec["placementGroupSelector"] = {"name": placement_group(site, ask)}
    lines = [line for line in commands(ask) if "sysctl" in line]  # disks are Karpenter's own business here
    if lines:
        spec["userData"] = "\n".join(["#!/bin/bash", "set -euo pipefail", *lines, ""])
    return {
        "apiVersion": "karpenter.k8s.aws/v1",
        "kind": "EC2NodeClass",
        "metadata": {"name": ask.group},
        "spec": spec,
    }


def _node_pool(site: Site, ask: Ask) -> Object:
    requirements = [
        ("node.kubernetes.io/instance-type", ask.instance.name),
        ("topology.kubernetes.io/zone", site.cluster.zone),
        ("karpenter.sh/capacity-type", CAPACITY[ask.section.capacity]),
    ]
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": ask.group},
        "spec": {
            "template": {
                "metadata": {"labels": {POOL_LABEL: ask.pool}},
                "spec": {
                    "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": ask.group},
                    "requirements": [{"key": key, "operator": "In", "values": [value]} for key, value in requirements],
                    "taints": taints(ask),
                    "expireAfter": "Never",
                },
            },
            "limits": {"nodes": str(ask.most)},
            "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "60s"},
        },
    }
