"""The computing of a step: a prefill pass, block copies, a decode pass. The engine's only file that runs the model.

Takes what the scheduler planned and the decode rows, writes K/V (and experts) into the cache, gives what will have been
sampled. Decides nothing. No pass waits for the device; a decode pass has fixed-size inputs in fixed places and one of a
few batch sizes, so that it can be a CUDA graph.

Shape letters: T tokens fed, B rows, R rows there are, Q tokens of the longest chunk, N blocks of a table, M MoE layers,
K experts, L positions of a sequence, V vocabulary, D width.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from contraflow.config import Engine as EngineSection
from contraflow.dispatch.base import Phase
from contraflow.dispatch.local import LocalDispatch
from contraflow.model.attention import FLASH_DTYPES, Attention, Plan
from contraflow.model.cache import KVCache
from contraflow.model.decoder import Decoder
from contraflow.model.invariant import open_invariant
from contraflow.model.kernels_cpu import built
from contraflow.model.moe import MoE
from contraflow.model.paged import KernelPlan, Kernels, paged_plan
from contraflow.model.router import RouterTape
from contraflow.model.sinks import Sight
from contraflow.model.splithead import halves, split_logits
from contraflow.rollout.exchange import Exchange
from contraflow.rollout.graphs import Capture, Graphs
from contraflow.rollout.routestore import RouteStore
from contraflow.rollout.rowcache import RowCache, RowPlan
from contraflow.rollout.rows import (
    GREEDY,
    HOME,
    LENGTH,
    NOISE,
    POSITION,
    SCALE,
    SLOT,
    TOKEN,
    UNREAD,
    DecodeRows,
    Leg,
)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A decode pass under way. `sampled` waits for it: int32 `[2, B]`, tokens and the bits of their logprobs."""

    leg: Leg
    sampled: Callable[[], Int32]


