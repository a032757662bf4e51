"""DeepEP as it is installed: which of its buffers there are, what each takes, and the calls to them in one form.

The module `deep_ep` comes with the image and is imported here alone, late. It has had two interfaces side by side:
`Buffer` (V1, and its low-latency mode) and `ElasticBuffer` (V2). Which one is used follows from what the module has,
never from its version. Limits are those of its host and device assertions (csrc/legacy, csrc/kernels/legacy,
csrc/elastic): a device assertion ends the process, so they are checked before any call.

Shape letters as in `base`; H width that the library takes, M rows received, L experts held here, C places per expert.
"""

import ctypes
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from contraflow.dispatch.domains import Topology
from contraflow.errors import DispatchError, WorkerDied

Api = Literal["buffer", "elastic", "low_latency"]
Values = Tensor | tuple[Tensor, Tensor]  # bf16 [T, H]; or e4m3 [T, H] and fp32 scales [T, H / 128]

NODE_RANKS = 8  # of `Buffer`: ranks that share NVLink
BUFFER_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # that it has settings for
NODE_EXPERTS, GRID_EXPERTS = 128, 64  # held by one rank: threads of the counting kernels, on one node and on several
NODE_ROW_BYTES = 2 * (8192 - 8)  # half a row and a barrier fit a warp's shared memory
CHOICES = 32  # lanes of a warp
LOW_LATENCY_WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # that its kernels are compiled for
LOW_LATENCY_CHOICES = 11
LOW_LATENCY_TOKENS = 508  # a multiple of 4; a send queue holds 1024 entries, two a token and two to spare


def load() -> Any:
    """The module `deep_ep`. Raises: DispatchError saying how to get it, or why it did not load."""
    if importlib.util.find_spec("deep_ep") is None:
        raise DispatchError(
            "the module deep_ep (DeepEP) is not installed; it is built against one torch, CUDA and NVSHMEM or NCCL, so "
            "take it from the container image or a wheel made for this torch, or use all_to_all or hierarchical"
        )
    try:
        _preload_nvshmem()
        return importlib.import_module("deep_ep")
    except (ImportError, OSError, AssertionError) as fault:  # it asserts what NCCL it was built for
        raise DispatchError(
            f"the module deep_ep is there but does not load ({type(fault).__name__}: {fault}); it must be built for "
            f"torch {torch.__version__}, or use all_to_all or hierarchical"
        ) from fault


def _preload_nvshmem() -> None:
    """Wheels look for NVSHMEM where they were built; found beside torch and loaded for all, it is found here too."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # no package `nvidia`: the image has NVSHMEM on the loader's path, or needs none
        return
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(folder).glob("lib/libnvshmem_host.so*"))[:1]:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def choose_api(module: Any, *, low_latency: bool) -> Api:
    """Which of the module's interfaces to use, by what it has. Raises: DispatchError when it has none of them."""
    if low_latency and hasattr(getattr(module, "Buffer", None), "low_latency_dispatch"):
        return "low_latency"
    if not low_latency and hasattr(module, "ElasticBuffer"):
        return "elastic"
    if not low_latency and hasattr(module, "Buffer"):
        return "buffer"
    wanted = "Buffer.low_latency_dispatch" if low_latency else "ElasticBuffer or Buffer"
    found = ", ".join(name for name in dir(module) if name.endswith("Buffer")) or "no buffer"
    raise DispatchError(f"this deep_ep has {found}, but {wanted} is needed; take another build, or use all_to_all")


