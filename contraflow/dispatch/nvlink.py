"""Dispatch between GPUs joined by NVLink: kernels of our own that write to and read from each other's memory.

Out: every token is stored once to each rank that owns one of its experts, to a slot that is its own, so that nobody
needs to know counts first; after one meeting of the ranks a rank sorts what came and copies it to its experts' rows.
Home: a rank sums each token's rows into its own slots; after one meeting the token's rank loads and adds the sums,
rank by rank, in fp32. The sum does not depend on timing, so that repeats give the same bits.

Shape letters as in `base`; S ranks, N = S * most slots.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contraflow.dispatch import nvlink_memory as memory
from contraflow.dispatch import wire as w
from contraflow.dispatch.base import Dispatch, Rows, check_pairs, check_rows
from contraflow.dispatch.exchange import Links, agree
from contraflow.dispatch.group import GroupLinks
from contraflow.errors import DispatchError

RANKS = 31  # bits of a word; kernels are unrolled over ranks
SMS = 32  # that go over the link


@dataclass(slots=True)
class Crossing:
    """Who each token of this rank went to, and where what came here lies among the rows."""

    ids_TK: Tensor
    row_NK: Tensor
    came_S: Tensor
    rows: int
    dim: int
    used: bool = False


class NvlinkDispatch(Dispatch[Crossing]):
    """See `Dispatch`; collective over all ranks of `links`, forward and backward, tokens or none.

    Args: `experts` over all ranks; `max_tokens` the most tokens a rank may ever bring, the same on all; `wire` the
    precision on the way out; `fixed` for as many rows as there can be, whatever the routing, and no look at counts on
    the host; `sms` how many of the GPU's multiprocessors go over the link, the local steps having all.
    Memory is opened by the first dispatch, when widths are known: every rank makes it. All calls of a rank are in order
    on one stream. Raises: DispatchError when ranks were set up differently, or cannot reach each other's memory.
    """

    def __init__(
        self, links: Links, *, experts: int, max_tokens: int | None, wire: w.Wire = "same", fixed: bool = False,
        sms: int = SMS,
    ) -> None:  # fmt: skip
        reason = _cannot(links, experts, max_tokens, sms)
        # All of them first: a rank that cannot must not leave the others waiting for it.
        agree(
            links,
            {"experts": experts, "dispatch": "nvlink", "wire": wire, "max_tokens": max_tokens, "fixed": fixed,
             "runs here": reason is None},
        )  # fmt: skip
        if reason is not None:
            raise reason
        assert isinstance(links, GroupLinks)
        assert max_tokens is not None
        self.links = links
        self.experts = experts
        self.wire: w.Wire = wire
        self.max_tokens = max_tokens
        self.fixed = fixed
        self.sms = sms
        self._opened: SharedDispatch | None = None

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Crossing]:
        """See `Dispatch.dispatch`. Ids out of range are trusted: to look would wait for the device.

        Exact: waits for the device. Raises WorkerDied naming the ranks that were missing at a meeting, then or before.
        """
        check_pairs(x_TD, expert_ids_TK, weights_TK)
        if x_TD.device.type != "cuda" or x_TD.device.index != torch.cuda.current_device():
            raise DispatchError(f"nvlink carries tensors of the current CUDA device, not of {x_TD.device}")
        if self._opened is None:
            check_tokens(expert_ids_TK, self.max_tokens)
            self._opened = self._open(x_TD, expert_ids_TK.shape[1])
        return self._opened.dispatch(x_TD, expert_ids_TK, weights_TK)

    def combine(self, y_RD: Tensor, handle: Crossing) -> Tensor:
        """See `Dispatch.combine`. Does not wait: a rank that was missing is told by the next dispatch or `check`."""
        if self._opened is None:
            raise DispatchError("nvlink's memory was closed since this handle was made; dispatch again")
        return self._opened.combine(y_RD, handle)

    def check(self) -> None:
        """Raise WorkerDied or DispatchError if a rank was missing or astray at any meeting. Waits for the device."""
        if self._opened is not None:
            self._opened.check()

    def close(self) -> None:
        """Give the memory back. Never waits for others. Handles and gradients that are still out can't be used."""
        self._opened = None

    def _open(self, x_TD: Tensor, choices: int) -> "SharedDispatch":
        if torch.cuda.is_current_stream_capturing():
            raise DispatchError("nvlink's memory cannot be opened inside a CUDA graph; dispatch once before it")
        ranks = self.links.topology.ranks
        agree(self.links, {"width": x_TD.shape[1], "dtype": str(x_TD.dtype), "experts a token": choices})
        device = torch.cuda.get_device_properties(x_TD.device)
        ground = memory.open_ground(
            self.links.group,
            memory.Layout(ranks, self.max_tokens, choices, row_bytes(x_TD.shape[1], x_TD.dtype, self.wire)),
            experts=self.experts,
            sizes=memory.Sizes(sms=self.sms, local=4 * device.multi_processor_count),
            deadline_s=self.links.deadline_s,
        )
        return SharedDispatch(
            ground, dim=x_TD.shape[1], dtype=x_TD.dtype, wire=self.wire, fixed=self.fixed,
            names=self.links.global_ranks, deadline_s=self.links.deadline_s,
        )  # fmt: skip


