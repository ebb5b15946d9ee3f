"""Per-slot state on the device, and the tensors of one step made from it and a plan's deltas.

Owned by runner.py. `SlotState.apply` uploads what a plan changed, in one transfer; `assemble` and `advance` are device
operations alone. Plans carry no token id or position of a decode: those live here, and the next plan can be launched
before this one's tokens are read. graphs.py reads and writes the same state from captured steps.

The last slot is the padding slot: its block table points at the scratch block and its draws go nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.plan import StepPlan
from aserve.worker.staging import Staging
from aserve_kernels import AttentionMeta, SamplingRows

_INT_FIELDS = ("prompt_len", "seed", "choice", "top_k")
_FLOAT_FIELDS = ("temperature", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """Which sampling options any draw of a step uses; the rest cost nothing."""

    all_greedy: bool = True
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False


@dataclass(slots=True)
class StepBatch:
    """A plan's rows as device tensors. D decodes, K chunks with C tokens in all."""

    decodes: Tensor  # int64 [D]: slots
    chunk_tokens: Tensor  # int64 [C]
    chunk_positions: Tensor  # int64 [C]
    chunk_token_slots: Tensor  # int64 [C]
    chunk_slots: Tensor  # int64 [K]
    chunk_ends: Tensor  # int64 [K]: the row's context after the chunk
    query_starts: Tensor  # int32 [D + K + 1]
    num_decodes: int
    max_query_len: int
    max_seq_len: int


@dataclass(slots=True)
class Draws:
    """A plan's S draws as device tensors, int64 [S] each. `output_index` is the host's copy of the token's index."""

    slots: Tensor
    rows: Tensor  # the token whose hidden state each reads
    ends: Tensor  # each one's context, which is its next position
    output_index: list[int]


