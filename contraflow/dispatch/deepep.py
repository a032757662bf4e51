"""Dispatch by DeepEP: its kernels carry rows over NVLink and RDMA, one row per (token, rank).

As in `spread`, a local dispatch sorts what came by expert and sums each row's answers before they go home. Answers and
gradients travel as bf16, tokens as bf16 or, forward only, as e4m3 with a scale for each 128 values (`wire`). Rows are
sorted here and not padded, so the library's own alignment of experts stays 1.

Exact: the host waits for counts, as the library does. Fixed: room for the most that may come, whatever the routing, and
no look at counts, so that a step can run inside a CUDA graph. For decoding there is `deepep_decode`.

What the library cannot do is refused with the reason before anything is sent (`deepep_library`). Bytes are not counted:
the library does not tell them, and to look would wait for the device.

Shape letters as in `base`; H width that the library takes, M rows received, L experts held here, C places per expert.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from contraflow.dispatch import deepep_library as library
from contraflow.dispatch import wire as w
from contraflow.dispatch.base import Dispatch, Rows, check_pairs
from contraflow.dispatch.exchange import Links, agree
from contraflow.dispatch.group import GroupLinks
from contraflow.dispatch.local import LocalDispatch, Places
from contraflow.errors import DispatchError


@dataclass(slots=True)
class Flight:
    """The library's handle, which owns what its combine needs, and the places in the local dispatch."""

    handle: Any
    places: Places
    tokens: int
    dim: int
    used: bool = False


class Adapter:
    """What both forms share: the group's settings, agreed on, and the refusals."""

    def __init__(
        self, links: Links, *, experts: int, max_tokens: int | None, wire: w.Wire, low_latency: bool, fixed: bool
    ) -> None:
        if not isinstance(links, GroupLinks):
            raise DispatchError("deep_ep needs ranks in a torch.distributed process group; these links have none")
        if max_tokens is None:
            raise DispatchError("deepep needs max_tokens: the most tokens a rank may ever bring, the same on all")
        self.api: library.Api | None = None
        self._module, missing = None, None
        try:
            self._module = library.load()
            self.api = library.choose_api(self._module, low_latency=low_latency)
        except DispatchError as fault:
            missing = fault
        # All of them first: a rank that lacks the module must not leave the others waiting for it.
        agree(
            links,
            {"experts": experts, "dispatch": "deepep", "deep_ep": self.api, "wire": wire, "max_tokens": max_tokens,
             "fixed": fixed, "domains": list(links.topology.domains)},
        )  # fmt: skip
        if missing is not None:
            raise missing
        assert self.api is not None
        library.check_group(self.api, links.topology, experts, max_tokens)
        self.links = links
        self.experts = experts
        self.held = experts // links.topology.ranks
        self.wire: w.Wire = wire
        self.max_tokens = max_tokens
        self._opened_for: int | None = None  # width of tokens

    def _admit(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, most_choices: int) -> int:
        """The library's width for these inputs, or a refusal. Looks at shapes, dtypes and devices only."""
        check_pairs(x_TD, ids_TK, weights_TK)
        check_inputs(x_TD, ids_TK, self.wire, self.max_tokens, most_choices)
        if x_TD.device.type != "cuda" or x_TD.device.index != torch.cuda.current_device():
            raise DispatchError(f"deep_ep carries tensors of the current CUDA device, not of {x_TD.device}")
        assert self.api is not None
        dim = x_TD.shape[1]
        if self._opened_for is None and torch.cuda.is_current_stream_capturing():
            raise DispatchError("deep_ep's buffers cannot be opened inside a CUDA graph; dispatch once before it")
        if self._opened_for not in (None, dim):
            raise DispatchError(f"width {dim}, but buffers were opened for {self._opened_for}; open another dispatch")
        width = library.library_width(self.api, self.links.topology, dim, fp8=self.wire == "fp8")
        self._opened_for = dim
        return width


