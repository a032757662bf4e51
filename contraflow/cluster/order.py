"""ORDER.md: what of the written files is applied in which order, what it costs, and how all of it goes again."""

from contraflow.cluster.karpenter import brought, placement_group
from contraflow.cluster.pods import RUNS
from contraflow.cluster.rayjob import entrypoint
from contraflow.cluster.site import Ask, Site, in_storage
from contraflow.cluster.versions import KUBERAY_CHART, NVIDIA_PLUGIN_CHART
from contraflow.cluster.walls import MONITORING, OPERATOR

UNKNOWN = "not known"
CHARTS = {  # Helm repositories, by the names that the steps call them
    "eks": "https://aws.github.io/eks-charts",
    "nvdp": "https://nvidia.github.io/k8s-device-plugin",
    "kuberay": "https://ray-project.github.io/kuberay-helm/",
    "prometheus-community": "https://prometheus-community.github.io/helm-charts",
}


def order(site: Site, source: str) -> str:
    """The page, in Markdown. `source` is the recipe's file name."""
    name, namespace = site.cluster.name, site.cluster.namespace
    parts = [
        f"# {name}: order of work\n\nWritten by `contraflow eks render {source}`. Nothing of it has been applied. Each"
        " step waits for the one before.\n",
        "## Machines, and what they cost while they are there\n\n" + _bill(site),
        "## Up\n\n" + _numbered(_up(site, source)),
        "## While it runs\n\n"
        f'- The log: `kubectl -n {namespace} logs -f job/{name}`; the board: Grafana, "contraflow: {name}".\n'
        f"- A run that ended early, its head restarted among the causes, goes on from its newest cut: in rayjobs.yaml"
        f" change the entrypoint to `{_resume(site)}`, delete the RayJob and apply it again.\n"
        "- NetworkPolicies govern neither EFA traffic, which bypasses the kernel, nor pods on the host's network.\n",
        "## Down, in this order\n\n" + _numbered(_down(site)),
    ]
    return "\n".join(parts)


def _bill(site: Site) -> str:
    rows = ["| pool | nodes | type | capacity | USD per hour |", "|---|---|---|---|---|"]
    total, unknown = 0.0, False
    for ask in site.asks.values():
        price = _price(ask)
        cost = UNKNOWN if price is None else f"{price * ask.section.nodes:,.2f}"
        unknown = unknown or price is None
        total += (price or 0.0) * ask.section.nodes
        rows.append(f"| {ask.pool} | {ask.section.nodes} | {ask.instance.name} | {ask.section.capacity} | {cost} |")
    least = "at least " if unknown else ""
    rows.append(f"| all | {sum(ask.section.nodes for ask in site.asks.values())} | | | {least}{total:,.2f} |")
    note = (
        "Prices are `usd_per_hour` of the recipe, else on-demand prices of the instance table. EKS itself, storage,"
        " NAT and traffic come on top. Nodes cost from the moment they are there, whether a run uses them or not.\n"
    )
    return "\n".join([*rows, "", note])


def _price(ask: Ask) -> float | None:
    """USD an hour of one node. The table's on-demand price says nothing about Spot or a block."""
    if ask.section.usd_per_hour:
        return ask.section.usd_per_hour
    return ask.instance.usd_per_hour if ask.section.capacity == "on_demand" else None


