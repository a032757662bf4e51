"""Machines: the eksctl ClusterConfig with a node group per pool, and the permissions of the run's pods."""

import json

from contraflow.cluster.site import POOL_LABEL, Ask, Site
from contraflow.cluster.written import Object

GPU_TAINT = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}
WRITER, READER, NOBODY = "run", "reader", "env"  # service accounts: cuts and weights; the same, read; nothing at all

# The node's own disks as one, under images, logs and scratch space, by the script of the EKS image; a no-op without.
LOCAL_DISKS = "/usr/bin/setup-local-disks raid0"


def taints(ask: Ask) -> list[dict[str, str]]:
    """What keeps other pods off a pool's nodes. The control pool has none: the cluster's own pods run there."""
    own = {"key": POOL_LABEL, "value": ask.pool, "effect": "NoSchedule"}
    return [] if ask.pool == "control" else [own, *([GPU_TAINT] if ask.gpus else [])]


def commands(ask: Ask) -> list[str]:
    """Shell lines before a node joins: disks, and hugepages while memory is still in one piece."""
    lines = [LOCAL_DISKS] if ask.instance.nvme_tb else []
    if ask.hugepages_mib:
        pages = ask.hugepages_mib // 2
        lines.append(f"echo 'vm.nr_hugepages = {pages}' > /etc/sysctl.d/99-contraflow.conf")
        lines.append("sysctl -p /etc/sysctl.d/99-contraflow.conf")
    return lines


def cluster_config(site: Site) -> Object:
    """The cluster, its add-ons, the roles of its pods and, unless Karpenter brings nodes, a node group per pool."""
    cluster = site.cluster
    by_eksctl = [ask for ask in site.asks.values() if cluster.nodes_by == "eksctl" or ask.pool == "control"]
    return {
        "apiVersion": "eksctl.io/v1alpha5",
        "kind": "ClusterConfig",
        "metadata": {
            "name": cluster.name,
            "region": cluster.region,
            "version": cluster.kubernetes,
            "tags": {"contraflow/cluster": cluster.name},
        },
        "availabilityZones": [cluster.zone, cluster.second_zone],
        "vpc": {"nat": {"gateway": "Single"}},
        "addonsConfig": {"autoApplyPodIdentityAssociations": True},
        "addons": [
            # Without the policy agent NetworkPolicies are accepted and do nothing.
            {"name": "vpc-cni", "configurationValues": json.dumps({"enableNetworkPolicy": "true"})},
            {"name": "coredns"},
            {"name": "kube-proxy"},
            {"name": "eks-pod-identity-agent"},
        ],
        "iam": {"podIdentityAssociations": [_role(site, WRITER, write=True), _role(site, READER, write=False)]},
        "managedNodeGroups": [_node_group(site, ask) for ask in by_eksctl],
    }


def _node_group(site: Site, ask: Ask) -> Object:
    section = ask.section
    group: Object = {
        "name": ask.group,
        "amiFamily": "AmazonLinux2023",  # AL2's kernel has no DMA-BUF
        "instanceType": ask.instance.name,
        "minSize": section.nodes,
        "desiredCapacity": section.nodes,
        "maxSize": ask.most,
        "availabilityZones": [site.cluster.zone],
        "privateNetworking": True,
        "volumeSize": section.disk_gb,
        "volumeEncrypted": True,
        "disableIMDSv1": True,
        "disablePodIMDS": True,  # a pod that could ask for the node's role would have its permissions
        "labels": {POOL_LABEL: ask.pool},
        "updateConfig": {"maxUnavailable": 1},
    }
    if taints(ask):
        group["taints"] = taints(ask)
    if section.capacity == "spot":
        group["spot"] = True
    if section.capacity == "block":
        group["instanceMarketOptions"] = {"marketType": "capacity-block"}
        group["capacityReservation"] = {
            "capacityReservationTarget": {"capacityReservationID": section.reservation},
        }
    if ask.efa:
        group["efaEnabled"] = True  # also a security group that references itself, and a cluster placement group
    if commands(ask):
        group["preBootstrapCommands"] = commands(ask)
    return group


def _role(site: Site, account: str, *, write: bool) -> Object:
    return {
        "namespace": site.cluster.namespace,
        "serviceAccountName": account,
        "roleName": f"{site.cluster.name}-{site.cluster.namespace}-{account}"[:64],
        "permissionPolicy": policy(site, write=write),
    }


def policy(site: Site, *, write: bool) -> Object:
    """What a pod may do on S3: the run's prefix and nothing else.

    A conditional put (If-None-Match), by which cuts are committed, is an `s3:PutObject`; it needs no action of its own.
    """
    bucket = f"arn:{site.partition}:s3:::{site.bucket}"
    actions = ["s3:GetObject"]
    if write:
        actions += ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "ListTheRun",
                "Effect": "Allow",
                "Action": ["s3:ListBucket"],
                "Resource": [bucket],
                "Condition": {"StringLike": {"s3:prefix": [site.prefix, f"{site.prefix}/*"]}},
            },
            {
                "Sid": "KeepTheRun" if write else "ReadTheRun",
                "Effect": "Allow",
                "Action": actions,
                "Resource": [f"{bucket}/{site.prefix}/*"],
            },
        ],
    }