class DeepEPDispatch(Adapter, Dispatch[Flight]):
    """See `Dispatch`; collective over all ranks of `links`, forward and backward, tokens or none.

    Args: `experts` over all ranks; `max_tokens` the most tokens a rank may ever bring, the same on all; `wire` the
    precision on the way out, `same` taking bf16 tokens alone; `fixed` for the form of a fixed number of rows.
    Buffers are opened by the first dispatch, when widths are known: every rank makes it.
    Raises: DispatchError when ranks were set up differently, or the library is missing or cannot serve them.
    """

    def __init__(
        self, links: Links, *, experts: int, max_tokens: int | None, wire: w.Wire = "same", fixed: bool = False
    ) -> None:
        super().__init__(links, experts=experts, max_tokens=max_tokens, wire=wire, low_latency=False, fixed=fixed)
        if fixed and self.api == "buffer" and links.topology.ranks > library.NODE_RANKS:
            raise DispatchError("deep_ep.Buffer has no form of fixed rows on several nodes; leave capacity out")
        self.fixed = fixed
        self._opened: PortDispatch | None = None
        self._choices = 0

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Flight]:
        """See `Dispatch.dispatch`. Ids out of range are trusted: to look would wait for the device."""
        width, choices = self._admit(x_TD, expert_ids_TK, weights_TK, library.CHOICES), expert_ids_TK.shape[1]
        if self._opened is None:
            port, first = self._open(width, choices), self.links.rank * self.held
            self._opened = PortDispatch(
                port, first=first, held=self.held, experts=self.experts, width=width, wire=self.wire
            )
            self._choices = choices
        if choices > self._choices:
            raise DispatchError(f"{choices} experts a token, but buffers were opened for {self._choices}")
        return self._opened.dispatch(x_TD, expert_ids_TK, weights_TK)

    def combine(self, y_RD: Tensor, handle: Flight) -> Tensor:
        """See `Dispatch.combine`."""
        if self._opened is None:
            raise DispatchError("deep_ep's buffers were closed since this handle was made; dispatch again")
        return self._opened.combine(y_RD, handle)

    def check(self) -> None:
        """Nothing is ever lost: there is room for all that may come."""

    def close(self) -> None:
        """Give the buffers back. Collective, if a dispatch was made: a rank that leaves without it ends no less well.

        Handles and gradients that are still out can't be used after it.
        """
        if self._opened is not None:
            self._opened.port.close()
            self._opened, self._opened_for = None, None

    def _open(self, width: int, choices: int) -> library.Port:
        group, experts = self.links.group, self.experts
        if self.api == "elastic":
            return library.ElasticPort(
                self._module, group, experts=experts, width=width, choices=choices, max_tokens=self.max_tokens,
                fixed=self.fixed, deadline_s=self.links.deadline_s,
            )  # fmt: skip
        rows = self.links.topology.ranks * self.max_tokens if self.fixed else 0
        return library.BufferPort(self._module, group, experts=experts, width=width, fixed_rows=rows)


class PortDispatch(Dispatch[Flight]):
    """See `Dispatch`; over an opened port whose ranks hold `held` experts each, this one those from `first` on."""

    def __init__(self, port: library.Port, *, first: int, held: int, experts: int, width: int, wire: w.Wire) -> None:
        self.port = port
        self.width = width
        self.wire: w.Wire = wire
        self._first = first
        self._held = held
        self._experts = experts
        self._local = LocalDispatch(held)

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Rows[Flight]:
        """See `Dispatch.dispatch`."""
        (tokens, dim), ids, weights = x_TD.shape, expert_ids_TK, weights_TK
        if self.port.distinct_ids:
            ids, weights = merge_repeats(ids, weights)
        if tokens < self.port.least_tokens:
            x_TD, ids, weights = with_dummy(x_TD, ids, weights, self._first, self._experts)
        x_MD, weights_MK, ids_MK, handle, pairs = _Out.apply(x_TD, weights, ids, self.port, self.width, self.wire)  # type: ignore[no-untyped-call]
        # Told how many pairs came, the local dispatch gives out as many rows and no more.
        most = max(1, ids_MK.numel() if pairs is None else pairs)
        rows = LocalDispatch(self._held, most).dispatch(x_MD, ids_MK, weights_MK)
        return Rows(rows.x_RD, rows.weights_R, rows.ends_E, Flight(handle, rows.handle, tokens, dim))

    def combine(self, y_RD: Tensor, handle: Flight) -> Tensor:
        """See `Dispatch.combine`."""
        if handle.used:
            raise DispatchError("this dispatch handle was combined before; dispatch again")
        check_answers(y_RD, handle.dim, self.wire)
        y_MD = self._local.combine(y_RD, handle.places)
        handle.used = True
        y_TD: Tensor = _Home.apply(y_MD, self.port, handle.handle, self.width)  # type: ignore[no-untyped-call]
        return y_TD if y_TD.shape[0] == handle.tokens else y_TD[: handle.tokens]


def check_inputs(x_TD: Tensor, ids_TK: Tensor, wire: w.Wire, max_tokens: int, most_choices: int) -> None:
    """Refuse what the library does not carry. Raises: DispatchError."""
    tokens, choices = ids_TK.shape
    if tokens > max_tokens:
        raise DispatchError(
            f"{tokens} tokens, but the group agreed on at most {max_tokens}; raise max_tokens on every rank"
        )
    if not 1 <= choices <= most_choices:
        raise DispatchError(f"{choices} experts a token is not in [1, {most_choices}], all that deep_ep takes")
    _check_dtype(x_TD, wire)


