"""On a CPU: the keys and values of decoding sequences once more, each row's side by side, so attention reads in place.

A paged cache has to gather every page of every row for every token, which on a CPU costs more than the attention. Here
pages are copied to a row once, when it joins, and back when it leaves; in between a step writes one position a row and
copies nothing. Knows rows and pages, not requests.

Shape letters: N layers, R rows, B rows in use, G key/value heads, H query heads, d head dimension, C positions of a
row, L positions in use, J rows that join, P pages of the longest of them, X pages that go back, BS tokens of a page.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from contraflow.model.cache import KVCache
from contraflow.model.sinks import Sight, hidden, sink_softmax


class RowCache:
    """`store` `[N, 2, R, G, C, d]` beside a `KVCache` of the same model: keys, then values, of the decoding rows.

    Invariant: row r holds the K/V of the sequence in decode row r, for its first `length - 1` positions; what it added
    since it joined is in no page before `spill`. Storage never moves.
    """

    def __init__(self, cache: KVCache, rows: int, context_tokens: int) -> None:
        """The last block of `cache` is scratch: what is written there is never read."""
        layers, _, _, kv_heads, self._page_tokens, head_dim = cache.pool.shape
        positions = -(-context_tokens // self._page_tokens) * self._page_tokens
        self._pages, self._scratch = cache.pool, cache.blocks - 1
        self.store = torch.zeros((layers, 2, rows, kv_heads, positions, head_dim), dtype=cache.pool.dtype)
        # Of each layer: keys and values `[R * G, C, d]`, and both as places `[2 * R * G * C, d]`.
        self.layers = [(*layer.flatten(1, 2).unbind(), layer.flatten(0, 3)) for layer in self.store]
        self.kv_heads = kv_heads
        self.positions_C = torch.arange(positions)
        homes = torch.arange(2 * rows * kv_heads).view(2, rows, kv_heads).transpose(0, 1)
        self.homes_R2G = (
            homes.reshape(rows, -1).contiguous() * positions
        )  # first place of each row's keys and values, head by head

    def fill(self, first: int, tables: Sequence[Sequence[int]]) -> None:
        """Copy J sequences, given by their pages, into rows `first`, `first + 1`, ..."""
        pages_JP = self._table(tables)
        (joining, longest), (layers, _, _, kv_heads, _, d) = pages_JP.shape, self.store.shape
        pages = self._pages.index_select(1, pages_JP.view(-1))
        pages = pages.view(layers, joining, longest, 2, kv_heads, self._page_tokens, d).permute(0, 3, 1, 4, 2, 5, 6)
        rows = self.store[:, :, first : first + joining, :, : longest * self._page_tokens]
        rows.unflatten(4, (longest, self._page_tokens)).copy_(pages)

    def spill(self, rows_X: Sequence[int], pages_X: Sequence[int], blocks_X: Sequence[int]) -> None:
        """Copy each given page (counted within its row) to the block of the cache that is to hold it."""
        places = torch.tensor([rows_X, pages_X])
        by_page = self.store.unflatten(4, (-1, self._page_tokens))
        # Two indices apart put their dimension first: [X, N, 2, G, BS, d].
        used = by_page[:, :, places[0], :, places[1]].transpose(0, 1)
        self._pages.index_copy_(1, torch.tensor(blocks_X), used)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Let `target` be what `source` was, a row of `tokens` positions."""
        self.store[:, :, target, :, :tokens] = self.store[:, :, source, :, :tokens]

    def _table(self, tables: Sequence[Sequence[int]]) -> Tensor:
        """`[J, P]` int64, padded with the scratch page."""
        longest = max(map(len, tables))
        return torch.tensor([[*table, *[self._scratch] * (longest - len(table))] for table in tables])


class RowPlan:
    """One new token of each of the first B rows against what the rows hold; attending also writes its K/V.

    `positions_B` int64 where each token stands, `lengths_B` int64 its context with itself (0 for a padding row), and
    `longest` an upper bound of it on the host, in whole pages.
    """

    def __init__(self, cache: RowCache, positions_B: Tensor, lengths_B: Tensor, longest: int) -> None:
        rows, kv_heads = len(positions_B), cache.kv_heads
        self._cache, self._longest, self._rows = cache, longest, rows * kv_heads
        self._places = (cache.homes_R2G[:rows] + positions_B[:, None]).view(-1)
        hidden_BL = cache.positions_C[:longest] >= lengths_B[:, None]
        # Finite, so that a padding row, which may see nothing, gives numbers.
        lowest = torch.finfo(cache.store.dtype).min / 2
        mask_BL = torch.zeros(hidden_BL.shape, dtype=cache.store.dtype).masked_fill_(hidden_BL, lowest)
        self._mask_X1L = mask_BL[:, None].expand(-1, kv_heads, -1).reshape(self._rows, 1, longest)
        self._last_B1 = lengths_B[:, None] - 1
        self._windowed: dict[int, Tensor] = {}  # masks of other windows, made when first asked for

    def layer(self, index: int) -> "_RowLayer":
        """The view of one layer's rows."""
        return _RowLayer(self, *self._cache.layers[index])

    def attend(self, q_BHd: Tensor, keys: Tensor, values: Tensor, sight: Sight | None) -> Tensor:
        """Attention of each row's query heads, as two batched matmuls over the row's own K/V."""
        keys_XLd, values_XLd = keys[: self._rows, : self._longest], values[: self._rows, : self._longest]
        d = q_BHd.shape[-1]
        q_Xsd = q_BHd.reshape(self._rows, -1, d)
        mask_X1L = self._mask_X1L if sight is None or sight.window is None else self._mask(sight.window)
        scores_XsL = torch.baddbmm(mask_X1L, q_Xsd, keys_XLd.transpose(1, 2), alpha=d**-0.5)
        if sight is None:
            return torch.bmm(scores_XsL.softmax(-1), values_XLd).view(q_BHd.shape)
        sinks_Xs = sight.sinks_H.view(1, -1, q_Xsd.shape[1]).expand(len(q_BHd), -1, -1).flatten(0, 1)
        return torch.bmm(sink_softmax(scores_XsL, sinks_Xs), values_XLd).view(q_BHd.shape)

    def _mask(self, window: int) -> Tensor:
        if window not in self._windowed:
            unseen_BL = hidden(self._last_B1, self._cache.positions_C[: self._longest], window)
            unseen_X1L = unseen_BL.repeat_interleave(self._cache.kv_heads, 0).unsqueeze(1)
            lowest = torch.finfo(self._mask_X1L.dtype).min / 2
            self._windowed[window] = self._mask_X1L.masked_fill(unseen_X1L, lowest)
        return self._windowed[window]

    def write(self, places: Tensor, k_BGd: Tensor, v_BGd: Tensor) -> None:
        """Put each row's new key and value at its position."""
        places.index_copy_(0, self._places, torch.cat((k_BGd, v_BGd), 1).flatten(0, 1))


class _RowLayer:
    """One layer's rows under a plan: keys, values, and both as places."""

    def __init__(self, plan: RowPlan, keys: Tensor, values: Tensor, places: Tensor) -> None:
        self._plan, self._keys, self._values, self._places = plan, keys, values, places

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        self._plan.write(self._places, k_TGd, v_TGd)
        return self._plan.attend(q_THd, self._keys, self._values, sight)
