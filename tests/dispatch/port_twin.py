"""A `Port` over an exchange between threads: what the adapter's composition is tested against without a GPU.

It keeps the promises of a port and nothing of the library: every rank tells all it has to everyone, and each takes what
is its own. Rows that nothing came to are filled with NaN, and inputs that a port may refuse are refused.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contraflow.dispatch.deepep_library import Arrived, Values
from contraflow.dispatch.exchange import Exchange
from contraflow.dispatch.wire import as_bytes, from_bytes


@dataclass(frozen=True)
class Sources:
    """Rank and token of each row that came; how many rows there are with those of nobody, and how many tokens here."""

    came_N2: Tensor
    rows: int
    tokens: int


class TwinPort:
    """`fixed_rows`: as many rows whatever the routing, and nobody is told how many came. 0: exact."""

    def __init__(
        self, exchange: Exchange, *, experts: int, width: int, fixed_rows: int = 0, least_tokens: int = 0,
        distinct_ids: bool = False,
    ) -> None:  # fmt: skip
        self.least_tokens = least_tokens
        self.distinct_ids = distinct_ids
        self._exchange = exchange
        self._held = experts // exchange.size
        self._width = width
        self._fixed_rows = fixed_rows

    def out(self, x: Values, ids_TK: Tensor, weights_TK: Tensor) -> Arrived:
        """See `Port.out`."""
        parts = (*(x if isinstance(x, tuple) else (x,)), ids_TK, weights_TK)
        assert all(part.is_contiguous() for part in parts)
        assert ids_TK.shape[0] >= self.least_tokens
        assert parts[0].shape[1] == self._width
        self._check_ids(ids_TK)
        heard = [self._parted(rows, parts) for rows in self._tell_all(parts)]
        first, came, mine = self._exchange.place * self._held, [], []
        for rank, theirs in enumerate(heard):
            here_TK = (theirs[-2] >= first) & (theirs[-2] < first + self._held)
            theirs[-2], theirs[-1] = torch.where(here_TK, theirs[-2] - first, -1), torch.where(here_TK, theirs[-1], 0.0)
            for_me_N = here_TK.any(1).nonzero()[:, 0]
            came.append(torch.stack((torch.full_like(for_me_N, rank), for_me_N), 1))
            mine.append([part[for_me_N] for part in theirs])
        came_N2 = torch.cat(came)
        received = [self._filled(torch.cat(part)) for part in zip(*mine, strict=True)]
        if len(received[-2]) > len(came_N2):
            received[-2][len(came_N2) :] = -1
        values: Values = received[0] if len(received) == 3 else (received[0], received[1])
        pairs = None if self._fixed_rows else int((received[-2] >= 0).sum())
        return Arrived(values, received[-2], received[-1], pairs, Sources(came_N2, len(received[-2]), len(ids_TK)))

    def home(self, y_MH: Tensor, extra_MK: Tensor | None, handle: Sources) -> tuple[Tensor, Tensor | None]:
        """See `Port.home`."""
        self._check_values(y_MH, handle.rows)
        extra = y_MH.new_zeros(handle.rows, 0, dtype=torch.float32) if extra_MK is None else extra_MK
        parts = tuple(part[: len(handle.came_N2)].contiguous() for part in (handle.came_N2, y_MH, extra))
        sums_TH = torch.zeros(handle.tokens, self._width)
        extra_TK = torch.zeros(handle.tokens, extra.shape[1])
        for rows in self._tell_all(parts):
            came, y, their_extra = self._parted(rows, parts)
            mine = came[:, 0] == self._exchange.place
            sums_TH.index_add_(0, came[mine, 1], y[mine].float())
            extra_TK.index_add_(0, came[mine, 1], their_extra[mine])
        return sums_TH.to(torch.bfloat16), None if extra_MK is None else extra_TK

    def again(self, x_TH: Tensor, handle: Sources) -> Tensor:
        """See `Port.again`."""
        self._check_values(x_TH, handle.tokens)
        heard = [from_bytes(rows, torch.bfloat16) for rows in self._tell_all((x_TH,))]
        rows = [heard[rank][token] for rank, token in handle.came_N2.tolist()]
        return self._filled(torch.stack(rows) if rows else x_TH.new_zeros(0, self._width))

    def close(self) -> None:
        """See `Port.close`."""

    def _check_values(self, values: Tensor, rows: int) -> None:
        assert values.is_contiguous()
        assert values.dtype == torch.bfloat16
        assert values.shape == (rows, self._width)

    def _check_ids(self, ids_TK: Tensor) -> None:
        for row in ids_TK.tolist() if self.distinct_ids else ():
            named = [expert for expert in row if expert >= 0]
            assert len(set(named)) == len(named)

    def _tell_all(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        rows_NB = torch.cat([as_bytes(part) for part in parts], 1)
        ranks, mine = self._exchange.size, len(rows_NB)
        counts = self._exchange.counts([mine] * ranks)
        return list(self._exchange.begin(rows_NB.repeat(ranks, 1), [mine] * ranks, counts)().split(counts))

    @staticmethod
    def _parted(rows_NB: Tensor, like: tuple[Tensor, ...]) -> list[Any]:
        parts = rows_NB.split([part.shape[1] * part.itemsize for part in like], 1)
        return [from_bytes(part, of.dtype) for part, of in zip(parts, like, strict=True)]

    def _filled(self, rows: Tensor) -> Tensor:
        if not self._fixed_rows:
            return rows
        nobody = torch.full((self._fixed_rows - len(rows), rows.shape[1]), 255, dtype=torch.uint8)
        nobody = nobody.repeat_interleave(rows.itemsize, 1)  # bytes of ones are NaN in every float, and -1
        return torch.cat((as_bytes(rows), nobody)).view(rows.dtype)
