"""Who owns which block of the KV cache, and which blocks already hold a given prefix.

Takes counts and token ids, gives block numbers. Pure Python: knows no tensor, no model and no policy of who comes
first. A block is `block_tokens` consecutive positions of one sequence; blocks are shared by reference counts.
"""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from contraflow.types import Int32, Version


class Match(NamedTuple):
    """What of a prefix is already in the cache: whole blocks in order, and a block that starts with the short rest."""

    blocks: list[int]
    tail: int | None  # to be copied, not shared: its owner writes on behind the rest


class _Entry(NamedTuple):
    block: int
    node: int  # names this prefix as the parent of longer ones; never reused


_Key = tuple[Version | int | None, bytes]  # (parent: a version at the root, else a node; token ids of one block)


class BlockPool:
    """`blocks` blocks of `block_tokens` tokens, handed out, shared, and remembered by what they hold.

    Invariant: every block is in exactly one of three states: held (references > 0), idle (no reference, contents still
    indexed, reused oldest first) or free. `held + idle + free == blocks`. An index entry names only a block whose
    contents have not been given to anybody else since they were published. Prefixes are compared token by token
    (chained keys, no bare hashes), below a root that is the version of the weights that computed them.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool of {blocks} blocks of {block_tokens} tokens: both must be at least 1")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}  # ordered: the first is the next to be reused
        self._index: dict[_Key, _Entry] = {}
        self._keys: dict[int, list[_Key]] = {}  # of a block; a block can hold a short prefix and later a whole one
        self._nodes = count()

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> list[int]:
        """Blocks that somebody holds, in order."""
        return [block for block, references in enumerate(self._references) if references]

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for writing, each with one reference. Raises ValueError if fewer are available."""
        if count > self.available:
            raise ValueError(f"{count} blocks asked of a pool with {self.available} available")
        return [self._take() for _ in range(count)]

    def hold(self, blocks: Sequence[int]) -> None:
        """Add one reference to each; an idle block comes back to life with its contents."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each, last block first, so that a prefix outlives what was built on it."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._retire(block)

    def match(self, version: Version | None, tokens: Int32) -> Match:
        """The longest indexed prefix of `tokens` `[P]`: whole blocks, then a tail if only the short rest is left.

        References are not changed: `hold` what is used before the next `allocate`.
        """
        chunks = self._chunks(tokens)
        parent: Version | int | None = version
        blocks: list[int] = []
        for chunk in chunks:
            entry = self._index.get((parent, chunk))
            if entry is None:
                return Match(blocks, None)
            if len(chunk) < self._chunk_bytes:
                return Match(blocks, entry.block)
            blocks.append(entry.block)
            parent = entry.node
        return Match(blocks, None)

    def publish(self, version: Version | None, tokens: Int32, blocks: Sequence[int], *, tail: bool) -> None:
        """Index what `blocks` hold: the K/V of `tokens` `[P]` under `version`; the short rest too if `tail`.

        The caller holds the blocks. Where a prefix is already indexed the first copy stays.
        """
        parent: Version | int | None = version
        for chunk, block in zip(self._chunks(tokens), blocks, strict=False):
            if len(chunk) < self._chunk_bytes and not tail:
                return
            key = (parent, chunk)
            entry = self._index.get(key)
            if entry is None:
                entry = self._index[key] = _Entry(block, next(self._nodes))
                self._keys.setdefault(block, []).append(key)
            parent = entry.node

    def forget(self) -> None:
        """Drop every index entry: idle blocks become free, held ones stay held."""
        self._index.clear()
        self._keys.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    @property
    def _chunk_bytes(self) -> int:
        return 4 * self.block_tokens

    def _chunks(self, tokens: Int32) -> list[bytes]:
        data = tokens.tobytes()
        return [data[start : start + self._chunk_bytes] for start in range(0, len(data), self._chunk_bytes)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            for key in self._keys.pop(block, ()):
                del self._index[key]
        self._references[block] = 1
        return block

    def _retire(self, block: int) -> None:
        if block in self._keys:
            self._idle[block] = None
        else:
            self._free.append(block)
