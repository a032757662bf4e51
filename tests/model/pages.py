"""What an engine does with a paged cache, as plainly as can be: for any plan over one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from contraflow.model.attention import Plan
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder
from contraflow.model.paged import PagedPlan


def sequences(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 40, (length,), generator=noise) for length in lengths]


class Pages:
    """What an engine does, as plainly as can be: scattered blocks, feeds of chosen sizes, hidden states by position."""

    def __init__(
        self,
        decoder: Decoder,
        lengths: Sequence[int],
        block_tokens: int,
        seed: int,
        plan: Callable[..., Plan] = PagedPlan,
    ) -> None:
        self.decoder, self.plan = decoder, plan
        self.device = decoder.head.device
        self.block_tokens = block_tokens
        each = [-(-length // block_tokens) for length in lengths]
        self.cache = KVCache(
            decoder.config,
            blocks=sum(each) + 2,
            block_tokens=block_tokens,
            dtype=decoder.compute_dtype,
            device=self.device,
        )
        noise = torch.Generator().manual_seed(seed)
        self.cache.pool.copy_(
            torch.randn(self.cache.pool.shape, generator=noise) * 100
        )  # what other sequences left behind must not matter
        free = (torch.randperm(sum(each) + 1, generator=noise) + 1).tolist()
        self.tables = [[free.pop() for _ in range(count)] for count in each]
        self.done = [0] * len(lengths)
        self.hidden: list[list[Tensor]] = [[] for _ in lengths]

    def feed(self, tokens: Sequence[Tensor], counts: Sequence[int], *, decode: bool = False) -> None:
        """The next `counts[b]` tokens of each sequence in one forward; `decode` takes the form of one token each."""
        rows = [b for b, count in enumerate(counts) if count]
        queries = torch.full((len(rows), max(counts) + 1), -1)
        fed, positions, slots = [], [], []
        for row, b in enumerate(rows):
            for j in range(counts[b]):
                position = self.done[b] + j
                queries[row, j] = len(fed)
                fed.append(int(tokens[b][position]))
                positions.append(position)
                block = self.tables[b][position // self.block_tokens]
                slots.append(block * self.block_tokens + position % self.block_tokens)
            self.done[b] += counts[b]
        width = max(len(self.tables[b]) for b in rows)
        tables = [self.tables[b] + [0] * (width - len(self.tables[b])) for b in rows]
        on_device = [
            torch.tensor(x, device=self.device) for x in (tables, [self.done[b] for b in rows], slots, fed, positions)
        ]
        plan = self.plan(self.cache, *on_device[:3], None if decode else queries.to(self.device))
        out = iter(self.decoder(*on_device[3:], plan))
        for b in rows:
            self.hidden[b] += [next(out) for _ in range(counts[b])]

    def in_chunks(self, tokens: Sequence[Tensor], chunk: int) -> Tensor:
        """All hidden states, fed each sequence at its own pace, some resting: prefill and decode in one forward."""
        lengths = [len(row) for row in tokens]
        while self.done != lengths:
            wanted = [(chunk * (b + 1) + len(self.hidden[0])) % (chunk + 2) for b in range(len(lengths))]
            left = [length - done for length, done in zip(lengths, self.done, strict=True)]
            counts = [min(want, rest) for want, rest in zip(wanted, left, strict=True)]
            self.feed(tokens, counts if any(counts) else [min(1, rest) for rest in left])
        return torch.cat([torch.stack(rows) for rows in self.hidden])

    def one_by_one(self, tokens: Sequence[Tensor]) -> Tensor:
        """All hidden states, fed one token of each sequence at a time."""
        lengths = [len(row) for row in tokens]
        for step in range(max(lengths)):
            self.feed(tokens, [int(step < length) for length in lengths], decode=True)
        return torch.cat([torch.stack(rows) for rows in self.hidden])
