"""Facts of EC2 instance types, as data: GPUs, NVLink domain, EFA interfaces, network, processor, memory, price.

Sizes: GiB are 2^30 bytes, TB and GB 10^x bytes; rates of network and memory are per second. What a node can give to
pods is less than what it has: see `allocatable_vcpu` and `allocatable_gib`.

Sources. EC2 instance type pages (vCPU, memory, network, NVMe); AWS' instance profiles for distributed training and the
resources of TorchX (EFA interfaces); NVIDIA's data sheets (HBM bandwidth, dense TFLOP/s without sparsity; A10G and L4
likewise); reports from users of EKS (`efa_least`: nodes of p5en have been seen to offer 15 of 16). Prices are on-demand
in US regions where a public listing was found (dstack's offers of August 2026), else None: look them up.
"""

import difflib
from dataclasses import dataclass, replace

from contraflow.errors import ConfigError

OVERHEAD = 0.075  # of memory never reaches the node: hypervisor and kernel, by Karpenter's VM_MEMORY_OVERHEAD_PERCENT
EVICTION_GIB = 0.1  # the kubelet evicts pods below so much free memory
SYSTEM_VCPU = 1.0  # for DaemonSets: network, device plugins, metrics
SYSTEM_GIB = 2.0  # the same


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: memory in GB (10^9 bytes), its bandwidth in TB/s, dense matrix products in TFLOP/s (fp8 0: has none)."""

    name: str
    memory_gb: float
    hbm_tb_s: float
    bf16_tflops: float
    fp8_tflops: float
    nvlink_gb_s: float  # to the other GPUs of the domain, one direction; 0: over PCIe only


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One EC2 instance type."""

    name: str
    vcpu: int
    memory_gib: float
    network_gbit_s: float  # of all interfaces together, one direction
    gpus: int = 0
    gpu: Gpu | None = None
    nvlink_domain: int = 0  # GPUs joined by NVLink, those of other nodes included (GB200); 0: none
    efa: int = 0  # EFA interfaces that a pod can ask for
    efa_least: int = 0  # so many have been allocatable on a healthy node; requests of more may wait for ever
    efa_gda: bool = False  # GPUs can post EFA transfers themselves (NCCL GIN type 5)
    nvme_tb: float = 0.0  # local disks
    usd_per_hour: float | None = None

    @property
    def gpu_network_gb_s(self) -> float:
        """Network of one GPU in GB/s, if all of them send."""
        return self.network_gbit_s / 8 / self.gpus if self.gpus else 0.0

    @property
    def pods(self) -> int:
        """Pods a node takes at most, by the rule of the EKS images: 250 above 30 vCPU, else 110."""
        return 250 if self.vcpu > 30 else 110

    @property
    def allocatable_vcpu(self) -> float:
        """vCPU that pods can have: less the kubelet's reserve (6 %, 1 %, 2 x 0.5 %, 0.25 % of each) and DaemonSets."""
        reserve = 0.06 + 0.01 * (self.vcpu > 1) + 0.005 * min(max(self.vcpu - 2, 0), 2)
        return self.vcpu - reserve - 0.0025 * max(self.vcpu - 4, 0) - SYSTEM_VCPU

    @property
    def allocatable_gib(self) -> float:
        """Memory that pods can have, hugepages included: less hypervisor, kubelet (255 + 11 MiB a pod), DaemonSets."""
        kubelet = (255 + 11 * self.pods) / 1024
        return self.memory_gib * (1 - OVERHEAD) - kubelet - EVICTION_GIB - SYSTEM_GIB