def _up(site: Site, source: str) -> list[str]:
    cluster = site.cluster
    gpu = any(ask.gpus for ask in site.asks.values())
    kinds = ", ".join(sorted({ask.instance.name for ask in site.asks.values()}))
    steps = [
        f"Quotas: running on-demand, Spot or capacity-block instances of {kinds} in {cluster.region}; a bucket"
        f" `{site.bucket}` in {cluster.region}; both images in a registry that the nodes can read.",
        "The cluster, its roles and its nodes (20 to 40 minutes; from here on machines cost):"
        " `eksctl create cluster -f clusterconfigs.yaml`",
    ]
    models = sorted({name for pool in site.asks for name in site.models(pool)})
    steps += [f"A model, from its folder: `aws s3 sync {model} {cluster.storage}/models/{model}`" for model in models]
    if cluster.nodes_by == "karpenter":
        steps += _karpenter(site)
    charts = (["eks", "nvdp"] if gpu else []) + ["kuberay", "prometheus-community"]
    added = "; ".join(f"`helm repo add {name} {CHARTS[name]}`" for name in charts)
    steps.append(f"Where Helm finds the charts: {added}; `helm repo update`")
    if gpu:
        steps.append(
            "Devices: `helm install efa eks/aws-efa-k8s-device-plugin -n kube-system -f values.efa.yaml` and"
            f" `helm install nvidia nvdp/nvidia-device-plugin --version {NVIDIA_PLUGIN_CHART} -n kube-system"
            " -f values.nvidia.yaml`"
        )
    steps += [
        f"The operator: `helm install kuberay kuberay/kuberay-operator --version {KUBERAY_CHART} -n {OPERATOR}"
        " --create-namespace`",
        f"Prometheus and Grafana: `helm install prometheus prometheus-community/kube-prometheus-stack -n {MONITORING}"
        " --create-namespace`",
    ]
    if cluster.queue:
        steps.append(
            "Kueue, of a version that has kueue.x-k8s.io/v1beta2; then `kubectl apply -f topologies.yaml -f"
            " resourceflavors.yaml -f clusterqueues.yaml`"
        )
    steps.append(
        "`kubectl apply -f namespaces.yaml`, then `-f serviceaccounts.yaml -f networkpolicies.yaml -f configmaps.yaml`"
    )
    if cluster.queue:
        steps.append("`kubectl apply -f localqueues.yaml`")
    if "env" in site.asks:
        steps.append("The environment: `kubectl apply -f deployments.yaml -f services.yaml`")
    steps += [
        "`kubectl apply -f podmonitors.yaml`",
        _see_nodes(site, source),
        f"The run: `kubectl apply -f rayjobs.yaml`. It starts `{entrypoint(site)}`.",
    ]
    return steps


def _see_nodes(site: Site, source: str) -> str:
    if site.cluster.nodes_by == "karpenter":
        return (
            "Nodes come when pods ask for them, and pods ask for all EFA interfaces of a type. Where nodes offer"
            f" fewer (p5en has been seen with 15 of 16), pods wait for ever: set the pool's `efa` in {source}"
            " and write again."
        )
    return (
        "Hold the requests to what the nodes really offer (p5en has been seen with 15 of 16 EFA interfaces):"
        f" `kubectl get nodes -o json > nodes.json`, then `contraflow eks render {source} --nodes nodes.json` again,"
        " with the `--out` and `--set` of the first time."
    )


def _karpenter(site: Site) -> list[str]:
    groups = [placement_group(site, ask) for ask in brought(site) if placement_group(site, ask)]
    made = "; ".join(f"`aws ec2 create-placement-group --strategy cluster --group-name {group}`" for group in groups)
    steps = [f"Placement groups: {made}"] if groups else []
    return [
        *steps,
        "EFA needs a security group that lets itself in and out by name: add an egress rule of the cluster's security"
        " group to itself (`aws ec2 authorize-security-group-egress`); its ingress rule is there already.",
        f"Karpenter on the control nodes, with the role KarpenterNodeRole-{site.cluster.name}; then `kubectl apply -f"
        " ec2nodeclasses.yaml -f nodepools.yaml`",
    ]


def _down(site: Site) -> list[str]:
    cluster = site.cluster
    steps = [f"`kubectl -n {cluster.namespace} delete rayjob {cluster.name}` (its pods end in order, cuts are kept)"]
    if "env" in site.asks:
        steps.append(f"`kubectl delete namespace {site.env_namespace}`")
    if cluster.nodes_by == "karpenter":
        steps.append("`kubectl delete nodepools --all`, and wait until their machines are gone: they outlive a cluster")
    else:
        groups = [ask for ask in site.asks.values() if ask.pool != "control"]
        names = " ".join(ask.group for ask in sorted(groups, key=lambda ask: not ask.gpus))
        steps.append(
            f"The node groups, those with GPUs first ({names}): `eksctl delete nodegroup --cluster {cluster.name}"
            f" --region {cluster.region} --name NAME`"
        )
    steps += [
        "`eksctl delete cluster -f clusterconfigs.yaml --disable-nodegroup-eviction`",
        "What can be left over, and costs: Spot requests, network interfaces, volumes, placement groups, and a capacity"
        " block until its end, used or not. `aws ec2 describe-instances --filters"
        f" Name=tag:contraflow/cluster,Values={cluster.name}` has to be empty.",
        f"Cuts, weights and the model stay in {cluster.storage} until you delete them: `aws s3 rm --recursive`.",
    ]
    return steps


def _resume(site: Site) -> str:
    cuts = in_storage(site.recipe).train.checkpoint_url
    return f"contraflow resume {cuts} --folder {RUNS}/{site.cluster.name}-2 --plain"


def _numbered(steps: list[str]) -> str:
    return "".join(f"{number}. {step}\n" for number, step in enumerate(steps, 1))
