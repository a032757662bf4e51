"""The versions that images and objects are made of, and pairs that are known to fail together, as data.

Components: `cuda` is torch's own, `toolkit` the compiler's in the image; `nccl`, `libfabric` and `gdrcopy` are
libraries as loaded; `aws_ofi_nccl` is NCCL's plugin for EFA, `gin` the kind of GPU-initiated transfers asked for (2: a
CPU thread posts them, 5: the GPU does), `sm` the GPU's architecture, `efa_kmod` and `kernel` the node's. Each rule
names where it was reported.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

KUBERAY_CHART = "1.7.1"
EFA_PLUGIN = "v0.5.20"  # the one of AWS' own description of such a cluster
NVIDIA_PLUGIN_CHART = "0.19.2"

MATRIX: Mapping[str, str] = {
    "toolkit": "13.1.2",
    "cuda": "13.0",
    "torch": "2.13.0",
    "nccl": "2.31.2",
    "efa_installer": "1.50.0",
    "libfabric": "2.6",
    "aws_ofi_nccl": "1.21.0",
    "nvshmem": "3.7.2",
    "gdrcopy": "2.5",
    "deepep": "2.0.0",
    "ray": "2.60.0",
}
RAY = MATRIX["ray"]
IN_IMAGE = {  # components that are compared at the start of a pod, by image
    "gpu": tuple(name for name in MATRIX if name != "toolkit"),
    "cpu": ("ray",),
}

Need = tuple[str, str, str]  # component, one of ">=", "<", "==", "!=", version


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Where `when` holds, `needs` has to hold too; `when` alone is a version that never works."""

    id: str
    when: Need
    needs: Need | None
    why: str
    source: str


RULES = (
    Rule(
        id="deepep-nccl",
        when=("deepep", ">=", "2.0"),
        needs=("nccl", ">=", "2.30.4"),
        why="its transport is NCCL's GPU-initiated one, which older NCCL does not have",
        source="DeepEP README",
    ),
    Rule(
        id="deepep-torch",
        when=("deepep", ">=", "2.0"),
        needs=("torch", ">=", "2.10"),
        why="it shares torch's NCCL communicator",
        source="DeepEP README",
    ),
    Rule(
        id="gda-installer",
        when=("gin", "==", "5"),
        needs=("efa_installer", ">=", "1.50"),
        why="the plugin that lets GPUs post EFA transfers comes with it",
        source="aws-ofi-nccl#1369",
    ),
    Rule(
        id="gda-plugin",
        when=("gin", "==", "5"),
        needs=("aws_ofi_nccl", ">=", "1.21"),
        why="older plugins do not let GPUs post EFA transfers",
        source="aws-ofi-nccl#1369",
    ),
    Rule(
        id="gda-nccl",
        when=("gin", "==", "5"),
        needs=("nccl", ">=", "2.31.2"),
        why="it is among the published requirements of transfers that GPUs post",
        source="aws-ofi-nccl#1369",
    ),
    Rule(
        id="gda-libfabric",
        when=("gin", "==", "5"),
        needs=("libfabric", ">=", "2.6"),
        why="it is among the published requirements of transfers that GPUs post",
        source="aws-ofi-nccl#1369",
    ),
    Rule(
        id="gda-module",
        when=("gin", "==", "5"),
        needs=("efa_kmod", ">=", "3.3.0"),
        why="it is among the published requirements of transfers that GPUs post",
        source="aws-ofi-nccl#1369",
    ),
    Rule(
        id="ofi-gdrcopy",
        when=("aws_ofi_nccl", ">=", "1.0"),
        needs=("gdrcopy", ">=", "2.5"),
        why="with gdrdrv 2.4 copies are forced over PCIe, slow or failing",
        source="aws-ofi-nccl#1351",
    ),
    Rule(
        id="installer-1.34",
        when=("efa_installer", "==", "1.34.0"),
        needs=None,
        why="reported broken; 1.47 and newer are good",
        source="aws-samples/sample-rlinf-on-eks",
    ),
    Rule(
        id="installer-1.38",
        when=("efa_installer", "==", "1.38.0"),
        needs=None,
        why="reported broken; 1.47 and newer are good",
        source="aws-samples/sample-rlinf-on-eks",
    ),
    Rule(
        id="blackwell-ptxas",
        when=("sm", ">=", "10.0"),
        needs=("toolkit", ">=", "13.1"),
        why="ptxas 13.0 refuses DeepEP's bulk stores on Blackwell",
        source="amazon-contributing/DeepEP#3",
    ),
    Rule(
        id="kernel-dmabuf",
        when=("kernel", "==", "5.10"),
        needs=None,
        why="AL2's kernel has no DMA-BUF, by which interfaces reach GPU memory; use AL2023",
        source="aws-samples/sample-rlinf-on-eks",
    ),
    Rule(
        id="ray-token",
        when=("ray", "<", "2.52"),
        needs=None,
        why="it has no token authentication: whoever reaches the head could run programs",
        source="Ray's documentation",
    ),
)


def number(version: str) -> tuple[int, ...]:
    """`2.31.2+cuda13.0` as (2, 31, 2). Raises: ValueError when it does not begin with numbers."""
    plain = version.lstrip("v").split("+")[0].split("-")[0]
    parts = []
    for part in plain.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    if not parts:
        raise ValueError(f"{version!r} is no version")
    return tuple(parts)


def holds(have: str, how: str, wanted: str) -> bool:
    """Whether a version fits, compared as far as `wanted` is written out for "==" and "!="."""
    mine, theirs = number(have), number(wanted)
    width = max(len(mine), len(theirs))
    padded = tuple((*one, *([0] * (width - len(one)))) for one in (mine, theirs))
    return {
        ">=": padded[0] >= padded[1],
        "<": padded[0] < padded[1],
        "==": mine[: len(theirs)] == theirs,
        "!=": mine[: len(theirs)] != theirs,
    }[how]


def bad_pairs(found: Mapping[str, str]) -> Iterator[str]:
    """A line for each rule that these versions break; a rule whose components are not there says nothing."""
    for rule in RULES:
        name, how, wanted = rule.when
        if name not in found or not holds(found[name], how, wanted):
            continue
        if rule.needs is None:
            yield f"{rule.id}: {name} {found[name]}: {rule.why} ({rule.source})"
            continue
        other, how, wanted = rule.needs
        if other in found and not holds(found[other], how, wanted):
            yield (
                f"{rule.id}: {name} {found[name]} needs {other} {how} {wanted}, there is {found[other]}: {rule.why}"
                f" ({rule.source})"
            )


def differences(found: Mapping[str, str], image: str) -> Iterator[str]:
    """A line for each component of an image ("gpu" or "cpu") that is missing or not of the matrix's version."""
    for name in IN_IMAGE[image]:
        wanted = MATRIX[name]
        if name not in found:
            yield f"{name}: not found, {wanted} is wanted; is this the {image} image?"
        elif not holds(found[name], "==", wanted):
            yield f"{name}: {found[name]} is loaded, {wanted} is wanted: a later install may have replaced it"
