"""Who may talk to whom: namespaces and NetworkPolicies; and the environment's servers, which may talk to nobody.

NetworkPolicies govern what goes through a pod's own interface. They do not govern EFA traffic, which bypasses the
kernel, nor pods on the host's network; the EFA security group and the absence of such pods have to do for those.
"""

from contraflow.cluster.nodes import GPU_TAINT, NOBODY
from contraflow.cluster.pods import METRICS_PORT, labels
from contraflow.cluster.site import POOL_LABEL, Site
from contraflow.cluster.written import Object

ENV_PORT = 8080
OPERATOR, MONITORING = "kuberay-system", "monitoring"  # namespaces of KubeRay's operator and of Prometheus
INSIDE = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"]
POD_IDENTITY = "169.254.170.23/32"  # of the agent that hands out a pod's credentials
SCRATCH = "2Gi"


def namespaces(site: Site) -> list[Object]:
    """The run's, where a capability is added (IPC_LOCK), and the environment's, where nothing is allowed."""
    levels = {site.cluster.namespace: "privileged"} | ({site.env_namespace: "restricted"} if "env" in site.asks else {})
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": level}},
        }
        for name, level in levels.items()
    ]


def network_policies(site: Site) -> list[Object]:
    """Nothing is allowed but what is listed."""
    ours = {"podSelector": {"matchLabels": _run(site)}}
    policies = [
        _policy(site.cluster.namespace, "nothing", {}, ingress=[], egress=[]),
        _policy(
            site.cluster.namespace, "inside-the-run", _run(site), ingress=[{"from": [ours]}], egress=[{"to": [ours]}]
        ),
        _policy(site.cluster.namespace, "names-and-s3", _run(site), egress=_outside()),
        _policy(
            site.cluster.namespace,
            "operator-to-head",
            labels(site, "control"),
            ingress=[{"from": [_space(OPERATOR)], "ports": [_port(8265)]}],
        ),
        _policy(
            site.cluster.namespace,
            "metrics",
            _run(site),
            ingress=[{"from": [_space(MONITORING)], "ports": [_port(METRICS_PORT)]}],
        ),
    ]
    if "env" not in site.asks:
        return policies
    there = _space(site.env_namespace) | {"podSelector": {"matchLabels": labels(site, "env")}}
    asking = _space(site.cluster.namespace) | {"podSelector": {"matchLabels": labels(site, "rollout")}}
    return [
        *policies,
        _policy(
            site.cluster.namespace,
            "rollout-to-env",
            labels(site, "rollout"),
            egress=[{"to": [there], "ports": [_port(ENV_PORT)]}],
        ),
        _policy(
            site.env_namespace,
            "asked-by-rollout-only",
            {},
            ingress=[{"from": [asking], "ports": [_port(ENV_PORT)]}],
            egress=[],
        ),
    ]


def _run(site: Site) -> dict[str, str]:
    found = labels(site, "")
    del found[POOL_LABEL]
    return found


def _outside() -> list[Object]:
    dns = _space("kube-system") | {"podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
    return [
        {"to": [dns], "ports": [_port(53), _port(53, "UDP")]},
        {"to": [{"ipBlock": {"cidr": POD_IDENTITY}}], "ports": [_port(80)]},
        {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": INSIDE}}], "ports": [_port(443)]},
    ]


def _policy(namespace: str, name: str, pods: dict[str, str], **rules: list[Object]) -> Object:
    """`rules` are `ingress` and `egress`; a direction that is given as empty is closed, one not given is as it was."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "podSelector": {"matchLabels": pods} if pods else {},
            "policyTypes": [direction.capitalize() for direction in rules],
            **{direction: allowed for direction, allowed in rules.items() if allowed},
        },
    }


def _space(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _port(port: int, protocol: str = "TCP") -> Object:
    return {"protocol": protocol, "port": port}


def env_server(site: Site) -> list[Object]:
    """The environment's servers and the name they answer under."""
    ask = site.asks["env"]
    selector, namespace = labels(site, "env"), site.env_namespace
    metadata = {"name": "env", "namespace": namespace, "labels": selector}
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": NOBODY, "namespace": namespace},
            "automountServiceAccountToken": False,
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": ask.section.nodes * ask.section.pods,
                "selector": {"matchLabels": selector},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
                "template": {"metadata": {"labels": selector}, "spec": _env_pod(site)},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": selector, "ports": [{"name": "http", "port": ENV_PORT, "targetPort": ENV_PORT}]},
        },
    ]


def _env_pod(site: Site) -> Object:
    ask = site.asks["env"]
    asked = ask.resources()
    for side in asked.values():
        side["ephemeral-storage"] = SCRATCH
    container: Object = {
        "name": "env",
        "image": site.cluster.env_image,
        "resources": asked,
        "ports": [{"name": "http", "containerPort": ENV_PORT}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "startupProbe": {"tcpSocket": {"port": ENV_PORT}, "periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {"tcpSocket": {"port": ENV_PORT}, "periodSeconds": 5},
        "livenessProbe": {"tcpSocket": {"port": ENV_PORT}, "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    if site.cluster.env_command:
        container["command"] = list(site.cluster.env_command)
    return {
        "serviceAccountName": NOBODY,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": {POOL_LABEL: "env", "topology.kubernetes.io/zone": site.cluster.zone},
        "tolerations": [
            {"key": POOL_LABEL, "operator": "Equal", "value": "env", "effect": "NoSchedule"},
            *([{"key": GPU_TAINT["key"], "operator": "Exists", "effect": "NoSchedule"}] if ask.gpus else []),
        ],
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65534,
            "runAsGroup": 65534,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": SCRATCH}}],
    }
