"""Memory that ranks joined by NVLink share, and the steps done on it: push, meet, group, spread, gather, pull.

Takes a group of ranks, gives a `Ground`: memory of every rank that each can store to and load from, by torch's
symmetric memory, without multicast. Knows slots, not gradients (`nvlink.py`). Kernels are in `nvlink_kernels.py`.

Shape letters as in `base`; S ranks, N = S * most slots, L experts held here.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contraflow.dispatch.wire import BLOCK
from contraflow.errors import DispatchError, WorkerDied

TAGS = 4  # kinds of calls that a signal tells apart
OUT, HOME, AGAIN = 0, 1, 2
UNIT = 16  # bytes that addresses of ranks' memory are counted in: what a thread moves at once
LINE = 128  # bytes that sections begin at a multiple of
CHUNK = 1024  # columns of a tile, unless a row has fewer


@dataclass(frozen=True)
class Layout:
    """What lies where in the memory of each rank. `most` tokens of a rank, `row_bytes` of one, whole lines."""

    ranks: int
    most: int
    choices: int
    row_bytes: int

    @property
    def tokens_at(self) -> int:
        return lines(8 * self.ranks)

    @property
    def ids_at(self) -> int:
        return self.tokens_at + lines(4 * self.ranks)

    @property
    def weights_at(self) -> int:
        return self.ids_at + lines(4 * self.ranks * self.most * self.choices)

    @property
    def rows_at(self) -> int:
        return self.weights_at + lines(4 * self.ranks * self.most * self.choices)

    @property
    def half(self) -> int:
        """Bytes of one of the two halves."""
        return self.rows_at + lines(self.ranks * self.most * self.row_bytes)


@dataclass(frozen=True)
class Sizes:
    """How much the device does at once. `sms` programs go over the link; the local steps have `local` programs."""

    sms: int
    local: int
    tile_bytes: int = 32768  # in flight for each program of the link
    warps: int = 32


class Ground:
    """The memory of all ranks as seen by one, and one step at a time on the current stream.

    Calls are push, meet, group, spread (rows out) or gather, meet, pull (rows home), the same on all ranks in the same
    order. Invariant: a rank writes a half, its own or another's, only before a `meet` and reads one only after it; and
    the half changes with each `meet`. So whoever writes a half again (call n + 2) has heard that all ranks came to the
    meeting of call n + 1, hence had read what they wanted of call n: one meeting a call is enough. That holds for calls
    that are in order on one stream of each rank.
    """

    def __init__(
        self, layout: Layout, *, rank: int, experts: int, addresses: list[int], own: Tensor, sizes: Sizes,
        deadline_s: float, mapped: Any = None,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.rank = rank
        self.held = experts // layout.ranks
        self.sizes = sizes
        self.own = own  # bytes; kept, since others write to it
        self._mapped = mapped  # kept: with it goes the mapping of others' memory
        self._limit = round(deadline_s * 1e9)
        device = own.device
        assert not any(address % UNIT for address in addresses)
        apart = [(address - own.data_ptr()) // UNIT for address in addresses]
        self._peers = torch.tensor(apart, dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._where = own, self._peers, self.turn, rank
        self._told = torch.zeros(1 + layout.ranks, dtype=torch.int32, device=device)
        self._kernels = load_kernels()

    @property
    def device(self) -> torch.device:
        return self.own.device

    def push(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None, dtype: torch.dtype) -> None:
        """Write each token, as `dtype`, to the owners of its experts; ids and weights too unless the latter is None.

        As uint8: e4m3 with scales, as `wire.encode` has them.
        """
        x_TD = x_TD if x_TD.stride(1) == 1 or x_TD.shape[1] < 2 else x_TD.contiguous()
        tokens, dim = x_TD.shape
        lay, meta = self.layout, weights_TK is not None
        self._launch(
            "push", self.sizes.sms, x_TD, ids_TK, weights_TK if meta else ids_TK, *self._where,
            tokens, dim, x_TD.stride(0), HELD=self.held, tokens_at=lay.tokens_at, ids_at=lay.ids_at, META=meta,
            FP8=dtype == torch.uint8, **self._shape(dtype), **self._tile(dim, x_TD.itemsize, link=True),
        )  # fmt: skip

    def meet(self, tag: int) -> None:
        """Tell all ranks that this one has written, and wait on the device for all to have. See `faults`."""
        self._launch(
            "meet", 1, self.own, self._peers, self.turn, self._told, self.rank, tag, self._limit, **self._signals(),
            CLOCK=self.device.type == "cuda", num_warps=1,
        )  # fmt: skip

    def group(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ends by expert int32 `[L]`, the row of each pair int32 `[N, K]` (-1: none) and tokens by source `[S]`."""
        lay = self.layout
        row_NK = torch.empty(lay.ranks * lay.most, lay.choices, dtype=torch.int32, device=self.device)
        ends_L = torch.empty(self.held, dtype=torch.int32, device=self.device)
        came_S = torch.empty(lay.ranks, dtype=torch.int32, device=self.device)
        block = min(16384, max(64, _power(lay.most * lay.choices)))
        self._launch(
            "group", self.held, row_NK, ends_L, came_S, self._told, *self._where, S=lay.ranks,
            K=lay.choices, most=lay.most, half=lay.half, tokens_at=lay.tokens_at, ids_at=lay.ids_at, BLOCK=block,
            num_warps=max(1, min(32, block // 512)),
        )  # fmt: skip
        return ends_L, row_NK, came_S

    def spread(
        self, y_RD: Tensor, weights_R: Tensor | None, row_NK: Tensor, came_S: Tensor, dtype: torch.dtype
    ) -> None:
        """Write rows that came as `dtype` where `row_NK` says, and their weights unless those are None."""
        meta = weights_R is not None
        self._launch(
            "spread", self.sizes.local, y_RD, weights_R if meta else y_RD, row_NK, came_S, *self._where,
            y_RD.shape[1], META=meta, FP8=dtype == torch.uint8, **self._shape(dtype),
            **self._tile(y_RD.shape[1], y_RD.itemsize),
        )  # fmt: skip

    def gather(self, y_RD: Tensor, extra_R: Tensor | None, row_NK: Tensor, came_S: Tensor, dtype: torch.dtype) -> None:
        """Put the sum of each token's rows into this rank's own slots as `dtype`; of each pair its fp32 extra."""
        meta = extra_R is not None
        self._launch(
            "gather", self.sizes.local, y_RD, extra_R if meta else y_RD, row_NK, came_S, *self._where,
            y_RD.shape[1], META=meta, WIDE=self._wide(dtype), **self._shape(dtype),
            **self._tile(y_RD.shape[1], dtype.itemsize),
        )  # fmt: skip

    def pull(self, out_TD: Tensor, extra_TK: Tensor | None, ids_TK: Tensor, dtype: torch.dtype) -> None:
        """Sum what all ranks have for each token, rank by rank; of each pair the extra of the one that has it."""
        (tokens, dim), meta = out_TD.shape, extra_TK is not None
        self._launch(
            "pull", self.sizes.sms, out_TD, extra_TK if meta else out_TD, ids_TK, *self._where,
            tokens, dim, HELD=self.held, META=meta, WIDE=self._wide(dtype), **self._shape(dtype),
            **self._tile(dim, dtype.itemsize, link=True),
        )  # fmt: skip

    def told(self) -> tuple[int, list[int]]:
        """Rows of the last `group`; by rank 0, 1 (was late at a meeting) or 2 (met in another call). Waits."""
        rows, *faults = self._told.tolist()
        return rows, faults

    def _launch(self, name: str, programs: int, *given: Any, **constants: Any) -> None:
        getattr(self._kernels, name)[(programs,)](*given, **constants)

    def _signals(self) -> dict[str, Any]:
        return {"S": self.layout.ranks, "SP": _power(self.layout.ranks), "half": self.layout.half, "TAGS": TAGS}

    def _shape(self, dtype: torch.dtype) -> dict[str, Any]:
        lay = self.layout
        return {
            "S": lay.ranks, "K": lay.choices, "KP": _power(lay.choices), "most": lay.most, "half": lay.half,
            "weights_at": lay.weights_at, "rows_at": lay.rows_at, "stride": lay.row_bytes // dtype.itemsize,
            "DTYPE": self._kernels.TYPES[dtype],
        }  # fmt: skip

    def _wide(self, dtype: torch.dtype) -> Any:
        return self._kernels.TYPES[torch.promote_types(dtype, torch.float32)]

    def _tile(self, dim: int, itemsize: int, *, link: bool = False) -> dict[str, int]:
        nbytes, warps = (self.sizes.tile_bytes, self.sizes.warps) if link else (8192, 8)
        cols = min(CHUNK, max(BLOCK, _power(dim)))
        return {"COLS": cols, "ROWS": max(1, nbytes // itemsize // cols), "num_warps": warps}


def open_ground(group: dist.ProcessGroup, layout: Layout, *, experts: int, sizes: Sizes, deadline_s: float) -> Ground:
    """Symmetric memory of the group on this rank's current CUDA device. Collective. Raises: DispatchError."""
    # torch's public names are to come: https://docs.pytorch.org/docs/stable/symmetric_memory.html
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    nbytes, rank = 2 * layout.half, dist.get_rank(group)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        # Not `symmetric.empty`, whose pool may give ranks other places of a block, if one of them frees later.
        own = symmetric._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        own.zero_()
        torch.cuda.synchronize()  # zero before anybody can write: others reach it through the rendezvous
        mapped = symmetric.rendezvous(own, group)
        addresses = [mapped.get_buffer(peer, (nbytes,), torch.uint8).data_ptr() for peer in range(layout.ranks)]
    except RuntimeError as fault:
        first = str(fault).strip().splitlines()[0][:200]
        raise DispatchError(
            f"{nbytes >> 20} MiB of memory that all {layout.ranks} ranks reach could not be had ({first}); GPUs must "
            "differ and be joined by NVLink: use all_to_all elsewhere"
        ) from fault
    return Ground(
        layout, rank=rank, experts=experts, addresses=addresses, own=own, sizes=sizes, deadline_s=deadline_s,
        mapped=mapped,
    )  # fmt: skip


def load_kernels() -> Any:
    """The module of kernels. Raises: DispatchError when Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise DispatchError(
            "the dispatch nvlink needs Triton, which is not installed; it comes with torch's CUDA wheels: install "
            "torch for CUDA, or use all_to_all or hierarchical"
        )
    return importlib.import_module("contraflow.dispatch.nvlink_kernels")


def lost(faults: list[int], names: tuple[int, ...], rank: int, deadline_s: float) -> WorkerDied | DispatchError | None:
    """The error for what meetings found, `names` being what ranks are called; None if all were well."""
    late = [f"rank {names[peer]}" for peer, fault in enumerate(faults) if fault == 1]
    astray = [f"rank {names[peer]}" for peer, fault in enumerate(faults) if fault == 2]
    if late:
        return WorkerDied(
            ", ".join(late), f"took no part in an exchange over NVLink within {deadline_s:g} s of rank {names[rank]}"
        )
    if astray:
        return DispatchError(
            f"{', '.join(astray)} is in another call than rank {names[rank]}: a rank skipped or repeated a layer; "
            "every rank must take part in every exchange, with zero tokens if it has none"
        )
    return None


def _power(number: int) -> int:
    """The power of two from `number` on."""
    return 1 << max(0, number - 1).bit_length()


def lines(nbytes: int) -> int:
    """`nbytes` rounded up to whole lines."""
    return -(-nbytes // LINE) * LINE
