"""The decoding sequences as rows of preallocated tables, so that a step touches arrays and not sequences.

Takes sequences when they become ready, gives each decode pass its inputs and takes its outputs, which may come when the
next pass is already under way: all per-token work is a handful of numpy calls over all rows. Does not decide who
decodes (`schedule`) nor compute (`passes`).

Shape letters: R rows there are, B rows in use, N blocks of a table, W stop tokens of a request at most, C context.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from contraflow.rollout.sampling import stream_key, uniforms
from contraflow.rollout.schedule import Sequence
from contraflow.types import Bool, Float32, Int32, Int64, StopReason

# Rows of `numbers`. POSITION to PLACE go up by one with every token.
TOKEN, POSITION, LENGTH, SLOT, PLACE, HOME, KEY, END, HELD = range(9)
# Rows of `reals`.
SCALE, GREEDY, NOISE = range(3)
AHEAD = 16  # steps whose noise is hashed together: the dozen numpy calls cost the same for one
UNREAD = -1  # instead of a TOKEN that the host has not read: the device has it, by its HOME


@dataclass(frozen=True, slots=True)
class Leg:
    """The rows of one decode pass as they were: what is needed when its tokens come, whatever rows did meanwhile."""

    sequences: list[Sequence]
    arrivals_B: Int64
    homes_B: Int64
    places_B: Int64
    to_end: int  # tokens until the first of these ends by its length


class DecodeRows:
    """Rows `[0, count)` are the decoding sequences, packed; a row that leaves is filled with the last one.

    Tensors in host memory, their storage fixed: `numbers` int64 `[9, R]`: the TOKEN to feed or UNREAD, its POSITION,
    the LENGTH with it, the cache SLOT of its K/V, the PLACE its successor is noted at, the HOME of its sequence, the
    noise KEY, the length at the END, the blocks HELD. `tables` int64 `[R, N]`. `reals` fp32 `[3, R]`: SCALE
    1/temperature, GREEDY 1 or 0, NOISE in [0, 1).

    A pass is `prepare`, `depart` and, with its tokens, `land`. With `ahead` the next may depart before this one lands:
    rows are then ahead of what is known. A sequence has a home from `join` to `leave`, and a row until `part`.

    Invariant: rows from `count` on are padding: length 0, writing to the scratch block, home R. A sequence's own
    `tokens`, `length` and `cached` are as when it joined while it has a home, and right again after `leave`.
    """

    def __init__(self, rows: int, *, context_tokens: int, block_tokens: int, scratch: int, ahead: bool = False) -> None:
        width = -(-context_tokens // block_tokens)
        self.numbers = torch.zeros((9, rows), dtype=torch.int64)
        self.tables = torch.full((rows, width), scratch, dtype=torch.int64)
        self.reals = torch.ones((3, rows), dtype=torch.float32)
        self.reals[NOISE] = 0
        self.sequences: list[Sequence] = []
        self._ahead = ahead
        self._numbers: Int64 = self.numbers.numpy()
        self._tables: Int64 = self.tables.numpy()
        self._reals: Float32 = self.reals.numpy()
        # By home, which a sequence keeps when rows move: whose it is, tokens that landed since, stops and samples
        # (tokens and bits of log-probabilities in C places).
        self._arrivals: Int64 = np.full(rows, -1)
        self._landed: Int64 = np.zeros(rows, np.int64)
        self._stops: Int64 = np.full((1, rows), -1, np.int64)  # [W, R]
        self._sampled: Int32 = np.zeros((2, rows * context_tokens), np.int32)
        self._context_tokens = context_tokens
        self._homes = [*range(rows)]  # that are free
        self._home: dict[int, int] = {}  # arrival -> home
        self._row: dict[int, int] = {}  # arrival -> row
        self._block_tokens = block_tokens
        self._scratch = scratch
        # What is known of the steps to come until a row changes hands or grows: see `_look`.
        self._stale = True
        self._to_full = self._to_end = 0
        self._noise: list[Float32] = []
        self.blocks = 0  # of the longest table in use, at the last `prepare`
        self.greedy = False  # whether any row is, at the last `prepare`
        self._clear(slice(None))

    @property
    def count(self) -> int:
        return len(self.sequences)

    def has(self, sequence: Sequence) -> bool:
        """Whether it joined and has not left."""
        return sequence.arrival in self._home

    def join(self, sequence: Sequence) -> None:
        """Give a sequence that has K/V for all tokens but the last a home and a row."""
        row, length, request, blocks = self.count, sequence.length, sequence.request, sequence.blocks
        home = self._home[sequence.arrival] = self._homes.pop()
        slot = blocks[-1] * self._block_tokens + (length - 1) % self._block_tokens
        self._numbers[:, row] = (
            *(sequence.tokens[length - 1], length - 1, length, slot, home * self._context_tokens, home),
            *(stream_key(request.seed), sequence.prompt + sequence.limit, len(blocks)),
        )
        self._tables[row, : len(blocks)] = blocks
        self._reals[: GREEDY + 1, row] = (1 / request.temperature, 0) if request.temperature else (1, 1)
        self._arrivals[home], self._landed[home] = sequence.arrival, 0
        self._set_stops(home, request.stop_tokens)
        self.sequences.append(sequence)
        self._row[sequence.arrival] = row
        self._stale = True

    def row_of(self, sequence: Sequence) -> int:
        return self._row[sequence.arrival]

    def part(self, sequence: Sequence) -> None:
        """Give a sequence's row away: to the sequence of the last row, if any. Nothing if it has none."""
        row, last = self._row.pop(sequence.arrival, None), self.count - 1
        if row is None:
            return
        self._stale = True
        moved = self.sequences.pop()
        if row != last:
            for table in (self._numbers.T, self._tables, self._reals.T):
                table[row] = table[last]
            self.sequences[row] = moved
            self._row[moved.arrival] = row
        self._clear(slice(last, last + 1))

    def leave(self, sequence: Sequence) -> None:
        """Write the tokens that landed back into the sequence, and give its row and home away."""
        self.part(sequence)
        home = self._home.pop(sequence.arrival)
        first, old = home * self._context_tokens, sequence.length
        new = old + int(self._landed[home])
        tokens, bits = self._sampled[:, first : first + new - old]
        sequence.tokens[old:new] = tokens
        sequence.logprobs[old - sequence.prompt : new - sequence.prompt] = bits.view(np.float32)
        sequence.length, sequence.cached = new, new - 1
        self._arrivals[home] = -1
        self._homes.append(home)

    def sampled(self, sequence: Sequence) -> int:
        """New tokens a sequence has now, whether it has a home or not; those that have not landed do not count."""
        home = self._home.get(sequence.arrival)
        return sequence.length - sequence.prompt + (0 if home is None else int(self._landed[home]))

    def closing(self) -> list[Sequence]:
        """Sequences with a row whose last token is under way: there is nothing more to feed."""
        if not self._stale and self._to_end > 0:
            return []
        n = self.count
        rows = (self._numbers[LENGTH, :n] >= self._numbers[END, :n]).nonzero()[0]
        return [self.sequences[row] for row in rows]

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

    def prepare(self) -> None:
        """Fill in the noise of each row's next token, and look at what the rows are like: `blocks`, `greedy`."""
        if self._stale:
            self._look()
        if not self._noise:
            numbers = self._numbers[:, : self.count]
            steps = np.arange(AHEAD)[:, None]
            self._noise = [*uniforms(numbers[KEY], numbers[LENGTH] + steps)[::-1]]
        self._reals[NOISE, : self.count] = self._noise.pop()

    def _look(self) -> None:
        """After a change of rows: how many tokens until one fills its blocks, until one ends, and the noise anew."""
        numbers = self._numbers[:, : self.count]
        self._to_full = int((numbers[HELD] * self._block_tokens - numbers[POSITION]).min())
        self._to_end = int((numbers[END] - numbers[LENGTH]).min())
        self.blocks = int(numbers[HELD].max())
        self._noise = []
        self.greedy = bool(self._reals[GREEDY, : self.count].any())
        self._stale = False

    def depart(self) -> Leg:
        """A pass over these rows is under way: from here on they are those of the one after."""
        numbers = self._numbers[:, : self.count]
        homes_B = numbers[HOME].copy()
        self._to_full -= 1
        self._to_end -= 1
        leg = Leg(self.sequences.copy(), self._arrivals.take(homes_B), homes_B, numbers[PLACE].copy(), self._to_end)
        numbers[TOKEN] = UNREAD
        numbers[POSITION : PLACE + 1] += 1
        return leg

    def land(self, leg: Leg, sampled_2B: Int32) -> tuple[int, list[tuple[Sequence, StopReason]]]:
        """Take a pass's tokens and the bits of their log-probabilities; gives how many count, and who ended and why.

        Tokens of sequences that left meanwhile do not count. Who ended still has a home. A log-probability that is not
        a number ends its sequence with ENGINE_ERROR.
        """
        tokens_B, logprobs_B = sampled_2B[0], sampled_2B[1].view(np.float32)
        homes_B = leg.homes_B
        here_B: Bool = self._arrivals.take(homes_B) == leg.arrivals_B
        self._sampled[:, leg.places_B] = sampled_2B
        self._landed[homes_B] += here_B
        if not self._ahead:  # rows are as they were
            self._numbers[TOKEN, : len(tokens_B)] = tokens_B
        count = int(np.count_nonzero(here_B))
        stops = self._stops.take(homes_B, axis=1) == tokens_B
        if leg.to_end > 0 and not stops.any() and np.isfinite(logprobs_B).all():
            return count, []
        stopped: Bool = stops.any(0)
        sound = np.isfinite(logprobs_B)
        ended = here_B & (stopped | ~sound | self._full(leg))
        return count, [(leg.sequences[row], _reason(stopped[row], sound[row])) for row in ended.nonzero()[0]]

    def _full(self, leg: Leg) -> Bool:
        """Whose landed tokens are all that were asked for."""
        goals = [sequence.prompt + sequence.limit - sequence.length for sequence in leg.sequences]
        return self._landed.take(leg.homes_B) >= np.array(goals)

    def _clear(self, rows: slice) -> None:
        """Make these rows padding."""
        self._tables[rows] = self._scratch
        self._numbers[:, rows] = 0
        self._numbers[SLOT, rows] = self._scratch * self._block_tokens
        self._numbers[HOME, rows] = len(self._arrivals)

    def _set_stops(self, home: int, stops: Iterable[int]) -> None:
        wanted = list(stops)
        lacking = len(wanted) - len(self._stops)
        if lacking > 0:
            self._stops = np.pad(self._stops, ((0, lacking), (0, 0)), constant_values=-1)
        self._stops[:, home] = -1
        self._stops[: len(wanted), home] = wanted


def _reason(stopped: bool, sound: bool) -> StopReason:
    if not sound:
        return StopReason.ENGINE_ERROR
    return StopReason.STOP if stopped else StopReason.LENGTH
