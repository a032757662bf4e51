"""What is measured: PodMonitors for Prometheus, and a Grafana board of what Ray's nodes say about themselves.

Ray exports the figures of each pod (GPU, memory, network, disk) on one port; the board shows them by pool.
"""

import json

from contraflow.cluster.pods import labels
from contraflow.cluster.site import POOL_LABEL, Site
from contraflow.cluster.walls import MONITORING
from contraflow.cluster.written import Object

POOL = "contraflow_pool"  # the pool's label as Prometheus writes it
EVERY = "15s"

PANELS = (  # title, unit of Grafana, expression
    ("GPU use", "percent", f"avg by ({POOL}) (ray_node_gpus_utilization)"),
    ("GPU memory used", "decmbytes", f"sum by ({POOL}) (ray_node_gram_used)"),
    ("Processor use", "percent", f"avg by ({POOL}) (ray_node_cpu_utilization)"),
    ("Memory used", "bytes", f"sum by ({POOL}) (ray_node_mem_used)"),
    ("Sent, without EFA", "Bps", f"sum by ({POOL}) (ray_node_network_send_speed)"),
    ("Received, without EFA", "Bps", f"sum by ({POOL}) (ray_node_network_receive_speed)"),
    ("Disk written", "Bps", f"sum by ({POOL}) (ray_node_disk_io_write_speed)"),
    ("Pods that report", "none", f"count by ({POOL}) (ray_node_cpu_count)"),
)


def pod_monitors(site: Site) -> list[Object]:
    """One for all of the run's pods; a pod's pool is a label of each figure."""
    selector = {name: value for name, value in labels(site, "").items() if name != POOL_LABEL}
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": {
                "name": site.cluster.name,
                "namespace": site.cluster.namespace,
                "labels": {"release": "prometheus"},
            },
            "spec": {
                "selector": {"matchLabels": selector},
                "podTargetLabels": [POOL_LABEL],
                "podMetricsEndpoints": [{"port": "metrics", "interval": EVERY}],
            },
        }
    ]


def board(site: Site) -> Object:
    """A ConfigMap that Grafana's sidecar takes as a dashboard."""
    panels = [
        {
            "id": number,
            "title": title,
            "type": "timeseries",
            "datasource": {"type": "prometheus", "uid": "prometheus"},
            "gridPos": {"x": 12 * ((number - 1) % 2), "y": 8 * ((number - 1) // 2), "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "expr": expression, "legendFormat": f"{{{{{POOL}}}}}"}],
        }
        for number, (title, unit, expression) in enumerate(PANELS, 1)
    ]
    content = {
        "uid": f"contraflow-{site.cluster.name}"[:40],
        "title": f"contraflow: {site.cluster.name}",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": panels,
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"board-{site.cluster.name}",
            "namespace": MONITORING,
            "labels": {"grafana_dashboard": "1"},
        },
        "data": {f"{site.cluster.name}.json": json.dumps(content, indent=1) + "\n"},
    }