class SlotState:
    """What the device remembers of each sequence between steps."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        vocab_size: int,
        scratch_block: int,
        device: torch.device,
        staging: Staging,
    ) -> None:
        num_slots = max_num_seqs + 1
        self.padding_slot = max_num_seqs
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.device = device
        self.staging = staging
        self.max_blocks = max_blocks

        def ints(fill: int = 0) -> Tensor:
            return torch.full((num_slots,), fill, dtype=torch.int64, device=device)

        def floats(fill: float) -> Tensor:
            return torch.full((num_slots,), fill, dtype=torch.float32, device=device)

        self.last_token, self.position = ints(), ints()  # position: where last_token will be computed
        self.prompt_len, self.seed, self.choice, self.top_k = ints(), ints(), ints(), ints(vocab_size)
        self.temperature, self.top_p, self.min_p = floats(0.0), floats(1.0), floats(0.0)
        self.block_table = torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device)
        self.block_table[self.padding_slot] = scratch_block
        # Host mirrors. Positions do not depend on what is drawn, so the host knows them without reading back.
        self.host_position = np.zeros(num_slots, dtype=np.int64)
        self.host_prompt_len = np.zeros(num_slots, dtype=np.int64)
        self.host_options = np.zeros((num_slots, 4), dtype=bool)  # samples, top_k, top_p, min_p
        self._batch: tuple[tuple[int, ...], StepBatch] | None = None  # of the last plan that had decodes alone
        self._rows: tuple[tuple[int, ...], SamplingRows] | None = None  # of the last draws

    def apply(self, plan: StepPlan) -> StepBatch:
        """Uploads the plan's slot updates, block deltas and rows in one transfer; writes the first two."""
        batch = None if plan.chunks else self._same_decodes(plan.decodes)
        pack = _Pack()
        rows = self._pack_rows(pack, plan) if batch is None else None
        device = self.update(plan, pack)
        if rows is not None:
            assert device is not None
            batch = self._batch_of(plan, device, rows)
        assert batch is not None
        return batch

    def update(self, plan: StepPlan, pack: _Pack | None = None) -> Tensor | None:
        """Writes the plan's slot updates and block deltas; `pack` may hold more for the same transfer, which is
        returned. graphs.py uploads rows by itself."""
        pack = pack or _Pack()
        self.forget_rows(plan)
        slots, blocks = ([pack.add(column) for column in columns] for columns in self.updates_of(plan))
        if not pack.size:
            return None
        device = self._upload(pack)
        if plan.slots:
            self._write_slots(device, slots)
        if plan.blocks:
            self.block_table.view(-1).index_copy_(0, device[blocks[0]], device[blocks[1]].to(torch.int32))
        return device

    def forget_rows(self, plan: StepPlan) -> None:
        """The plan's slot updates make kept sampling rows stale."""
        if plan.slots:
            self._rows = None

    def reset(self) -> None:
        """Forgets what was kept from the last plan: after a failed step."""
        self._batch = self._rows = None

    def assemble(self, batch: StepBatch) -> tuple[Tensor, AttentionMeta]:
        """Token ids int64 [T] and where they go. Device operations only."""
        decodes = batch.decodes
        ids, positions, slots, row_slots = self.last_token[decodes], self.position[decodes], decodes, decodes
        seq_lens = positions + 1
        if batch.chunk_slots.shape[0]:
            ids = torch.cat((ids, batch.chunk_tokens))
            positions = torch.cat((positions, batch.chunk_positions))
            slots = torch.cat((slots, batch.chunk_token_slots))
            row_slots = torch.cat((row_slots, batch.chunk_slots))
            seq_lens = torch.cat((seq_lens, batch.chunk_ends))
        page = positions // self.block_size
        blocks = self.block_table.view(-1)[slots * self.max_blocks + page]
        meta = AttentionMeta(
            num_decodes=batch.num_decodes,
            positions=positions,
            slot_mapping=(positions - page * self.block_size).add_(blocks, alpha=self.block_size),
            query_starts=batch.query_starts,
            seq_lens=seq_lens.to(torch.int32),
            block_tables=self.block_table.index_select(0, row_slots),
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        return ids, meta

    def host_draws(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Of each draw, in the plan's order: the token whose hidden state it reads, and where its context ends."""
        count = at = token = len(plan.decodes)
        size = count + sum([len(chunk.draws) for chunk in plan.chunks])
        rows, ends = np.arange(size, dtype=np.int64), np.empty(size, dtype=np.int64)
        ends[:count] = self.host_position[list(plan.decodes)] + 1
        for chunk in plan.chunks:
            token += len(chunk.tokens)
            last = at + len(chunk.draws)
            rows[at:last] = token - 1
            ends[at:last] = chunk.start + len(chunk.tokens)
            at = last
        return rows, ends

    def draws_of(self, plan: StepPlan) -> Draws:
        """The plan's draws, uploaded. Call before `advance_host`."""
        draws = plan.draws
        rows, ends = self.host_draws(plan)
        pack = _Pack()
        parts = [pack.add(array) for array in (np.array(draws, dtype=np.int64), rows, ends)]
        device = self._upload(pack)
        slots, at, limits = (device[part] for part in parts)
        return Draws(slots, at, limits, (ends - self.host_prompt_len[list(draws)]).tolist())

    def sampling_rows(self, draws: tuple[int, ...], where: Draws) -> SamplingRows:
        """Parameters of the step's draws; gathered anew only when draws or slots changed."""
        if self._rows is None or self._rows[0] != draws:
            self._rows = (draws, self._gather_rows(where.slots, self.draw_options(draws)))
        rows = self._rows[1]
        if not rows.all_greedy:
            rows.output_index = where.ends - self.prompt_len[where.slots]
        return rows

    def _gather_rows(self, slots: Tensor, options: DrawOptions) -> SamplingRows:
        temperature = self.temperature[slots]
        if options.all_greedy:
            return SamplingRows(temperature, slots, slots, slots, all_greedy=True)
        return SamplingRows(
            temperature=temperature,
            seeds=self.seed[slots],
            choices=self.choice[slots],
            output_index=slots,
            top_k=self.top_k[slots] if options.top_k else None,
            top_p=self.top_p[slots] if options.top_p else None,
            min_p=self.min_p[slots] if options.min_p else None,
        )

    def advance(self, where: Draws, tokens: Tensor) -> None:
        """Makes the drawn tokens the slots' last ones."""
        self.last_token.index_copy_(0, where.slots, tokens)
        self.position.index_copy_(0, where.slots, where.ends)

    def advance_host(self, plan: StepPlan) -> None:
        """The host's side of `advance`."""
        if plan.decodes:
            self.host_position[list(plan.decodes)] += 1
        for chunk in plan.chunks:
            if chunk.draws:
                self.host_position[list(chunk.draws)] = chunk.start + len(chunk.tokens)

    def draw_options(self, draws: Sequence[int]) -> DrawOptions:
        """The union of what these slots ask for."""
        used = np.logical_or.reduce(self.host_options[list(draws)], axis=0)
        return DrawOptions(not used[0], bool(used[1]), bool(used[2]), bool(used[3]))

    def blocks_of(self, slot: int, length: int) -> Tensor:
        """The slot's block ids, int64, that hold its first `length` positions."""
        return self.block_table[slot, : (length + self.block_size - 1) // self.block_size].long()

    def _same_decodes(self, decodes: tuple[int, ...]) -> StepBatch | None:
        if self._batch is None or self._batch[0] != decodes:
            return None
        batch = self._batch[1]
        batch.max_seq_len = int(self.host_position[list(decodes)].max()) + 1
        return batch

    def updates_of(self, plan: StepPlan) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What a plan changes, int64: of each slot that is handed over its number, _INT_FIELDS and the float32 bits of
        _FLOAT_FIELDS; places in the flat block table and what goes there. The host's mirrors are changed here."""
        slots: list[tuple[int, ...]] = []
        floats: list[tuple[float, ...]] = []
        for update in plan.slots:
            params = update.params
            top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
            seed = update.seed & (2**64 - 1)
            seed = seed - 2**64 if seed >= 2**63 else seed
            slots.append((update.slot, update.num_prompt_tokens, seed, update.choice, top_k))
            floats.append((params.temperature, params.top_p, params.min_p))
            samples = not params.greedy
            self.host_options[update.slot] = (
                samples,
                samples and top_k < self.vocab_size,
                samples and params.top_p < 1.0,
                samples and params.min_p > 0.0,
            )
            self.host_prompt_len[update.slot] = update.num_prompt_tokens
        ints = np.array(slots, dtype=np.int64).reshape(-1, 1 + len(_INT_FIELDS))
        bits = np.array(floats, dtype=np.float32).view(np.int32).astype(np.int64).reshape(-1, len(_FLOAT_FIELDS))
        at: list[int] = []
        values: list[int] = []
        for slot, start, blocks in plan.blocks:
            first = slot * self.max_blocks + start
            at.extend(range(first, first + len(blocks)))
            values.extend(blocks)
        places = [np.array(at, dtype=np.int64), np.array(values, dtype=np.int64)]
        return [*ints.T, *bits.T], places

    def _upload(self, pack: _Pack) -> Tensor:
        return self.staging.pinned(np.concatenate(pack.arrays)).to(self.device, non_blocking=True)

    def _write_slots(self, device: Tensor, parts: list[slice]) -> None:
        slots = device[parts[0]]
        for name, part in zip(_INT_FIELDS, parts[1:], strict=False):
            getattr(self, name).index_copy_(0, slots, device[part])
        for name, part in zip(_FLOAT_FIELDS, parts[1 + len(_INT_FIELDS) :], strict=True):
            getattr(self, name).index_copy_(0, slots, device[part].to(torch.int32).view(torch.float32))

    def _pack_rows(self, pack: _Pack, plan: StepPlan) -> list[slice]:
        num_decodes = len(plan.decodes)
        counts = [len(chunk.tokens) for chunk in plan.chunks]
        starts = np.arange(num_decodes + len(counts) + 1, dtype=np.int64)
        arrays = [np.array(plan.decodes, dtype=np.int64)]
        if counts:
            starts[num_decodes + 1 :] = num_decodes + np.cumsum(counts)
            arrays += [
                np.concatenate([np.array(chunk.tokens, dtype=np.int64) for chunk in plan.chunks]),
                np.concatenate([np.arange(c.start, c.start + len(c.tokens), dtype=np.int64) for c in plan.chunks]),
                np.repeat(np.array([chunk.slot for chunk in plan.chunks], dtype=np.int64), counts),
                np.array([chunk.slot for chunk in plan.chunks], dtype=np.int64),
                np.array([chunk.start + len(chunk.tokens) for chunk in plan.chunks], dtype=np.int64),
            ]
        else:
            arrays += [np.empty(0, dtype=np.int64)] * 5
        return [pack.add(array) for array in (*arrays, starts)]

    def _batch_of(self, plan: StepPlan, device: Tensor, parts: list[slice]) -> StepBatch:
        tensors = [device[part] for part in parts]
        longest = [chunk.start + len(chunk.tokens) for chunk in plan.chunks]
        if plan.decodes:
            longest.append(int(self.host_position[list(plan.decodes)].max()) + 1)
        batch = StepBatch(
            decodes=tensors[0],
            chunk_tokens=tensors[1],
            chunk_positions=tensors[2],
            chunk_token_slots=tensors[3],
            chunk_slots=tensors[4],
            chunk_ends=tensors[5],
            query_starts=tensors[6].to(torch.int32),
            num_decodes=len(plan.decodes),
            max_query_len=max((len(chunk.tokens) for chunk in plan.chunks), default=1),
            max_seq_len=max(longest, default=0),
        )
        self._batch = (plan.decodes, batch) if plan.decodes and not plan.chunks else None
        return batch


class _Pack:
    """int64 arrays laid end to end, so that one transfer carries them all."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.size = 0

    def add(self, array: np.ndarray) -> slice:
        start = self.size
        self.arrays.append(array)
        self.size += len(array)
        return slice(start, self.size)