class SharedDispatch(Dispatch[Crossing]):
    """See `Dispatch`; over opened memory, for tokens of one width and dtype. `names` are what ranks are called."""

    def __init__(
        self, ground: memory.Ground, *, dim: int, dtype: torch.dtype, wire: w.Wire, fixed: bool, names: tuple[int, ...],
        deadline_s: float,
    ) -> None:  # fmt: skip
        self.ground = ground
        self.dim = dim
        self.dtype = dtype
        self.wire: w.Wire = wire
        self.fixed = fixed
        self._names = names
        self._deadline_s = deadline_s

    @property
    def back(self) -> torch.dtype:
        """What answers and gradients travel as."""
        return self.dtype if w.back_wire(self.wire) == "same" else torch.bfloat16

    @property
    def most_rows(self) -> int:
        """Rows when every token of every rank goes to as many experts here as it can."""
        layout = self.ground.layout
        return layout.ranks * layout.most * layout.choices

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Crossing]:
        """See `Dispatch.dispatch`."""
        check_pairs(x_TD, expert_ids_TK, weights_TK)
        check_tokens(expert_ids_TK, self.ground.layout.most)
        if (x_TD.shape[1], x_TD.dtype, expert_ids_TK.shape[1]) != (self.dim, self.dtype, self.ground.layout.choices):
            raise DispatchError(
                f"tokens of width {x_TD.shape[1]}, {x_TD.dtype}, {expert_ids_TK.shape[1]} experts each, but memory was "
                f"opened for {self.dim}, {self.dtype}, {self.ground.layout.choices}; open another dispatch"
            )
        x_RD, weights_R, ends_E, crossing = _Out.apply(x_TD, weights_TK.contiguous(), expert_ids_TK.contiguous(), self)  # type: ignore[no-untyped-call]
        return Rows(x_RD, weights_R, ends_E, crossing)

    def combine(self, y_RD: Tensor, handle: Crossing) -> Tensor:
        """See `Dispatch.combine`."""
        if handle.used:
            raise DispatchError("this dispatch handle was combined before; dispatch again")
        check_rows(y_RD, handle.rows)
        if y_RD.shape[1] != handle.dim:
            raise DispatchError(f"combine got {list(y_RD.shape)}, but dispatch gave out rows of width {handle.dim}")
        if self.wire == "same" and y_RD.dtype != self.dtype:
            raise DispatchError(
                f"combine got {y_RD.dtype}, but tokens came as {self.dtype}: ask for the wire bf16 or fp8 to have "
                "answers rounded on the way"
            )
        handle.used = True
        y_TD: Tensor = _Home.apply(y_RD, handle, self)  # type: ignore[no-untyped-call]
        return y_TD

    def check(self) -> None:
        """See `NvlinkDispatch.check`."""
        self._raise(self.ground.told()[1])

    def rows(self) -> int:
        """How many rows the grouping gave: in the fixed form as many as there can be, without a look."""
        if self.fixed:
            return self.most_rows
        if self.ground.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise DispatchError("the exact form looks at counts and cannot be captured; give a capacity for the fixed")
        rows, faults = self.ground.told()
        self._raise(faults)
        return rows

    def home(
        self, y_RD: Tensor, extra_R: Tensor | None, crossing: Crossing, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Sum rows over all ranks for each token, `[T, D]` in `dtype`; extras of pairs, fp32 `[T, K]`."""
        ids_TK = crossing.ids_TK
        self.ground.gather(y_RD.contiguous(), extra_R, crossing.row_NK, crossing.came_S, self.back)
        self.ground.meet(memory.HOME)
        out_TD = torch.empty(ids_TK.shape[0], self.dim, dtype=dtype, device=y_RD.device)
        extra_TK = None if extra_R is None else torch.empty(ids_TK.shape, dtype=torch.float32, device=y_RD.device)
        self.ground.pull(out_TD, extra_TK, ids_TK, self.back)
        return out_TD, extra_TK

    def again(self, x_TD: Tensor, crossing: Crossing) -> Tensor:
        """Other values the way of an earlier dispatch: `[R, D]`, zeros past the last end."""
        self.ground.push(x_TD, crossing.ids_TK, None, self.back)
        self.ground.meet(memory.AGAIN)
        y_RD = self.blank(crossing.rows, self.dim, x_TD.dtype)
        self.ground.spread(y_RD, None, crossing.row_NK, crossing.came_S, self.back)
        return y_RD

    def blank(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Room for rows; where some will stay unwritten, zeros."""
        make = torch.zeros if self.fixed else torch.empty
        return make(rows, width, dtype=dtype, device=self.ground.device)

    def _raise(self, faults: list[int]) -> None:
        fault = memory.lost(faults, self._names, self.ground.rank, self._deadline_s)
        if fault is not None:
            raise fault


class _Out(torch.autograd.Function):
    """Rows out. Backward: gradients of rows and of weights home, summed."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, shared: SharedDispatch
    ) -> tuple[Tensor, Tensor, Tensor, Crossing]:
        ground, dtype = shared.ground, {"fp8": torch.uint8, "bf16": torch.bfloat16, "same": x_TD.dtype}[shared.wire]
        ground.push(x_TD, ids_TK, weights_TK, dtype)
        ground.meet(memory.OUT)
        ends_E, row_NK, came_S = ground.group()
        crossing = Crossing(ids_TK, row_NK, came_S, shared.rows(), shared.dim)
        x_RD = shared.blank(crossing.rows, shared.dim, x_TD.dtype)
        weights_R = shared.blank(crossing.rows, 1, torch.float32).view(-1)
        ground.spread(x_RD, weights_R, row_NK, came_S, dtype)
        ctx.shared, ctx.crossing, ctx.dtype = shared, crossing, x_TD.dtype
        ctx.mark_non_differentiable(ends_E)
        return x_RD, weights_R, ends_E, crossing

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, grad_R: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_TD, grad_TK = ctx.shared.home(grad_RD, grad_R.contiguous(), ctx.crossing, ctx.dtype)
        return grad_TD, grad_TK, None, None


class _Home(torch.autograd.Function):
    """Answers home, summed. Backward: the gradient the way that the tokens went."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, crossing: Crossing, shared: SharedDispatch) -> Tensor:
        ctx.shared, ctx.crossing = shared, crossing
        return shared.home(y_RD, None, crossing, y_RD.dtype)[0]

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.shared.again(grad_TD, ctx.crossing), None, None


def row_bytes(dim: int, dtype: torch.dtype, wire: w.Wire) -> int:
    """Bytes of a slot: for a token on its way out or an answer on its way back, whichever is larger, in whole lines."""
    out, back = w.value_bytes(dim, wire, dtype), w.value_bytes(dim, w.back_wire(wire), dtype)
    return memory.lines(max(out, back))


def check_tokens(ids_TK: Tensor, most: int) -> None:
    """Refuse more tokens than there is room for. Raises: DispatchError."""
    if ids_TK.shape[0] > most:
        raise DispatchError(
            f"{ids_TK.shape[0]} tokens, but the group agreed on at most {most}; raise max_tokens on every rank"
        )


def _cannot(links: Links, experts: int, max_tokens: int | None, sms: int) -> DispatchError | None:
    """Why this group cannot be served, if it cannot."""
    topology = links.topology
    if not isinstance(links, GroupLinks):
        return DispatchError("nvlink needs ranks in a torch.distributed process group; these links have none")
    if max_tokens is None or max_tokens < 1:
        return DispatchError("nvlink needs max_tokens, at least 1: the most tokens a rank may ever bring")
    if experts < 1 or experts % topology.ranks:
        return DispatchError(f"{experts} experts cannot be shared out evenly among {topology.ranks} ranks")
    if topology.count > 1 or topology.ranks > RANKS:
        return DispatchError(
            f"nvlink serves at most {RANKS} ranks of one domain, not {topology.ranks} in {topology.count}; use "
            "hierarchical or deepep"
        )
    if sms < 1:
        return DispatchError(f"nvlink needs at least 1 multiprocessor, not {sms}")
    if not torch.cuda.is_available():
        return DispatchError("nvlink needs a CUDA device, and there is none; use all_to_all or hierarchical")
    try:
        memory.load_kernels()
    except DispatchError as fault:
        return fault
    return None