class Passes:
    """A decoder with its paged cache, and beside each cached position the experts that computed it.

    Invariant: `cache`, `routes` and the decode inputs stay where they are; the last block of the cache is scratch, for
    padding rows to write to. With `ahead`, a decode pass finds the tokens to feed where the one before left them.
    """

    def __init__(self, decoder: Decoder, section: EngineSection, *, blocks: int, alone: bool = True) -> None:
        """`alone`: no other rank takes part in passes, so none depends on what a host reads between."""
        self.decoder = decoder
        config, self.device = decoder.config, next(decoder.parameters()).device
        attention = decoder.layers[0].attention
        if isinstance(attention, Attention):  # a tensor-parallel rank has its share of the heads, and caches those
            config = dataclasses.replace(config, heads=attention.heads, kv_heads=attention.kv_heads)
        self._sample = sample
        self._invariant = open_invariant(config) if section.bitwise else None
        if self._invariant is not None:
            decoder.compute_with(self._invariant)
            self._sample = self._invariant.sample
        cuda = self.device.type == "cuda"
        self.ahead = alone and (section.lookahead == "on" or (section.lookahead == "auto" and cuda))
        self.cache = KVCache(
            config,
            blocks=blocks + 1,
            block_tokens=section.block_tokens,
            dtype=decoder.compute_dtype,
            device=self.device,
        )
        rows = bucket(section.max_sequences)
        self.rows = DecodeRows(
            rows,
            context_tokens=section.context_tokens,
            block_tokens=section.block_tokens,
            scratch=blocks,
            ahead=self.ahead,
        )
        host = (self.rows.numbers, self.rows.tables, self.rows.reals)
        self._exchange = Exchange(host, rows, self.device, passes=1 + self.ahead)
        self._newest_H = torch.zeros(rows + 1, dtype=torch.int64, device=self.device)  # token of each home
        self._batches: dict[int, tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]] = {}
        mixtures = [module for module in decoder.modules() if isinstance(module, MoE)]
        if cuda and mixtures and all(isinstance(mixture.dispatch, LocalDispatch) for mixture in mixtures):
            # The exact form reads a count on the host; the fixed form has a row for each pair, so none is lost.
            decoder.use_dispatch(LocalDispatch(config.experts, capacity=1 << 40))
        self._spread = [mixture.dispatch for mixture in mixtures if not isinstance(mixture.dispatch, LocalDispatch)]
        self.near: RowCache | None = None
        self._kernels, self._without = self._c_kernels(section)
        for mixture in mixtures:
            mixture.kernels = self._kernels
        paged = cuda or self.ahead or self._kernels is not None
        if not paged and section.max_sequences * section.context_tokens <= section.kv_tokens:
            # Every row could be full and it would still take no more memory than the cache and a layer.
            self.near = RowCache(self.cache, bucket(section.max_sequences), section.context_tokens)
        self.routes = RouteStore(decoder.config, self.cache) if section.routes and decoder.config.experts else None
        self._halves_V2D = halves(decoder.head) if cuda and decoder.compute_dtype == torch.bfloat16 else None
        half = decoder.compute_dtype in FLASH_DTYPES  # torch's grouped matmul reads its offsets on the host in fp32
        capturable = alone and not self._spread and (half or not mixtures)
        self._captures = cuda and capturable and section.graphs == "auto"
        self.graphs = self._new_graphs()

    @property
    def told(self) -> str:
        """How decode passes run, for people."""
        how = "eager" if self.graphs is None else self.graphs.told
        kernels = "; kernels in C" if self._kernels is not None else ""
        if self._invariant is not None:
            kernels = "; bitwise: batch-invariant kernels in C"
        if self._without:
            kernels = f"; no kernels in C: {self._without}"
        return f"{how}; {'one ahead of the tokens read' if self.ahead else 'one by one'}{kernels}"

    @torch.inference_mode()
    def refresh(self) -> None:
        """The weights changed, in place: so does, in place, what is made from them."""
        if self._halves_V2D is not None:
            storage = self._halves_V2D.untyped_storage()
            if not storage.nbytes():  # given away by `rest`; asked for again it would move, and graphs hold its address
                storage.resize_(self._halves_V2D.numel() * self._halves_V2D.itemsize)
            halves(self.decoder.head, self._halves_V2D)

    def forget(self) -> None:
        """Nothing is in use: let what passes see of their past be as at the beginning.

        Padding rows see what rows before them left, and go to experts by it: whose batches then are of other sizes.
        """
        self.cache.pool.zero_()
        if self.near is not None:
            self.near.forget()

    def rest(self) -> int:
        """Weights and cache will lie elsewhere: drop what holds their addresses, and until `refresh` what is made
        from weights. No pass may be under way. Gives the bytes freed, those of graphs not counted.
        """
        self.graphs = self._new_graphs()
        if self._halves_V2D is None:
            return 0
        freed = self._halves_V2D.untyped_storage().nbytes()
        self._halves_V2D.untyped_storage().resize_(0)
        return freed

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
            self._there(x.astype(np.int64)) for x in (tokens_T, positions_T, tables_BN, lengths_B, slots_T, queries_BQ)
        )
        plan: Plan
        if self._invariant is not None:
            plan = KernelPlan(self.cache, tables, lengths, slots, queries, self._kernels)
        else:
            plan = paged_plan(self.cache, tables, lengths, slots, queries)
        self._forward(tokens, positions, plan, slots)

    @torch.inference_mode()
    def idle(self, phase: Phase) -> None:
        """Take part, with no tokens, in a pass that other ranks have tokens for."""
        self.enter(phase)
        none_T = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.decoder(none_T, none_T, _Nobody())

    @torch.inference_mode()
    def copy(self, pairs: Rows[tuple[int, int]]) -> None:
        """Copy whole blocks, K/V and experts: all sources are read before any destination is written."""
        source, target = self._there(np.array(pairs, np.int64).T.copy()).unbind()
        self.cache.pool.index_copy_(1, target, self.cache.pool.index_select(1, source))
        if self.routes is not None:
            self.routes.copy(source, target)

    @torch.inference_mode()
    def wipe(self, blocks: Rows[int]) -> None:
        """Zero these blocks. Attention may weigh what stands behind a sequence by 0, which numbers must survive."""
        if blocks:
            self.cache.pool.index_fill_(1, self._there(np.array(blocks, np.int64)), 0)

    @torch.inference_mode()
    def wipe_rows(self, sequences: Rows[Sequence]) -> None:
        """The same of the sequences' rows, where rows are kept beside the blocks."""
        if self.near is not None:
            for sequence in sequences:
                self.near.store[:, :, self.rows.row_of(sequence)] = 0

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
        if self.near is None:
            for sequence in sequences:
                self.rows.leave(sequence)
            return
        self._spill(self.near, [sequence for sequence in sequences if sequence.pure])
        # Last row first: then only rows that stay are moved.
        for sequence in sorted(sequences, key=self.rows.row_of, reverse=True):
            row = self.rows.row_of(sequence)
            self.rows.leave(sequence)
            if row < self.rows.count:
                self.near.move(self.rows.count, row, len(self.rows.sequences[row].blocks) * self.cache.block_tokens)

    def _spill(self, near: RowCache, sequences: Rows[Sequence]) -> None:
        moves = [
            (self.rows.row_of(sequence), page, sequence.blocks[page])
            for sequence in sequences
            for page in range(*self.rows.filled(sequence))
        ]
        if moves:
            near.spill(*zip(*moves, strict=True))

    def enter(self, phase: Phase) -> None:
        """The pass that follows is of this phase, on all ranks: tokens may travel in another form."""
        for dispatch in self._spread:
            dispatch.enter(phase)

    def launch(self) -> Launched:
        """Begin to feed each row's token and to sample its next."""
        self.enter("decode")
        self.rows.prepare()
        count = self.rows.count
        self._exchange.send()
        (self._decode if self.graphs is None else self.graphs.run)(bucket(count))
        samples = self._exchange.receive()
        return Launched(self.rows.depart(), lambda: samples()[:, :count])

    @torch.inference_mode()
    def _decode(self, rows: int) -> None:
        """The part a CUDA graph can hold: as `launch`, for the first `rows` rows, on the device."""
        numbers_B, tables_BN, reals_B = self._views(rows)
        tokens_B, slots_B, lengths_B, homes_B = (numbers_B[i] for i in (TOKEN, SLOT, LENGTH, HOME))
        if self.ahead:
            tokens_B = torch.where(tokens_B == UNREAD, self._newest_H.index_select(0, homes_B), tokens_B)
        plan: Plan
        if self._kernels is not None:
            plan = KernelPlan(self.cache, tables_BN[:, : self._width()], lengths_B, slots_B, kernels=self._kernels)
        elif self.near is None:
            plan = paged_plan(self.cache, tables_BN[:, : self._width()], lengths_B, slots_B)
        else:
            plan = RowPlan(self.near, numbers_B[POSITION], lengths_B, self._width() * self.cache.block_tokens)
        hidden_BD = self._forward(tokens_B, numbers_B[POSITION], plan, slots_B)
        tokens_B, logprobs_B = self._sample(
            self._logits(hidden_BD),
            scales_B=reals_B[SCALE],
            # On a device the kernels of a step are always the same; here two less are 12 of its 2000 us.
            greedy_B=reals_B[GREEDY] > 0 if self.rows.greedy or self.device.type != "cpu" else None,
            uniforms_B=reals_B[NOISE],
        )
        if self.ahead:
            self._newest_H.index_copy_(0, homes_B, tokens_B)
        samples_2B = self._exchange.samples[:, :rows]
        samples_2B[0] = tokens_B
        samples_2B[1] = logprobs_B.view(torch.int32)

    def _width(self) -> int:
        """Blocks of a table that attention is shown: on a GPU all, where kernels go by lengths, and sizes are few."""
        return self.rows.blocks if self.device.type == "cpu" else self.rows.tables.shape[1]

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 `[B, V]`: on a GPU by bf16 matrix units, as `splithead` says, where hidden states are in bf16."""
        if self._halves_V2D is None:
            return self.decoder.logits(hidden_BD)
        return split_logits(hidden_BD, self._halves_V2D)

    def routes_of(self, sequences: Rows[Sequence]) -> list[Routes]:
        """Experts of every fed token of each sequence, `[L - 1, M, K]`, in one copy. They still hold their blocks."""
        if self.routes is None:
            raise ValueError("the engine was made without routes")
        return self.routes.read([self._slots(sequence) for sequence in sequences])

    def _forward(self, tokens_T: Tensor, positions_T: Tensor, plan: Plan, slots_T: Tensor) -> Tensor:
        if self.routes is None:
            return self.decoder(tokens_T, positions_T, plan)  # type: ignore[no-any-return]
        tape = RouterTape()
        hidden_TD: Tensor = self.decoder(tokens_T, positions_T, plan, tape=tape)
        self.routes.write(slots_T, tape)
        return hidden_TD

    def _c_kernels(self, section: EngineSection) -> tuple[Kernels | None, str]:
        """Kernels for decoding on a CPU; or why there are none, for people, "" where none are wanted."""
        if self._invariant is not None:
            return self._invariant.kernels.paging, ""
        if self.device.type != "cpu" or section.kernels == "off":
            return None, ""
        if self.cache.pool.dtype != torch.float32:
            return None, f"they are for fp32, not {self.cache.pool.dtype}"
        if torch.get_num_threads() > 1:
            return None, f"they are for one thread, torch has {torch.get_num_threads()}"
        kernels = built()
        return (None, kernels) if isinstance(kernels, str) else (kernels, "")

    def _new_graphs(self) -> Graphs | None:
        if not self._captures:
            return None
        capture = Capture(self.device)
        return Graphs(self._decode, rows=self.rows.numbers.shape[1], capture=capture, free=capture.free)

    def _there(self, array: Int64) -> Tensor:
        """The array on the device; the host does not wait until it is there."""
        here = torch.from_numpy(array)
        return here if self.device.type == "cpu" else here.pin_memory().to(self.device, non_blocking=True)

    def _views(self, rows: int) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
        """The first `rows` rows of the decode inputs, field by field: made once a batch size, since nothing moves."""
        if rows not in self._batches:
            numbers, tables, reals = self._exchange.inputs
            self._batches[rows] = (numbers[:, :rows].unbind(), tables[:rows], reals[:, :rows].unbind())
        return self._batches[rows]

    def _slots(self, sequence: Sequence) -> Int64:
        positions_L = np.arange(sequence.cached)
        column, offset = np.divmod(positions_L, self.cache.block_tokens)
        slots: Int64 = np.array(sequence.blocks)[column] * self.cache.block_tokens + offset
        return slots


class _Nobody:
    """The plan of a pass without tokens: nobody attends to anything."""

    def layer(self, index: int) -> "_Nobody":
        return self

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: Sight | None = None) -> Tensor:
        return q_THd
