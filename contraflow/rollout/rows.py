"""The decoding sequences as rows of preallocated tables, so that a step touches arrays and not sequences.

Takes sequences when they become ready, gives each decode pass its inputs and takes its outputs: all per-token work is
a handful of numpy calls over all rows. Does not decide who decodes (`schedule`) nor compute (`passes`).

Shape letters: R rows there are, B rows in use, N blocks of a table, W stop tokens of a request at most, C context.
"""

from collections.abc import Iterable

import numpy as np
import torch

from contraflow.rollout.sampling import stream_key, uniforms
from contraflow.rollout.schedule import Sequence
from contraflow.types import Bool, Float32, Int32, Int64, StopReason

# Rows of `numbers`. POSITION to PLACE go up by one with every token.
TOKEN, POSITION, LENGTH, SLOT, PLACE, KEY, END, HELD = range(8)
# Rows of `reals`.
SCALE, GREEDY, NOISE = range(3)
AHEAD = 16  # steps whose noise is hashed together: the dozen numpy calls cost the same for one


class DecodeRows:
    """Rows `[0, count)` are the decoding sequences, packed; a row that leaves is filled with the last one.

    Tensors in (pinned, if the device is CUDA) host memory, their storage fixed: `numbers` int64 `[8, R]`: the TOKEN to
    feed, its POSITION, the LENGTH with it, the cache SLOT of its K/V, the PLACE its successor is noted at, the noise
    KEY, the length at the END, the blocks HELD. `tables` int64 `[R, N]`. `reals` fp32 `[3, R]`: SCALE 1/temperature,
    GREEDY 1 or 0, NOISE in [0, 1).

    Invariant: rows from `count` on are padding: length 0, writing to the scratch block. A sequence's own `tokens`,
    `length` and `cached` are as when it joined while it has a row, and right again after `leave`.
    """

    def __init__(
        self, rows: int, *, context_tokens: int, block_tokens: int, scratch: int, pinned: bool = False
    ) -> None:
        width = -(-context_tokens // block_tokens)
        self.numbers = torch.zeros((8, rows), dtype=torch.int64, pin_memory=pinned)
        self.tables = torch.full((rows, width), scratch, dtype=torch.int64, pin_memory=pinned)
        self.reals = torch.ones((3, rows), dtype=torch.float32, pin_memory=pinned)
        self.reals[NOISE] = 0
        self.sequences: list[Sequence] = []
        self._numbers: Int64 = self.numbers.numpy()
        self._tables: Int64 = self.tables.numpy()
        self._reals: Float32 = self.reals.numpy()
        self._stops: Int64 = np.full((1, rows), -1, np.int64)  # [W, R]
        # What was sampled, tokens and bits of log-probabilities: C places a row, which a sequence keeps when rows move.
        self._sampled: Int32 = np.zeros((2, rows * context_tokens), np.int32)
        self._homes = [row * context_tokens for row in range(rows)]  # first places that are free
        self._home: dict[int, int] = {}  # arrival -> first place
        self._row: dict[int, int] = {}  # arrival -> row
        self._block_tokens = block_tokens
        self._scratch = scratch
        # What is known of the steps to come until a row changes hands or grows: see `_look`.
        self._stale = True
        self._to_full = self._to_end = self._blocks = 0
        self._noise: list[Float32] = []
        self.greedy = False
        self._numbers[SLOT] = scratch * block_tokens

    @property
    def count(self) -> int:
        return len(self.sequences)

    def has(self, sequence: Sequence) -> bool:
        return sequence.arrival in self._row

    def join(self, sequence: Sequence) -> None:
        """Give a sequence that has K/V for all tokens but the last a row."""
        row, length, request, blocks = self.count, sequence.length, sequence.request, sequence.blocks
        home = self._home[sequence.arrival] = self._homes.pop()
        slot = blocks[-1] * self._block_tokens + (length - 1) % self._block_tokens
        self._numbers[:, row] = (
            *(sequence.tokens[length - 1], length - 1, length, slot, home),
            *(stream_key(request.seed), sequence.prompt + sequence.limit, len(blocks)),
        )
        self._tables[row, : len(blocks)] = blocks
        self._reals[: GREEDY + 1, row] = (1 / request.temperature, 0) if request.temperature else (1, 1)
        self._set_stops(row, request.stop_tokens)
        self.sequences.append(sequence)
        self._row[sequence.arrival] = row
        self._stale = True

    def row_of(self, sequence: Sequence) -> int:
        return self._row[sequence.arrival]

    def leave(self, sequence: Sequence) -> None:
        """Write a sequence's new tokens back into it and give its row away: to the sequence of the last row, if any."""
        row, home, last = self._row.pop(sequence.arrival), self._home.pop(sequence.arrival), self.count - 1
        old, new = sequence.length, int(self._numbers[LENGTH, row])
        tokens, bits = self._sampled[:, home : home + new - old]
        sequence.tokens[old:new] = tokens
        sequence.logprobs[old - sequence.prompt : new - sequence.prompt] = bits.view(np.float32)
        sequence.length, sequence.cached = new, new - 1
        self._homes.append(home)
        self._stale = True
        moved = self.sequences.pop()
        if row != last:
            for table in (self._numbers.T, self._tables, self._reals.T, self._stops.T):
                table[row] = table[last]
            self.sequences[row] = moved
            self._row[moved.arrival] = row
        self._tables[last] = self._scratch
        self._numbers[:, last] = 0
        self._numbers[SLOT, last] = self._scratch * self._block_tokens

    def sampled(self, sequence: Sequence) -> int:
        """New tokens a sequence has now, whether it has a row or not."""
        row = self._row.get(sequence.arrival)
        return (sequence.length if row is None else int(self._numbers[LENGTH, row])) - sequence.prompt

    def filled(self, sequence: Sequence) -> tuple[int, int]:
        """The range of a sequence's blocks that became full since it joined."""
        length = int(self._numbers[LENGTH, self._row[sequence.arrival]])
        return (sequence.length - 1) // self._block_tokens, (length - 1) // self._block_tokens

    def outgrown(self) -> list[Sequence]:
        """Sequences whose next token has no block to go to, oldest first."""
        if not self._stale and self._to_full > 0:
            return []
        n = self.count
        rows = (self._numbers[POSITION, :n] >= self._numbers[HELD, :n] * self._block_tokens).nonzero()[0]
        return sorted((self.sequences[row] for row in rows), key=lambda s: s.arrival)

    def grown(self, sequence: Sequence) -> None:
        """The sequence was given one more block: its next token goes to the start of that."""
        row, block = self._row[sequence.arrival], sequence.blocks[-1]
        self._tables[row, self._numbers[HELD, row]] = block
        self._numbers[SLOT, row] = block * self._block_tokens
        self._numbers[HELD, row] += 1
        self._stale = True

    def prepare(self) -> int:
        """Fill in the noise of each row's next token; gives the blocks of the longest table in use."""
        if self._stale:
            self._look()
        if not self._noise:
            numbers = self._numbers[:, : self.count]
            steps = np.arange(AHEAD)[:, None]
            self._noise = [*uniforms(numbers[KEY], numbers[LENGTH] + steps)[::-1]]
        self._reals[NOISE, : self.count] = self._noise.pop()
        return self._blocks

    def _look(self) -> None:
        """After a change of rows: how many tokens until one fills its blocks, until one ends, and the noise anew."""
        numbers = self._numbers[:, : self.count]
        self._to_full = int((numbers[HELD] * self._block_tokens - numbers[POSITION]).min())
        self._to_end = int((numbers[END] - numbers[LENGTH]).min())
        self._blocks = int(numbers[HELD].max())
        self._noise = []
        self.greedy = bool(self._reals[GREEDY, : self.count].any())
        self._stale = False

    def advance(self, sampled_2B: Int32) -> list[tuple[Sequence, StopReason]]:
        """Take a decode pass's tokens and the bits of their log-probabilities; gives who ended and why.

        Who ended still has a row. A log-probability that is not a number ends its sequence with ENGINE_ERROR.
        """
        numbers = self._numbers[:, : self.count]
        tokens_B, logprobs_B = sampled_2B[0], sampled_2B[1].view(np.float32)
        self._sampled[:, numbers[PLACE]] = sampled_2B
        numbers[TOKEN] = tokens_B
        numbers[POSITION : PLACE + 1] += 1
        self._to_full -= 1
        self._to_end -= 1
        stops = self._stops[:, : self.count] == tokens_B
        if self._to_end > 0 and not stops.any() and np.isfinite(logprobs_B).all():
            return []
        stopped: Bool = stops.any(0)
        sound = np.isfinite(logprobs_B)
        ended = stopped | ~sound | (numbers[LENGTH] >= numbers[END])
        return [(self.sequences[row], _reason(stopped[row], sound[row])) for row in ended.nonzero()[0]]

    def _set_stops(self, row: int, stops: Iterable[int]) -> None:
        wanted = list(stops)
        lacking = len(wanted) - len(self._stops)
        if lacking > 0:
            self._stops = np.pad(self._stops, ((0, lacking), (0, 0)), constant_values=-1)
        self._stops[:, row] = -1
        self._stops[: len(wanted), row] = wanted


def _reason(stopped: bool, sound: bool) -> StopReason:
    if not sound:
        return StopReason.ENGINE_ERROR
    return StopReason.STOP if stopped else StopReason.LENGTH
