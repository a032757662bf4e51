"""Which dispatch to use, measured: a short calibration run gives a table, and the table the choice and its reason.

Phases differ: training pays forward and backward, prefill a large forward, decoding a small one, where the hop can also
be overlapped. `calibrate` is collective and times the real thing, experts included; `Table.pick` is a pure function.
Nothing falls back in silence: a form that cannot run here is in the table with the reason.

Shape letters: T tokens of a rank, D width, F hidden width of an expert, L experts of a rank.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from contraflow.dispatch.base import Dispatch, Phase, Rows
from contraflow.dispatch.domains import Traffic
from contraflow.dispatch.exchange import Links
from contraflow.dispatch.open import open_dispatch
from contraflow.dispatch.wire import Wire
from contraflow.errors import DispatchError
from contraflow.telemetry import Clock

CANDIDATES = ("all_to_all", "hierarchical", "nvlink", "overlapped", "per_expert")  # of equals, the first is taken
CLOSE = 0.1  # forms within this share of the fastest are equals: a repeat could turn them round
TWO_HOPS = ("hierarchical", "overlapped")  # not tried in one domain, where the second hop can save nothing


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What travels and what is done with it."""

    experts: int
    choices: int
    dim: int
    expert_ffn: int
    dtype: str = "float32"
    wire: Wire = "same"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One form at one size: seconds of the slowest rank, least of repeats; bytes that rank 0 sent. Or why not."""

    kind: str
    phase: Phase
    tokens: int
    seconds: float = 0.0  # means nothing when refused
    inside: int = 0
    across: int = 0
    refused: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What runs in a phase, and why."""

    phase: Phase
    tokens: int
    kind: str
    reason: str


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A calibration of one group of ranks. Worth keeping: it is true as long as shape, ranks and links are."""

    shape: Shape
    domains: tuple[int, ...]  # of each rank
    entries: tuple[Entry, ...]

    def pick(self, phase: Phase, tokens: int) -> Choice:
        """The form for `tokens` a rank, by the measured size nearest in ratio. Raises DispatchError when none ran."""
        sizes = {e.tokens for e in self.entries if e.phase == phase and not e.refused}
        if not sizes:
            raise DispatchError(f"the calibration has no usable form for {phase}: {self._refusals(phase)}")
        nearest = min(sizes, key=lambda size: (max(size, 1) / max(tokens, 1) + max(tokens, 1) / max(size, 1), size))
        ran = [e for e in self.entries if (e.phase, e.tokens) == (phase, nearest) and not e.refused]
        best = min(e.seconds for e in ran)
        equals = [e for e in ran if e.seconds <= best * (1 + CLOSE)]
        chosen = min(equals, key=lambda e: CANDIDATES.index(e.kind))
        told = ", ".join(f"{e.kind} {e.seconds * 1e3:.2f} ms" for e in sorted(ran, key=lambda e: e.seconds))
        return Choice(phase=phase, tokens=tokens, kind=chosen.kind, reason=f"measured at {nearest} tokens: {told}")

    def json(self) -> str:
        """The table as a file holds it."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    def lines(self) -> list[str]:
        """The table as text, one line a size, the choice first."""
        kinds = [k for k in CANDIDATES if any(e.kind == k for e in self.entries)]
        lines = [f"{'phase':8}{'tokens':>7}  {'choice':13}" + "".join(f"{kind:>16}" for kind in kinds)]
        for phase, tokens in dict.fromkeys((e.phase, e.tokens) for e in self.entries):
            of = {e.kind: e for e in self.entries if (e.phase, e.tokens) == (phase, tokens)}
            cells = "".join(f"{_cell(of.get(kind)):>16}" for kind in kinds)
            lines.append(f"{phase:8}{tokens:7}  {self.pick(phase, tokens).kind:13}{cells}")
        lines += sorted({f"{e.kind} cannot run here: {e.refused}" for e in self.entries if e.refused})
        return lines

    def _refusals(self, phase: Phase) -> str:
        return "; ".join(sorted({f"{e.kind}: {e.refused}" for e in self.entries if e.phase == phase})) or "none was run"