def check_answers(y_RD: Tensor, dim: int, wire: w.Wire) -> None:
    """Refuse answers of another width than the tokens', or that would be rounded unasked. Raises: DispatchError."""
    if y_RD.ndim != 2 or y_RD.shape[1] != dim:
        raise DispatchError(f"combine got {list(y_RD.shape)}, but dispatch gave out rows of width {dim}")
    _check_dtype(y_RD, wire)


def _check_dtype(values: Tensor, wire: w.Wire) -> None:
    if wire == "same" and values.dtype != torch.bfloat16:
        raise DispatchError(
            f"deep_ep carries bfloat16, not {values.dtype}: ask for the wire bf16 or fp8 to have it rounded on the way"
        )


def merge_repeats(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """An expert named twice by a token is named once, with the sum of the weights; the other places become -1.

    Repeats stop the device in `ElasticBuffer`, and low latency keeps one answer of them.
    """
    same_TKK = ids_TK[:, :, None] == ids_TK[:, None, :]
    first_TK = same_TKK.int().argmax(-1)  # the first place that names the same
    is_first_TK = first_TK == torch.arange(ids_TK.shape[1], device=ids_TK.device)
    merged_TK = torch.zeros_like(weights_TK).scatter_add(1, first_TK, weights_TK)
    return torch.where(is_first_TK, ids_TK, -1), torch.where(is_first_TK, merged_TK, 0.0)


def with_dummy(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, first: int, experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of zeros more, for distinct experts from `first` on, of weight 0. Joined, so that gradients pass."""
    choices = ids_TK.shape[1]
    spare_K = (first + torch.arange(choices, device=ids_TK.device)) % experts
    spare_K = torch.where(torch.arange(choices, device=ids_TK.device) < experts, spare_K, -1)
    return (
        torch.cat((x_TD, x_TD.new_zeros(1, x_TD.shape[1]))),
        torch.cat((ids_TK, spare_K[None])),
        torch.cat((weights_TK, weights_TK.new_zeros(1, choices))),
    )


class _Out(torch.autograd.Function):
    """Rows out. Backward: gradients of rows, and of weights in the place of weights, home and summed."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, port: library.Port, width: int, wire: w.Wire
    ) -> tuple[Tensor, Tensor, Tensor, Any, int | None]:
        if wire == "fp8":
            values_TQb, scales_TQ = w.quantise(_padded(x_TD, width))
            sent: library.Values = values_TQb.flatten(1), scales_TQ
        else:
            sent = as_bf16(x_TD, width)
        came = port.out(sent, ids_TK.contiguous(), weights_TK.contiguous())
        x_MD = plain(came.x, x_TD.dtype)[:, : x_TD.shape[1]]
        if came.pairs is None:  # rows that nothing came to hold what was there before, which may be NaN
            x_MD = torch.where((came.ids_MK >= 0).any(1)[:, None], x_MD, 0.0)
        ctx.port, ctx.handle, ctx.width, ctx.dtype = port, came.handle, width, x_TD.dtype
        ctx.mark_non_differentiable(came.ids_MK)
        return x_MD, came.weights_MK, came.ids_MK, came.handle, came.pairs

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor, grad_MK: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        dim = grad_MD.shape[1]
        grad_TH, grad_TK = ctx.port.home(as_bf16(grad_MD, ctx.width), grad_MK.contiguous(), ctx.handle)
        return grad_TH[:, :dim].to(ctx.dtype), grad_TK, None, None, None, None


class _Home(torch.autograd.Function):
    """Answers home, summed over ranks. Backward: the gradient the way that the tokens went."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, port: library.Port, handle: Any, width: int) -> Tensor:
        ctx.port, ctx.handle, ctx.width = port, handle, width
        return port.home(as_bf16(y_MD, width), None, handle)[0][:, : y_MD.shape[1]].to(y_MD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        grad_MH = ctx.port.again(as_bf16(grad_TD, ctx.width), ctx.handle)
        return grad_MH[:, : grad_TD.shape[1]].to(grad_TD.dtype), None, None, None


def as_bf16(x_TD: Tensor, width: int) -> Tensor:
    """As the library takes values: bf16, its width, contiguous."""
    return _padded(x_TD, width).to(torch.bfloat16).contiguous()


def _padded(x_TD: Tensor, width: int) -> Tensor:
    return x_TD if x_TD.shape[1] == width else F.pad(x_TD, (0, width - x_TD.shape[1]))


def plain(x: library.Values, dtype: torch.dtype) -> Tensor:
    """Received values in `dtype`, whatever they travelled as."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    values, scales = x
    blocks: Tensor = values.unflatten(-1, (scales.shape[-1], w.BLOCK)).float()
    return (blocks * scales[..., None]).flatten(-2).to(dtype)