def check_group(api: Api, topology: Topology, experts: int, max_tokens: int) -> None:
    """Refuse groups that the library cannot serve, with the reason. Raises: DispatchError."""
    ranks = topology.ranks
    if experts < 1 or experts % ranks:
        raise DispatchError(f"{experts} experts cannot be shared out evenly among {ranks} ranks; give ep a divisor")
    if max_tokens < 1:
        raise DispatchError(f"max_tokens {max_tokens} must be at least 1: deep_ep sizes its buffers by it")
    if api == "elastic":
        if topology.domains != Topology.even(ranks, max(1, ranks // topology.count)).domains:
            raise DispatchError(
                f"deep_ep needs ranks numbered domain by domain, as many in each, not in domains "
                f"{list(topology.domains)}; start them in that order"
            )
        return
    if api == "buffer" and ranks not in BUFFER_RANKS:
        raise DispatchError(f"deep_ep.Buffer has no settings for {ranks} ranks; it has for {list(BUFFER_RANKS)}")
    if ranks > NODE_RANKS and ranks % NODE_RANKS:
        raise DispatchError(f"deep_ep.Buffer takes {NODE_RANKS} ranks a node, and {ranks} are no multiple")
    if api == "low_latency" and max_tokens > LOW_LATENCY_TOKENS:
        raise DispatchError(
            f"max_tokens {max_tokens} is too many for low latency, which takes {LOW_LATENCY_TOKENS}; use kind deepep"
        )
    if topology.domains != tuple(rank // NODE_RANKS for rank in range(ranks)):
        raise DispatchError(
            f"deep_ep.Buffer takes every {NODE_RANKS} neighbouring ranks as one node with NVLink, but they are in "
            f"domains {list(topology.domains)}; start them node by node, or use hierarchical"
        )
    most = NODE_EXPERTS if ranks <= NODE_RANKS else GRID_EXPERTS
    if api == "buffer" and experts // ranks > most:
        raise DispatchError(f"{experts // ranks} experts a rank, but deep_ep.Buffer takes {most} on {ranks} ranks")


def library_width(api: Api, topology: Topology, dim: int, *, fp8: bool) -> int:
    """The width H that values of width `dim` are padded to. Raises: DispatchError when the library takes none."""
    if api == "low_latency":
        fits = [width for width in LOW_LATENCY_WIDTHS if width >= dim]
        if dim < 1 or not fits:
            raise DispatchError(f"width {dim} is not in [1, {LOW_LATENCY_WIDTHS[-1]}], all that low latency takes")
        return fits[0]
    step = 512 if fp8 else 256  # rows of whole 512 bytes, on the way out and, in bf16, on the way back
    width = -(-dim // step) * step
    if dim < 1 or (api == "buffer" and topology.ranks <= NODE_RANKS and 2 * width > NODE_ROW_BYTES):
        most = NODE_ROW_BYTES // 2 // step * step
        raise DispatchError(f"width {dim} is not in [1, {most}], all that deep_ep.Buffer takes on one node")
    return width


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a dispatch brought. Expert ids are counted from this rank's first, -1 for those of others."""

    x: Values  # [M, H]
    ids_MK: Tensor  # int64
    weights_MK: Tensor  # fp32
    pairs: int | None  # ids that are not -1, or None when the host was not told
    handle: Any


class Port(Protocol):
    """The library's buffers, opened. Collective over the group, each call, opening and closing too."""

    least_tokens: int  # that a rank has to bring
    distinct_ids: bool  # whether a token may name an expert but once

    def out(self, x: Values, ids_TK: Tensor, weights_TK: Tensor) -> Arrived: ...

    def home(self, y_MH: Tensor, extra_MK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """Sum over ranks of what came of each token: bf16 `[T, H]`, and of extras, fp32 `[T, K]`."""
        ...

    def again(self, x_TH: Tensor, handle: Any) -> Tensor:
        """Send other values the way of an earlier `out`: bf16 `[M, H]`."""
        ...

    def close(self) -> None: ...


class BufferPort:
    """See `Port`; by `deep_ep.Buffer`. `fixed`: room for all that might come, and the host is not told how many do."""

    least_tokens = 0
    distinct_ids = False

    def __init__(self, module: Any, group: dist.ProcessGroup, *, experts: int, width: int, fixed_rows: int) -> None:
        ranks, buffer = dist.get_world_size(group), module.Buffer
        # Kept: a handle is good only for the number of SMs that made it, and the class's own may be changed.
        self._configs = buffer.get_dispatch_config(ranks), buffer.get_combine_config(ranks)
        nvl = max(config.get_nvl_buffer_size_hint(2 * width, ranks) for config in self._configs)
        rdma = max(config.get_rdma_buffer_size_hint(2 * width, ranks) for config in self._configs)
        self._buffer = buffer(group, nvl, rdma, explicitly_destroy=True)
        self._ids = module.topk_idx_t
        self._experts = experts
        self._fixed_rows = fixed_rows

    def out(self, x: Values, ids_TK: Tensor, weights_TK: Tensor) -> Arrived:
        """See `Port.out`."""
        ids_TK = ids_TK.to(self._ids)
        per_rank, per_node, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(ids_TK, self._experts)
        with waiting("a dispatch"):
            x, ids_MK, weights_MK, counts, handle, _ = self._buffer.dispatch(
                x, topk_idx=ids_TK, topk_weights=weights_TK, num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank,
                num_worst_tokens=self._fixed_rows, config=self._configs[0],
            )  # fmt: skip
        return Arrived(x, ids_MK.to(torch.int64), weights_MK, None if self._fixed_rows else sum(counts), handle)

    def home(self, y_MH: Tensor, extra_MK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """See `Port.home`."""
        sums_TH, extra_TK, _ = self._buffer.combine(y_MH, handle, topk_weights=extra_MK, config=self._configs[1])
        return sums_TH, extra_TK

    def again(self, x_TH: Tensor, handle: Any) -> Tensor:
        """See `Port.again`."""
        x_MH: Tensor = self._buffer.dispatch(x_TH, handle=handle, config=self._configs[0])[0]
        return x_MH

    def close(self) -> None:
        """See `Port.close`."""
        self._buffer.destroy()


class ElasticPort:
    """See `Port`; by `deep_ep.ElasticBuffer`, whose kernels are compiled at first use for each set of shapes."""

    least_tokens = 1  # its host waits in vain for counts of a rank that has none
    distinct_ids = True  # repeats stop the device

    def __init__(
        self, module: Any, group: dist.ProcessGroup, *, experts: int, width: int, choices: int, max_tokens: int,
        fixed: bool, deadline_s: float,
    ) -> None:  # fmt: skip
        seconds = max(1, round(deadline_s))
        # Sized for bf16 whatever goes out: gradients go the same way.
        self._buffer = module.ElasticBuffer(
            group, num_max_tokens_per_rank=max_tokens, hidden=width, num_topk=choices, num_cpu_timeout_secs=seconds,
            num_gpu_timeout_secs=seconds, explicitly_destroy=True,
        )  # fmt: skip
        self._ids = module.topk_idx_t
        self._experts = experts
        self._max_tokens = max_tokens
        self._fixed = fixed

    def out(self, x: Values, ids_TK: Tensor, weights_TK: Tensor) -> Arrived:
        """See `Port.out`."""
        with waiting("a dispatch"):
            x, ids_MK, weights_MK, handle, _ = self._buffer.dispatch(
                x, ids_TK.to(self._ids), weights_TK, num_experts=self._experts,
                num_max_tokens_per_rank=self._max_tokens, do_cpu_sync=not self._fixed,
            )  # fmt: skip
        ids_MK = ids_MK.to(torch.int64)
        if not self._fixed:
            return Arrived(x, ids_MK, weights_MK, sum(handle.num_recv_tokens_per_expert_list), handle)
        # Rows after those that came were never written.
        rows_M = torch.arange(ids_MK.shape[0], device=ids_MK.device)
        came_M = rows_M < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        return Arrived(x, torch.where(came_M[:, None], ids_MK, -1), weights_MK, None, handle)

    def home(self, y_MH: Tensor, extra_MK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """See `Port.home`."""
        sums_TH, extra_TK, _ = self._buffer.combine(y_MH, handle, topk_weights=extra_MK)
        return sums_TH, extra_TK

    def again(self, x_TH: Tensor, handle: Any) -> Tensor:
        """See `Port.again`. SMs are given, since the library would look for them before it looks at the handle."""
        x_MH: Tensor = self._buffer.dispatch(
            x_TH, num_experts=self._experts, num_sms=handle.num_sms, handle=handle, do_cpu_sync=False
        )[0]
        return x_MH

    def close(self) -> None:
        """See `Port.close`."""
        self._buffer.destroy()


class LowLatencyPort:
    """`deep_ep.Buffer` in low-latency mode: every (token, expert) by itself, into fixed places, over RDMA or NVLink."""

    def __init__(self, module: Any, group: dist.ProcessGroup, *, experts: int, width: int, max_tokens: int) -> None:
        ranks, buffer = dist.get_world_size(group), module.Buffer
        self.tokens = -(-max_tokens // 4) * 4  # places of an expert must be a multiple of 4
        self.experts = experts
        nbytes = buffer.get_low_latency_rdma_size_hint(self.tokens, width, ranks, experts)
        self._buffer = buffer(
            group, 0, nbytes, low_latency_mode=True, num_qps_per_rank=experts // ranks, explicitly_destroy=True
        )
        self._ids = module.topk_idx_t

    def out(self, x_TH: Tensor, ids_TK: Tensor, *, fp8: bool) -> tuple[Values, Tensor, Any]:
        """Values `[L, C, H]` (with scales `[L, C, H / 128]` if `fp8`), how many of each expert's places, handle."""
        x, counts_L, handle, _, _ = self._buffer.low_latency_dispatch(
            x_TH, ids_TK.to(self._ids), self.tokens, self.experts, use_fp8=fp8
        )
        return x, counts_L, handle

    def home(self, y_LCH: Tensor, ids_TK: Tensor, weights_TK: Tensor, handle: Any) -> Tensor:
        """Weighted sum of the answers for each token, bf16 `[T, H]`."""
        sums_TH: Tensor = self._buffer.low_latency_combine(y_LCH, ids_TK.to(self._ids), weights_TK, handle)[0]
        return sums_TH

    def close(self) -> None:
        """Collective."""
        self._buffer.destroy()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """The library's own deadline on the host (100 s in V1) as a failure of this package."""
    try:
        yield
    except RuntimeError as fault:
        first = str(fault).strip().splitlines()[0][:200]
        if "timeout" in first.lower() or "CPU wait" in first:
            raise WorkerDied("a rank", f"took no part in {what}, or its GPU is stuck ({first})") from fault
        raise
