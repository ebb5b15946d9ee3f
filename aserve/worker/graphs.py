"""A step as one CUDA graph replay, from slot state to sampled ids, for padded bucket sizes.

Owned by runner.py, which asks `takes` and then `run`, on the model thread. A bucket's first step runs eagerly over the
padded inputs, which compiles what it needs, and is captured right after; nothing waits for a capture at start. All graphs
share one memory pool. What is captured reads no host value: lengths, positions and last tokens are slot state.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.models import KVCache, Model
from aserve.plan import StepPlan
from aserve.worker.inputs import DrawOptions, SlotState
from aserve_kernels import AttentionMeta, Kernels, SamplingRows
from aserve_kernels.triton.step import SlotTensors, StepRows, commit_draws, step_inputs

MAX_TOKENS = 2048  # a longer step keeps the device busy for longer than its launches take


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a captured step. Decode steps have one token and one draw per row."""

    num_tokens: int
    num_rows: int
    decode: bool
    options: DrawOptions

    @property
    def num_words(self) -> int:
        """Length of the packed StepRows."""
        return 3 * self.num_tokens + 3 * self.num_rows + 1 + 2 * self.num_rows


@dataclass(slots=True)
class Captured:
    """A graph and the tensor it leaves its draws in."""

    graph: torch.cuda.CUDAGraph
    drawn: Tensor  # int64 [2, S]


class StepGraphs:
    """Captured steps by bucket, and the static buffers they read."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        caches: list[KVCache],
        state: SlotState,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._caches = caches
        self._state = state
        self._max_model_len = max_model_len
        self._max_rows = _row_bucket(max_num_seqs)
        self._max_tokens = max(max_tokens, self._max_rows)
        self._slots = SlotTensors(**{name: getattr(state, name) for name in SlotTensors.__slots__})
        self._captured: dict[Bucket, Captured | None] = {}
        self._recording: tuple[torch.cuda.Stream, tuple[int, int]] | None = None  # a side stream, the graphs' pool
        words = 3 * self._max_tokens + 5 * self._max_rows + 1
        # decode steps have their own buffer, so that a mixed step in between does not cost them an upload
        self._words = {decode: torch.zeros(words, dtype=torch.int64, device=state.device) for decode in (True, False)}
        self._uploaded: tuple[tuple[int, ...], Bucket] | None = None  # what the decode buffer holds

    def warm(self) -> None:
        """Compiles what decode steps need and captures the largest, so that smaller ones fit in its memory."""
        for options in (DrawOptions(), DrawOptions(all_greedy=False)):
            bucket = Bucket(self._max_rows, self._max_rows, True, options)
            words = self._words[True]
            self._upload(words, _pack_decodes((), bucket, self._state.padding_slot))
            rows = _views(words, bucket)
            self._step(rows, bucket)
            self._captured[bucket] = self._capture(rows, bucket)

    def takes(self, plan: StepPlan) -> bool:
        """True where the plan's shape has a bucket. Options that need the sampler's extras are the runner's to see."""
        num_draws = len(plan.decodes) + sum(len(chunk.draws) for chunk in plan.chunks)
        return (
            plan.num_tokens <= self._max_tokens
            and len(plan.decodes) + len(plan.chunks) <= self._max_rows
            and 0 < num_draws <= self._max_rows
        )

    def run(self, plan: StepPlan) -> Tensor:
        """Starts the step and returns its draws on the device, int64 [2, S'] with S' >= the plan's draws."""
        bucket = self._bucket_of(plan)
        words = self._words[bucket.decode]
        if not bucket.decode:
            self._upload(words, _pack_mixed(plan, bucket, self._state.padding_slot))
        elif self._uploaded is None or self._uploaded[0] is not plan.decodes or self._uploaded[1] != bucket:
            self._upload(words, _pack_decodes(plan.decodes, bucket, self._state.padding_slot))
            self._uploaded = (plan.decodes, bucket)
        captured = self._captured.get(bucket)
        if captured is not None:
            captured.graph.replay()
            return captured.drawn
        rows = _views(words, bucket)
        drawn = self._step(rows, bucket)
        self._captured[bucket] = self._capture(rows, bucket)
        return drawn

    def _step(self, rows: StepRows, bucket: Bucket) -> Tensor:
        """The work of a step: what a graph holds."""
        state, options = self._state, bucket.options
        inputs = step_inputs(rows, self._slots, state.block_size)
        meta = AttentionMeta(
            num_decodes=bucket.num_rows if bucket.decode else 0,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_starts=inputs.query_starts,
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            max_query_len=1 if bucket.decode else bucket.num_tokens,
            max_seq_len=self._max_model_len,
        )
        hidden = self._model.forward(inputs.token_ids, meta, self._caches)
        if not bucket.decode:
            hidden = hidden.index_select(0, inputs.hidden_rows)
        logits = self._model.logits(hidden)
        sampling = SamplingRows(
            temperature=inputs.temperature,
            seeds=inputs.seeds,
            choices=inputs.choices,
            output_index=inputs.output_index,
            top_k=inputs.top_k if options.top_k else None,
            top_p=inputs.top_p if options.top_p else None,
            min_p=inputs.min_p if options.min_p else None,
            all_greedy=options.all_greedy,
        )
        tokens = self._kernels.sample(logits, sampling)
        return commit_draws(tokens, hidden, logits, rows, inputs, self._slots)

    def _capture(self, rows: StepRows, bucket: Bucket) -> Captured | None:
        """Records the step without running it. torch.cuda.graph would synchronize and collect garbage first."""
        if self._recording is None:
            self._recording = (torch.cuda.Stream(self._state.device), torch.cuda.graph_pool_handle())
        stream, pool = self._recording
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a collected CUDA object must not be freed while recording
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    drawn = self._step(rows, bucket)
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        return Captured(graph, drawn)

    def _bucket_of(self, plan: StepPlan) -> Bucket:
        if self._uploaded is not None and plan.decodes is self._uploaded[0] and not plan.chunks and not plan.slots:
            return self._uploaded[1]
        draws = plan.draws
        used = self._state.draw_options(draws)
        # with any limit in use all three are read: fewer graphs, and the unused ones cost nothing
        limited = used.top_k or used.top_p or used.min_p
        options = DrawOptions(used.all_greedy, limited, limited, limited)
        if not plan.chunks:
            size = _row_bucket(len(plan.decodes))
            return Bucket(size, size, True, options)
        num_rows = _row_bucket(max(len(plan.decodes) + len(plan.chunks), len(draws)))
        num_rows = next(size for size in (8, 32, 64, 128, 256, num_rows) if size >= num_rows)
        return Bucket(max(_token_bucket(plan.num_tokens), num_rows), num_rows, False, options)

    def _upload(self, words: Tensor, packed: np.ndarray) -> None:
        host = torch.from_numpy(packed)
        words[: len(packed)].copy_(host.pin_memory() if words.is_cuda else host, non_blocking=True)


