"""The computing of a step: a prefill pass, block copies, a decode pass. The engine's only file that runs the model.

Takes what the scheduler planned and the decode rows, writes K/V (and experts) into the cache, gives sampled tokens.
Decides nothing. A decode pass reads nothing from the device but its result, has fixed-size inputs in fixed places and
one of a few batch sizes, as a CUDA graph needs it.

Shape letters: T tokens fed, B rows, Q tokens of the longest chunk, N blocks of a table, M MoE layers, K experts, L
positions of a sequence.
"""

import dataclasses
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from contraflow.config import Engine as EngineSection
from contraflow.dispatch.base import Phase
from contraflow.dispatch.local import LocalDispatch
from contraflow.model.attention import Attention, Plan
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder
from contraflow.model.moe import MoE
from contraflow.model.paged import paged_plan
from contraflow.model.router import RouterTape
from contraflow.model.sinks import Sight
from contraflow.rollout.rowcache import RowCache, RowPlan
from contraflow.rollout.rows import GREEDY, LENGTH, NOISE, POSITION, SCALE, SLOT, TOKEN, DecodeRows
from contraflow.rollout.sampling import sample
from contraflow.rollout.schedule import Chunk, Sequence
from contraflow.types import Int32, Int64, Routes


def bucket(count: int) -> int:
    """The batch size `count` rows are padded to: 1, 2, 4, then multiples of 8 to 64, of 16 to 128, of 32 to 256, ...

    That is 19 sizes up to 256.
    """
    if count <= 4:
        return 1 << (count - 1).bit_length()
    step = max(8, 1 << ((count - 1).bit_length() - 3))
    return -(-count // step) * step


class Passes:
    """A decoder with its paged cache, and beside each cached position the experts that computed it.

    Invariant: `cache`, `routes` and the decode inputs stay where they are; the last block of the cache is scratch, for
    padding rows to write to.
    """

    def __init__(self, decoder: Decoder, section: EngineSection, *, blocks: int) -> None:
        self.decoder = decoder
        config, self.device = decoder.config, next(decoder.parameters()).device
        attention = decoder.layers[0].attention
        if isinstance(attention, Attention):  # a tensor-parallel rank has its share of the heads, and caches those
            config = dataclasses.replace(config, heads=attention.heads, kv_heads=attention.kv_heads)
        self.cache = KVCache(
            config,
            blocks=blocks + 1,
            block_tokens=section.block_tokens,
            dtype=decoder.compute_dtype,
            device=self.device,
        )
        self.rows = DecodeRows(
            bucket(section.max_sequences),
            context_tokens=section.context_tokens,
            block_tokens=section.block_tokens,
            scratch=blocks,
            pinned=self.device.type == "cuda",
        )
        self._inputs = [
            host if self.device.type == "cpu" else host.to(self.device)
            for host in (self.rows.numbers, self.rows.tables, self.rows.reals)
        ]
        self._batches: dict[int, tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]] = {}
        mixtures = [module for module in decoder.modules() if isinstance(module, MoE)]
        if self.device.type != "cpu" and all(isinstance(mixture.dispatch, LocalDispatch) for mixture in mixtures):
            # The exact form reads a count on the host; the fixed form has a row for each pair, so none is lost.
            decoder.use_dispatch(LocalDispatch(config.experts, capacity=1 << 40))
        self._spread = [mixture.dispatch for mixture in mixtures if not isinstance(mixture.dispatch, LocalDispatch)]
        self.near: RowCache | None = None
        if self.device.type == "cpu" and section.max_sequences * section.context_tokens <= section.kv_tokens:
            # Every row could be full and it would still take no more memory than the cache and a layer.
            self.near = RowCache(self.cache, bucket(section.max_sequences), section.context_tokens)
        self.routes = self._route_store(section) if section.routes else None

    @torch.inference_mode()
    def prefill(self, chunks: Rows[Chunk]) -> None:
        """Compute and cache the K/V of all chunks in one pass over T = the sum of their tokens."""
        self.enter("prefill")
        block_tokens = self.cache.block_tokens
        ends = np.cumsum([chunk.end - chunk.start for chunk in chunks])
        positions_T = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        tokens_T = np.concatenate([chunk.sequence.tokens[chunk.start : chunk.end] for chunk in chunks])
        width = -(-max(chunk.end for chunk in chunks) // block_tokens)
        longest = max(chunk.end - chunk.start for chunk in chunks)
        tables_BN = np.full((len(chunks), width), self.cache.blocks - 1)
        queries_BQ = np.full((len(chunks), longest), -1)
        for row, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            held = chunk.sequence.blocks[:width]
            tables_BN[row, : len(held)] = held
            queries_BQ[row, : chunk.end - chunk.start] = np.arange(end - chunk.end + chunk.start, end)
        row_T = np.repeat(np.arange(len(chunks)), [chunk.end - chunk.start for chunk in chunks])
        slots_T = tables_BN[row_T, positions_T // block_tokens] * block_tokens + positions_T % block_tokens
        lengths_B = np.array([chunk.end for chunk in chunks])
        tokens, positions, tables, lengths, slots, queries = (
            torch.from_numpy(x.astype(np.int64)).to(self.device)
            for x in (tokens_T, positions_T, tables_BN, lengths_B, slots_T, queries_BQ)
        )
        self._forward(tokens, positions, paged_plan(self.cache, tables, lengths, slots, queries), slots)

    @torch.inference_mode()
    def idle(self, phase: Phase) -> None:
        """Take part, with no tokens, in a pass that other ranks have tokens for."""
        self.enter(phase)
        none_T = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.decoder(none_T, none_T, _Nobody())

    @torch.inference_mode()
    def copy(self, pairs: Rows[tuple[int, int]]) -> None:
        """Copy whole blocks, K/V and experts: all sources are read before any destination is written."""
        source, target = torch.tensor(pairs, dtype=torch.int64, device=self.device).T
        self.cache.pool.index_copy_(1, target, self.cache.pool.index_select(1, source))
        if self.routes is not None:
            self.routes.index_copy_(0, target, self.routes.index_select(0, source))

    @torch.inference_mode()
    def join(self, sequences: Rows[Sequence]) -> None:
        """Give sequences whose prefix is cached a row each."""
        if self.near is not None and sequences:
            self.near.fill(self.rows.count, [sequence.blocks for sequence in sequences])
        for sequence in sequences:
            self.rows.join(sequence)

    @torch.inference_mode()
    def leave(self, sequences: Rows[Sequence]) -> None:
        """Take these sequences' rows away; the blocks they filled then hold their K/V, if others may share it."""
        self._spill([sequence for sequence in sequences if sequence.pure])
        # Last row first: then only rows that stay are moved.
        for sequence in sorted(sequences, key=self.rows.row_of, reverse=True):
            row = self.rows.row_of(sequence)
            self.rows.leave(sequence)
            if self.near is not None and row < self.rows.count:
                self.near.move(self.rows.count, row, len(self.rows.sequences[row].blocks) * self.cache.block_tokens)

    def _spill(self, sequences: Rows[Sequence]) -> None:
        if self.near is None:
            return
        moves = [
            (self.rows.row_of(sequence), page, sequence.blocks[page])
            for sequence in sequences
            for page in range(*self.rows.filled(sequence))
        ]
        if moves:
            self.near.spill(*zip(*moves, strict=True))

    def enter(self, phase: Phase) -> None:
        """The pass that follows is of this phase, on all ranks: tokens may travel in another form."""
        for dispatch in self._spread:
            dispatch.enter(phase)

    def decode(self) -> Int32:
        """Feed each row's token and sample its next: `[2, B]` on the host, tokens and the bits of their logprobs."""
        self.enter("decode")
        rows, blocks = self.rows, self.rows.prepare()
        if self.device.type != "cpu":
            blocks = min(bucket(blocks), rows.tables.shape[1])
            for device, host in zip(self._inputs, (rows.numbers, rows.tables, rows.reals), strict=True):
                device.copy_(host, non_blocking=True)
        sampled: Int32 = self._decode(bucket(rows.count), blocks).cpu().numpy()
        return sampled[:, : rows.count]

    @torch.inference_mode()
    def _decode(self, rows: int, blocks: int) -> Tensor:
        """The part a CUDA graph can hold: as `decode`, for the first `rows` rows and on the device."""
        numbers_B, tables_BN, reals_B = self._views(rows)
        slots_B, lengths_B = numbers_B[SLOT], numbers_B[LENGTH]
        plan: Plan
        if self.near is None:
            plan = paged_plan(self.cache, tables_BN[:, :blocks], lengths_B, slots_B)
        else:
            plan = RowPlan(self.near, numbers_B[POSITION], lengths_B, blocks * self.cache.block_tokens)
        hidden_BD = self._forward(numbers_B[TOKEN], numbers_B[POSITION], plan, slots_B)
        tokens_B, logprobs_B = sample(
            self.decoder.logits(hidden_BD),
            scales_B=reals_B[SCALE],
            # On a device the kernels of a step are always the same; here two less are 12 of its 2000 us.
            greedy_B=reals_B[GREEDY] > 0 if self.rows.greedy or self.device.type != "cpu" else None,
            uniforms_B=reals_B[NOISE],
        )
        return torch.stack((tokens_B.to(torch.int32), logprobs_B.view(torch.int32)))

    def routes_of(self, sequences: Rows[Sequence]) -> list[Routes]:
        """Experts of every fed token of each sequence, `[L - 1, M, K]`, in one copy. They still hold their blocks."""
        if self.routes is None:
            raise ValueError("the engine was made without routes")
        slots = torch.from_numpy(np.concatenate([self._slots(sequence) for sequence in sequences]))
        read = self.routes.flatten(0, 1).index_select(0, slots.to(self.device)).cpu().numpy()
        if self.routes.dtype == torch.int16:
            read = read.view(np.uint16)
        return np.split(read, np.cumsum([sequence.cached for sequence in sequences])[:-1])

    def _forward(self, tokens_T: Tensor, positions_T: Tensor, plan: Plan, slots_T: Tensor) -> Tensor:
        if self.routes is None:
            return self.decoder(tokens_T, positions_T, plan)  # type: ignore[no-any-return]
        tape = RouterTape()
        hidden_TD: Tensor = self.decoder(tokens_T, positions_T, plan, tape=tape)
        self.routes.flatten(0, 1).index_copy_(0, slots_T, tape.routes().view(self.routes.dtype))
        return hidden_TD

    def _views(self, rows: int) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
        """The first `rows` rows of the decode inputs, field by field: made once a batch size, since nothing moves."""
        if rows not in self._batches:
            numbers, tables, reals = self._inputs
            self._batches[rows] = (numbers[:, :rows].unbind(), tables[:rows], reals[:, :rows].unbind())
        return self._batches[rows]

    def _slots(self, sequence: Sequence) -> Int64:
        positions_L = np.arange(sequence.cached)
        column, offset = np.divmod(positions_L, self.cache.block_tokens)
        slots: Int64 = np.array(sequence.blocks)[column] * self.cache.block_tokens + offset
        return slots

    def _route_store(self, section: EngineSection) -> Tensor | None:
        config = self.decoder.config
        if not config.experts:
            return None
        # torch can't index uint16 everywhere: the bits are kept as int16.
        dtype = torch.uint8 if config.experts <= 256 else torch.int16
        shape = (self.cache.blocks, section.block_tokens, len(config.moe_layers), config.top_k)
        return torch.zeros(shape, dtype=dtype, device=self.device)


class _Nobody:
    """The plan of a pass without tokens: nobody attends to anything."""

    def layer(self, index: int) -> "_Nobody":
        return self

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        return q_THd