A100_40 = Gpu(name="A100", memory_gb=40, hbm_tb_s=1.555, bf16_tflops=312, fp8_tflops=0, nvlink_gb_s=300)
A100_80 = replace(A100_40, memory_gb=80, hbm_tb_s=2.039)
H100 = Gpu(name="H100", memory_gb=80, hbm_tb_s=3.35, bf16_tflops=989, fp8_tflops=1979, nvlink_gb_s=450)
H200 = replace(H100, name="H200", memory_gb=141, hbm_tb_s=4.8)
B200 = Gpu(name="B200", memory_gb=180, hbm_tb_s=7.7, bf16_tflops=2250, fp8_tflops=4500, nvlink_gb_s=900)
B300 = replace(B200, name="B300", memory_gb=288, hbm_tb_s=8.0)
GB200 = replace(B200, name="GB200", memory_gb=186, hbm_tb_s=8.0, bf16_tflops=2500, fp8_tflops=5000)
A10G = Gpu(name="A10G", memory_gb=24, hbm_tb_s=0.6, bf16_tflops=70, fp8_tflops=0, nvlink_gb_s=0)
L4 = Gpu(name="L4", memory_gb=24, hbm_tb_s=0.3, bf16_tflops=121, fp8_tflops=242, nvlink_gb_s=0)


def _p(name: str, gpu: Gpu, **facts: float) -> Instance:
    """A node of eight GPUs on one NVSwitch, with what most such types have in common."""
    base = Instance(name=name, vcpu=192, memory_gib=2048, network_gbit_s=3200, gpus=8, gpu=gpu, nvlink_domain=8)
    return replace(base, nvme_tb=30.72, **facts)  # type: ignore[arg-type]


_TYPES = (
    _p("p4d.24xlarge", A100_40, vcpu=96, memory_gib=1152, network_gbit_s=400, efa=4, efa_least=4),
    _p("p4de.24xlarge", A100_80, vcpu=96, memory_gib=1152, network_gbit_s=400, efa=4, efa_least=4),
    _p("p5.48xlarge", H100, efa=32, efa_least=32),
    _p("p5e.48xlarge", H200, efa=32, efa_least=32),
    _p("p5en.48xlarge", H200, efa=16, efa_least=15, efa_gda=True, usd_per_hour=63.296),
    _p("p6-b200.48xlarge", B200, efa=8, efa_least=8, efa_gda=True),
    _p("p6-b300.48xlarge", B300, memory_gib=4096, network_gbit_s=6400, efa=16, efa_least=16, efa_gda=True),
    Instance(
        name="p6e-gb200.36xlarge",
        vcpu=144,
        memory_gib=960,
        network_gbit_s=1600,
        gpus=4,
        gpu=GB200,
        nvlink_domain=72,
        efa=4,
        efa_least=4,
        nvme_tb=22.5,
    ),
    Instance(
        name="g5.12xlarge",
        vcpu=48,
        memory_gib=192,
        network_gbit_s=40,
        gpus=4,
        gpu=A10G,
        efa=1,
        efa_least=1,
        nvme_tb=3.8,
    ),
    Instance(
        name="g6.8xlarge", vcpu=32, memory_gib=128, network_gbit_s=25, gpus=1, gpu=L4, efa=1, efa_least=1, nvme_tb=0.9
    ),
    Instance(name="c5.4xlarge", vcpu=16, memory_gib=32, network_gbit_s=10, usd_per_hour=0.68),
    Instance(name="m5.4xlarge", vcpu=16, memory_gib=64, network_gbit_s=10),
    Instance(name="m5.8xlarge", vcpu=32, memory_gib=128, network_gbit_s=10),
    Instance(name="m5.24xlarge", vcpu=96, memory_gib=384, network_gbit_s=25),
    Instance(name="r7i.8xlarge", vcpu=32, memory_gib=256, network_gbit_s=12.5),
    Instance(name="r7i.24xlarge", vcpu=96, memory_gib=768, network_gbit_s=37.5),
    Instance(name="x2iedn.32xlarge", vcpu=128, memory_gib=4096, network_gbit_s=100, efa=1, efa_least=1, nvme_tb=3.8),
)
INSTANCES = {instance.name: instance for instance in _TYPES}


def find_instance(name: str) -> Instance:
    """The facts of a type. Raises: ConfigError with the nearest name when it is not in the table."""
    if name in INSTANCES:
        return INSTANCES[name]
    close = difflib.get_close_matches(name, INSTANCES, n=1, cutoff=0.5)
    nearest = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"instance type {name!r} is not known: {nearest}known types: {', '.join(INSTANCES)}; a new one is a row in"
        " cluster/instances.py"
    )