def _row_bucket(count: int) -> int:
    """1, 2, 4, then multiples of 8, of 16 from 64, of 32 from 256."""
    if count <= 4:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 64 else (16 if count <= 256 else 32)
    return -(-count // step) * step


def _token_bucket(count: int) -> int:
    """Multiples of 16, of 64 from 128, of 128 from 1024: padding of an eighth at most, where it costs time."""
    step = 16 if count <= 128 else (64 if count <= 1024 else 128)
    return -(-count // step) * step


def _views(words: Tensor, bucket: Bucket) -> StepRows:
    tokens, rows = bucket.num_tokens, bucket.num_rows
    return StepRows(*words[: bucket.num_words].split([tokens, tokens, tokens, rows, rows, rows + 1, rows, rows]))


def _pack_decodes(decodes: tuple[int, ...], bucket: Bucket, padding_slot: int) -> np.ndarray:
    """StepRows of decodes, laid end to end. Padding rows compute token 0 at position 0 of the padding slot."""
    size, count = bucket.num_rows, len(decodes)
    slots = np.full(size, padding_slot, dtype=np.int64)
    slots[:count] = decodes
    given = np.zeros(size, dtype=np.int64)
    given[:count] = -1
    ends = given.copy()
    ends[count:] = 1
    at = np.arange(size + 1, dtype=np.int64)
    return np.concatenate((slots, given, given, slots, ends, at, at[:-1], slots))


def _pack_mixed(plan: StepPlan, bucket: Bucket, padding_slot: int) -> np.ndarray:
    """StepRows of decodes, then chunks. Padding tokens belong to no row and write to the padding slot's block."""
    tokens, rows, decodes = bucket.num_tokens, bucket.num_rows, len(plan.decodes)
    packed = np.zeros(bucket.num_words, dtype=np.int64)
    views = np.split(packed, np.cumsum([tokens, tokens, tokens, rows, rows, rows + 1, rows]))
    token_slots, token_ids, token_positions, row_slots, row_ends, starts, draw_rows, draw_slots = views
    token_slots.fill(padding_slot)
    row_slots.fill(padding_slot)
    draw_slots.fill(padding_slot)
    token_slots[:decodes] = row_slots[:decodes] = draw_slots[:decodes] = plan.decodes
    token_ids[:decodes] = token_positions[:decodes] = row_ends[:decodes] = -1
    starts[: decodes + 1] = np.arange(decodes + 1)
    draw_rows[:decodes] = np.arange(decodes)
    at = draw = decodes
    for row, chunk in enumerate(plan.chunks, decodes):
        end = at + len(chunk.tokens)
        token_slots[at:end] = row_slots[row] = chunk.slot
        token_ids[at:end] = chunk.tokens
        token_positions[at:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        row_ends[row] = chunk.start + len(chunk.tokens)
        draw_rows[draw : draw + len(chunk.draws)] = row
        draw_slots[draw : draw + len(chunk.draws)] = chunk.draws
        draw += len(chunk.draws)
        at = starts[row + 1] = end
    starts[decodes + len(plan.chunks) + 1 :] = at
    return packed
