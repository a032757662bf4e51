"""The decoding sequences as rows of preallocated tables, so that a step touches arrays and not sequences.

Takes sequences when they become ready, gives each decode pass its inputs and takes its outputs: all per-token work is
a handful of numpy calls over all rows. Does not decide who decodes (`schedule`) nor compute (`passes`).

Shape letters: R rows there are, B rows in use, N blocks of a table, W stop tokens of a request at most, C new tokens.
"""

from collections.abc import Iterable

import numpy as np
import torch

from contraflow.rollout.sampling import stream_key, uniforms
from contraflow.rollout.schedule import Sequence
from contraflow.types import Float32, Int32, Int64, StopReason

TOKEN, POSITION, LENGTH, SLOT, KEY, SAMPLED, LIMIT, HELD, RECORD, JOINED = range(10)
SCALE, GREEDY, NOISE = range(3)


class DecodeRows:
    """Rows `[0, count)` are the decoding sequences, packed; a row that leaves is filled with the last one.

    `numbers` int64 `[10, R]` (the names above), `tables` int64 `[R, N]` and `reals` fp32 `[3, R]` (SCALE 1/temperature,
    GREEDY 1 or 0, NOISE in [0, 1)) are tensors in (pinned, if the device is CUDA) host memory, their storage fixed.

    Invariant: rows from `count` on are padding: length 0, writing to the scratch block. A sequence's own `tokens`,
    `length` and `cached` are stale while it has a row, and right again after `leave`.
    """

    def __init__(
        self, rows: int, *, context_tokens: int, block_tokens: int, scratch: int, pinned: bool = False
    ) -> None:
        width = -(-context_tokens // block_tokens)
        self.numbers = torch.zeros((10, rows), dtype=torch.int64, pin_memory=pinned)
        self.tables = torch.full((rows, width), scratch, dtype=torch.int64, pin_memory=pinned)
        self.reals = torch.ones((3, rows), dtype=torch.float32, pin_memory=pinned)
        self.sequences: list[Sequence] = []
        self._numbers: Int64 = self.numbers.numpy()
        self._tables: Int64 = self.tables.numpy()
        self._reals: Float32 = self.reals.numpy()
        self._stops: Int64 = np.full((rows, 1), -1, np.int64)
        self._new_tokens: Int32 = np.zeros((rows, context_tokens), np.int32)  # by record, not by row: rows move
        self._new_logprobs: Float32 = np.zeros((rows, context_tokens), np.float32)
        self._records = list(range(rows))
        self._row: dict[int, int] = {}  # arrival -> row
        self._all: Int64 = np.arange(rows)
        self._block_tokens = block_tokens
        self._scratch = scratch
        self._numbers[SLOT] = scratch * block_tokens

    @property
    def count(self) -> int:
        return len(self.sequences)

    def has(self, sequence: Sequence) -> bool:
        return sequence.arrival in self._row

    def join(self, sequence: Sequence) -> None:
        """Give a sequence that has K/V for all tokens but the last a row."""
        row, length, request = self.count, sequence.length, sequence.request
        sampled = length - sequence.prompt
        key = stream_key(request.seed)
        self._numbers[:, row] = (
            *(sequence.tokens[length - 1], length - 1, length, 0, key),
            *(sampled, sequence.limit, len(sequence.blocks), self._records.pop(), sampled),
        )
        self._tables[row, : len(sequence.blocks)] = sequence.blocks
        self._reals[: GREEDY + 1, row] = (1 / request.temperature, 0) if request.temperature else (1, 1)
        self._set_stops(row, request.stop_tokens)
        self.sequences.append(sequence)
        self._row[sequence.arrival] = row

    def leave(self, sequence: Sequence) -> None:
        """Write a sequence's new tokens back into it and give its row away."""
        row, last = self._row.pop(sequence.arrival), self.count - 1
        sampled, record, joined = (int(self._numbers[field, row]) for field in (SAMPLED, RECORD, JOINED))
        sequence.length = sequence.prompt + sampled
        sequence.cached = sequence.length - 1
        sequence.tokens[sequence.prompt + joined : sequence.length] = self._new_tokens[record, joined:sampled]
        sequence.logprobs[joined:sampled] = self._new_logprobs[record, joined:sampled]
        self._records.append(record)
        moved = self.sequences.pop()
        if row != last:
            for table in (self._numbers.T, self._tables, self._reals.T, self._stops):
                table[row] = table[last]
            self.sequences[row] = moved
            self._row[moved.arrival] = row
        self._tables[last] = self._scratch
        self._numbers[:, last] = 0
        self._numbers[SLOT, last] = self._scratch * self._block_tokens

    def sampled(self, sequence: Sequence) -> int:
        """New tokens a sequence has now, whether it has a row or not."""
        row = self._row.get(sequence.arrival)
        return sequence.length - sequence.prompt if row is None else int(self._numbers[SAMPLED, row])

    def outgrown(self) -> list[Sequence]:
        """Sequences whose next token has no block to go to, oldest first."""
        n = self.count
        rows = np.flatnonzero(self._numbers[POSITION, :n] >= self._numbers[HELD, :n] * self._block_tokens)
        return sorted((self.sequences[row] for row in rows), key=lambda s: s.arrival)

    def grown(self, sequence: Sequence) -> None:
        """The sequence was given one more block."""
        row = self._row[sequence.arrival]
        self._tables[row, self._numbers[HELD, row]] = sequence.blocks[-1]
        self._numbers[HELD, row] += 1

    def aim(self) -> int:
        """Fill in where each row's K/V goes and its next token's noise; gives the blocks of the longest table used."""
        n = self.count
        self._reals[NOISE, :n] = uniforms(self._numbers[KEY, :n], self._numbers[LENGTH, :n])
        column, offset = np.divmod(self._numbers[POSITION, :n], self._block_tokens)
        self._numbers[SLOT, :n] = self._tables[self._all[:n], column] * self._block_tokens + offset
        return int(column.max()) + 1

    def advance(self, tokens_B: Int32, logprobs_B: Float32) -> list[tuple[Sequence, StopReason]]:
        """Take what a decode pass sampled, one token a row; gives who ended and why (their rows are still theirs).

        A log-probability that is not a number ends its sequence with ENGINE_ERROR.
        """
        n, numbers = self.count, self._numbers
        record, sampled = numbers[RECORD, :n], numbers[SAMPLED, :n]
        self._new_tokens[record, sampled] = tokens_B
        self._new_logprobs[record, sampled] = logprobs_B
        numbers[TOKEN, :n] = tokens_B
        numbers[POSITION : LENGTH + 1, :n] += 1
        sampled += 1
        stopped = (self._stops[:n] == tokens_B[:, None]).any(1)
        broken = ~np.isfinite(logprobs_B)
        ended = stopped | broken | (sampled >= numbers[LIMIT, :n])
        return [(self.sequences[row], _reason(stopped[row], broken[row])) for row in np.flatnonzero(ended)]

    def _set_stops(self, row: int, stops: Iterable[int]) -> None:
        wanted = list(stops)
        lacking = len(wanted) - self._stops.shape[1]
        if lacking > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, lacking)), constant_values=-1)
        self._stops[row] = -1
        self._stops[row, : len(wanted)] = wanted


def _reason(stopped: bool, broken: bool) -> StopReason:
    if broken:
        return StopReason.ENGINE_ERROR
    return StopReason.STOP if stopped else StopReason.LENGTH
