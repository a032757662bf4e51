"""On a CPU: the keys and values of decoding sequences once more, each row's side by side, so attention reads in place.

A paged cache has to gather every page of every row for every token, which on a CPU costs more than the attention. Here
pages are copied to a row once, when it joins, and back when it leaves; in between a step writes one position a row and
copies nothing. Knows rows and pages, not requests.

Shape letters: N layers, R rows, B rows in use, G key/value heads, H query heads, d head dimension, C positions of a
row, J rows that join, P pages of the longest of them, X pages that go back, BS tokens of a page.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from contraflow.model.cache import KVCache
from contraflow.model.sinks import Sight, hidden, sink_softmax


class RowCache:
    """`store` `[N, 2, R, G, C, d]` beside a `KVCache` of the same model: keys, then values, of the decoding rows.

    C follows the longest row, page by page: a row that ends where the next begins is read as one stream. With room for
    the whole context behind each row, attention over 64 rows of 79 positions takes twice as long, and with room for 4.

    Invariant: row r holds the K/V of the sequence in decode row r, for its first `length - 1` positions; what it added
    since it joined is in no page before `spill`. What lies behind is finite, or was computed from that same sequence.
    """

    def __init__(self, cache: KVCache, rows: int, context_tokens: int) -> None:
        """The last block of `cache` is scratch: what is written there is never read."""
        layers, _, _, self.kv_heads, self._page_tokens, head_dim = cache.pool.shape
        positions = -(-context_tokens // self._page_tokens) * self._page_tokens
        self._pages, self._scratch = cache.pool, cache.blocks - 1
        # A layer's part of it begins where it does for any C. One part is free, so that with every change of C each
        # layer moves into its neighbour's: in place it would have to be copied twice.
        size = 2 * rows * self.kv_heads * positions * head_dim
        self._memory, self._begin = torch.zeros((layers + 1, size), dtype=cache.pool.dtype), 0
        self._shape = (2, rows, self.kv_heads, -1, head_dim)
        # Of a hidden position's score. Finite, so that a padding row, which may see nothing, gives numbers.
        self.lowest = torch.tensor(torch.finfo(cache.pool.dtype).min / 2, dtype=cache.pool.dtype)
        homes = torch.arange(2 * rows * self.kv_heads).view(2, rows, self.kv_heads).transpose(0, 1)
        self._homes_R2G = homes.reshape(rows, -1).contiguous()  # heads of keys and of values, as they lie in a layer
        self._lay(self._page_tokens)

    def forget(self) -> None:
        """Be as when it was made: no row is in use."""
        self._memory.zero_()
        self._begin = 0
        self._lay(self._page_tokens)

    def _lay(self, positions: int) -> None:
        """Let C be `positions` from now on; what the rows hold is not moved."""
        _, rows, kv_heads, _, head_dim = self._shape
        self.positions = positions
        parts = self._memory[self._begin : self._begin + len(self._memory) - 1]
        self.store = parts[:, : 2 * rows * kv_heads * positions * head_dim].unflatten(1, self._shape)
        self._views: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self.positions_C = torch.arange(positions)
        self.homes_R2G = self._homes_R2G * positions  # first place of each row's keys and values, head by head

    def layers(self, rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each layer keys `[B * G, d, C]` and values `[B * G, C, d]` of the first rows; places `[2 * R * G * C, d]`.

        Made once while C stays: a view costs a call, as an operation does, and a step would take nine.
        """
        if rows not in self._views:
            heads = rows * self.kv_heads
            self._views[rows] = [
                (keys[:heads].transpose(1, 2), values[:heads], layer.flatten(0, 3))
                for layer in self.store
                for keys, values in [layer.flatten(1, 2).unbind()]
            ]
        return self._views[rows]

    def fit(self, rows: int, longest: int) -> None:
        """Make C fit rows of `longest` positions, a whole number of pages, keeping what the first `rows` rows hold.

        Shrinks only by a quarter and more, so that a row on the edge of a page does not move all others to and fro.
        """
        if longest <= self.positions and longest * 4 > self.positions * 3:
            return
        old, kept = self.store[:, :, :rows], min(longest, self.positions)
        self._begin = 1 - self._begin
        self._lay(longest)
        new, layers = self.store[:, :, :rows], range(len(old))
        for layer in reversed(layers) if self._begin else layers:
            new[layer, ..., :kept, :] = old[layer, ..., :kept, :]
        new[..., kept:, :] = 0

    def fill(self, first: int, tables: Sequence[Sequence[int]]) -> None:
        """Copy J sequences, given by their pages, into rows `first`, `first + 1`, ...; rows before that are in use."""
        pages_JP = self._table(tables)
        (joining, longest), (layers, _, _, kv_heads, _, d) = pages_JP.shape, self.store.shape
        tokens = longest * self._page_tokens
        self.fit(first, max(tokens, self.positions) if first else tokens)
        pages = self._pages.index_select(1, pages_JP.view(-1))
        pages = pages.view(layers, joining, longest, 2, kv_heads, self._page_tokens, d).permute(0, 3, 1, 4, 2, 5, 6)
        rows = self.store[:, :, first : first + joining]
        rows[..., :tokens, :].unflatten(4, (longest, self._page_tokens)).copy_(pages)
        rows[..., tokens:, :] = 0

    def spill(self, rows_X: Sequence[int], pages_X: Sequence[int], blocks_X: Sequence[int]) -> None:
        """Copy each given page (counted within its row) to the block of the cache that is to hold it."""
        rows, pages, blocks = torch.tensor([rows_X, pages_X, blocks_X])
        # Where each page's keys and values lie, head by head, counted in pages of a layer: whole pages are copied.
        homes_XH = (self.homes_R2G[rows] // self._page_tokens + pages[:, None]).view(-1)
        for layer, target in zip(self.store, self._pages, strict=True):
            used = layer.view(-1, self._page_tokens * layer.shape[-1]).index_select(0, homes_XH)
            target.index_copy_(0, blocks, used.view(-1, *target.shape[1:]))

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
    `longest` an upper bound of it on the host, in whole pages: the cache is made to fit it.
    """

    def __init__(self, cache: RowCache, positions_B: Tensor, lengths_B: Tensor, longest: int) -> None:
        rows, kv_heads = len(positions_B), cache.kv_heads
        cache.fit(rows, longest)
        self._cache, self._layers, self._rows = cache, cache.layers(rows), rows * kv_heads
        self._places = (cache.homes_R2G[:rows] + positions_B[:, None]).view(-1)
        hidden_B1C = cache.positions_C >= lengths_B[:, None, None]
        self._mask_X1C = (hidden_B1C.expand(-1, kv_heads, -1) * cache.lowest).reshape(self._rows, 1, -1)
        self._lengths_B = lengths_B
        self._windowed: dict[int, Tensor] = {}  # masks of other windows, made when first asked for

    def layer(self, index: int) -> "_RowLayer":
        """The view of one layer's rows."""
        return _RowLayer(self, *self._layers[index])

    def attend(self, q_BHd: Tensor, keys_XdC: Tensor, values_XCd: Tensor, sight: Sight | None) -> Tensor:
        """Attention of each row's query heads, as two batched matmuls over the row's own K/V."""
        d = q_BHd.shape[-1]
        q_Xsd = q_BHd.reshape(self._rows, -1, d)
        mask_X1C = self._mask_X1C if sight is None or sight.window is None else self._mask(sight.window)
        scores_XsC = torch.baddbmm(mask_X1C, q_Xsd, keys_XdC, alpha=d**-0.5)
        if sight is None:
            return torch.bmm(scores_XsC.softmax(-1), values_XCd).view(q_BHd.shape)
        sinks_Xs = sight.sinks_H.view(1, -1, q_Xsd.shape[1]).expand(len(q_BHd), -1, -1).flatten(0, 1)
        return torch.bmm(sink_softmax(scores_XsC, sinks_Xs), values_XCd).view(q_BHd.shape)

    def _mask(self, window: int) -> Tensor:
        if window not in self._windowed:
            unseen_BC = hidden(self._lengths_B[:, None] - 1, self._cache.positions_C, window)
            unseen_X1C = unseen_BC.repeat_interleave(self._cache.kv_heads, 0).unsqueeze(1)
            self._windowed[window] = self._mask_X1C.masked_fill(unseen_X1C, self._cache.lowest)
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