def calibrate(
    links: Links,
    shape: Shape,
    tokens: Mapping[Phase, Sequence[int]],
    *,
    clock: Clock,
    seed: int,
    repeats: int = 5,
    device: torch.device | str = "cpu",
) -> Table:
    """Time every candidate for these token counts a rank. Collective; the table is the same on every rank.

    Routing is uniform, drawn from `seed`; experts are SwiGLU with random weights. Forms take turns, so that whatever
    else the machine does falls on all of them. Raises: DispatchError, and what a lost rank raises.
    """
    ranks = links.topology.ranks
    if shape.experts % ranks or not 1 <= shape.choices <= shape.experts:
        raise DispatchError(
            f"{shape.experts} experts, {shape.choices} a token, cannot be shared out among {ranks} ranks"
        )
    experts = _Experts(shape, links, seed, torch.device(device))
    entries: list[Entry] = []
    opened: dict[str, Dispatch[Any]] = {}
    refused: dict[str, str] = {}
    most = max(max(counts, default=1) for counts in tokens.values())
    for kind in candidates(links, tokens, torch.device(device)):
        try:
            opened[kind] = open_dispatch(
                kind, links, experts=shape.experts, wire=shape.wire, max_tokens=most, device=device
            )
        except DispatchError as fault:
            refused[kind] = str(fault)
    for phase, counts in tokens.items():
        kinds = {kind: d for kind, d in opened.items() if kind != "overlapped" or phase != "train"}
        for count in counts:
            entries += _measure(links, experts, kinds, phase, count, clock, repeats)
            entries += [Entry(kind=k, phase=phase, tokens=count, refused=why) for k, why in refused.items()]
    shared = links.gather(msgspec.json.encode(entries).decode())[0]
    agreed = msgspec.json.decode(shared, type=tuple[Entry, ...])
    return Table(shape=shape, domains=links.topology.domains, entries=agreed)


def candidates(links: Links, phases: Collection[Phase], device: torch.device) -> list[str]:
    """Forms worth a try: two hops over several domains alone, shared memory inside one alone.

    Not in training, where nobody says how many tokens a rank may bring, which sizes that memory.
    """
    several = links.topology.count > 1
    shared = device.type == "cuda" and not several and "train" not in phases
    return [kind for kind in CANDIDATES if (several or kind not in TWO_HOPS) and (shared or kind != "nvlink")]


def _measure(
    links: Links,
    experts: "_Experts",
    kinds: Mapping[str, Dispatch[Any]],
    phase: Phase,
    tokens: int,
    clock: Clock,
    repeats: int,
) -> list[Entry]:
    """Every form in turn, once to warm up and then `repeats` times."""
    batch = experts.batch(tokens)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    traffic: dict[str, Traffic] = {}
    for _ in range(1 + repeats):
        for kind, dispatch in kinds.items():
            links.traffic.take()
            seconds[kind].append(_timed(links, partial(experts.pass_, dispatch, batch, phase), clock))
            traffic[kind] = links.traffic.take()
    return [
        Entry(
            kind=kind,
            phase=phase,
            tokens=tokens,
            seconds=_slowest(links, min(seconds[kind][1:])),
            inside=traffic[kind].inside,
            across=traffic[kind].across,
        )
        for kind in kinds
    ]


class _Experts:
    """A stand-in for one MoE layer: random tokens, uniform routing, this rank's experts."""

    def __init__(self, shape: Shape, links: Links, seed: int, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._noise = torch.Generator(device).manual_seed(seed + links.rank)
        dtype: torch.dtype = getattr(torch, shape.dtype)
        held, dim, ffn = shape.experts // links.topology.ranks, shape.dim, shape.expert_ffn
        self._gate_up_LFD = self._randn(held, 2 * ffn, dim).mul_(dim**-0.5).to(dtype).requires_grad_()
        self._down_LDF = self._randn(held, dim, ffn).mul_(ffn**-0.5).to(dtype).requires_grad_()
        self._dtype = dtype

    def batch(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = self._shape
        scores = torch.rand(tokens, shape.experts, generator=self._noise, device=self._device)
        ids_TK = scores.topk(shape.choices).indices
        weights_TK = torch.full(ids_TK.shape, 1 / shape.choices, device=self._device)
        return self._randn(tokens, shape.dim).to(self._dtype), ids_TK, weights_TK

    def pass_(self, dispatch: Dispatch[Any], batch: tuple[Tensor, Tensor, Tensor], phase: Phase) -> None:
        x_TD, ids_TK, weights_TK = batch
        if phase != "train":
            with torch.no_grad():
                self._forward(dispatch, x_TD, ids_TK, weights_TK)
            return
        x_TD, weights_TK = x_TD.detach().requires_grad_(), weights_TK.detach().requires_grad_()
        out = self._forward(dispatch, x_TD, ids_TK, weights_TK)
        out.backward(torch.ones_like(out))

    def _forward(self, dispatch: Dispatch[Any], x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return dispatch.mix(x_TD, ids_TK, weights_TK, self._answer)

    def _answer(self, rows: Rows[Any]) -> Tensor:
        gate, up = F.grouped_mm(rows.x_RD, self._gate_up_LFD.mT, offs=rows.ends_E).chunk(2, -1)
        answers_RD = F.grouped_mm(F.silu(gate) * up, self._down_LDF.mT, offs=rows.ends_E)
        return (answers_RD * rows.weights_R[:, None]).to(rows.x_RD.dtype)

    def _randn(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._noise, device=self._device)


def _timed(links: Links, work: Callable[[], None], clock: Clock) -> float:
    links.gather("")  # all ranks begin together
    began = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


def _slowest(links: Links, seconds: float) -> float:
    return max(float(text) for text in links.gather(repr(seconds)))


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    return "refused" if entry.refused else f"{entry.seconds * 1e3:.2f} ms"
