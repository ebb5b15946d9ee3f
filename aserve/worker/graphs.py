"""A step as one CUDA graph replay, from slot state to sampled ids, for padded bucket sizes.

Owned by runner.py, which asks `takes` and then `run`, on the model thread. A bucket's first step runs eagerly over the
padded inputs, which compiles what it needs, and is captured right after; nothing waits for a capture at start. All
graphs share one memory pool. What is captured reads no host value: lengths, positions and last tokens are slot state.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aserve.models import KVCache, Model
from aserve.plan import StepPlan
from aserve.worker.inputs import DrawOptions, SlotState
from aserve_kernels import AttentionMeta, Kernels, SamplingRows
from aserve_kernels.triton.step import SlotTensors, StepRows, commit_draws, step_inputs

MAX_TOKENS = 2048  # of chunks: a longer step keeps the device busy for longer than its launches take
_log = logging.getLogger("aserve.worker")
_CHUNK_ROWS = (4, 16, 64, 256)  # buckets of the number of chunks


@dataclass(frozen=True, slots=True)
class Bucket:
    """The padded shape of a captured step: rows of one token, then rows of chunks. As many draws as rows."""

    num_decodes: int
    num_chunks: int
    num_chunk_tokens: int
    options: DrawOptions

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.num_decodes + self.num_chunks

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.num_decodes + self.num_chunk_tokens

    @property
    def sizes(self) -> list[int]:
        """Lengths of StepRows' fields, laid end to end in one buffer."""
        tokens, rows = self.num_tokens, self.num_rows
        return [tokens, tokens, tokens, rows, rows, rows + 1, rows, rows]


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
        self._max_rows = _decode_bucket(max_num_seqs)
        self._max_chunk_tokens = max_tokens
        self._slots = SlotTensors(**{name: getattr(state, name) for name in SlotTensors.__slots__})
        self._captured: dict[Bucket, Captured | None] = {}
        self._recording: tuple[torch.cuda.Stream, Any] | None = None  # a side stream, the graphs' pool
        largest = Bucket(_round_up(max_num_seqs, 32), _CHUNK_ROWS[-1], _chunk_bucket(max_tokens), DrawOptions())
        words = sum(largest.sizes)
        # decode steps have their own buffer, so that a mixed step in between does not cost them an upload
        self._words = {decode: torch.zeros(words, dtype=torch.int64, device=state.device) for decode in (True, False)}
        self._uploaded: tuple[tuple[int, ...], Bucket] | None = None  # what the decode buffer holds

    def warm(self) -> None:
        """Captures the largest decode steps, so that smaller ones fit in their memory, and compiles what a first
        request needs."""
        nothing = StepPlan(0)
        few = [size for size in (128, 64, 32, 16, 8) if size < self._max_rows]  # each has linear kernels of its own
        for options, sizes in (
            (DrawOptions(), [self._max_rows, *few, 1]),
            (DrawOptions(all_greedy=False), [self._max_rows, 1]),
        ):
            for size in sizes:
                bucket = Bucket(size, 0, 0, options)
                self._first(bucket, self._words[True], _pack_decodes((), bucket, self._state.padding_slot))
        bucket = Bucket(0, _CHUNK_ROWS[0], _chunk_bucket(1), DrawOptions())
        self._first(bucket, self._words[False], _pack_mixed(nothing, bucket, self._state.padding_slot))

    def takes(self, plan: StepPlan) -> bool:
        """True where the plan's shape has a bucket. Options that need the sampler's extras are the runner's to see."""
        tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        draws = sum(len(chunk.draws) for chunk in plan.chunks)
        return (
            tokens <= self._max_chunk_tokens
            and max(len(plan.chunks), draws) <= _CHUNK_ROWS[-1]
            and len(plan.decodes) + draws > 0
        )

    def run(self, plan: StepPlan) -> Tensor:
        """Starts the step and returns its draws on the device, int64 [2, S'] with S' >= the plan's draws."""
        bucket = self._bucket_of(plan)
        decode = not plan.chunks
        words = self._words[decode]
        if not decode:
            self._upload(words, _pack_mixed(plan, bucket, self._state.padding_slot))
        elif self._uploaded is None or self._uploaded[0] is not plan.decodes or self._uploaded[1] != bucket:
            self._upload(words, _pack_decodes(plan.decodes, bucket, self._state.padding_slot))
            self._uploaded = (plan.decodes, bucket)
        if bucket not in self._captured:
            return self._first(bucket, words, None)
        captured = self._captured[bucket]
        if captured is None:  # this model cannot be captured
            return self._step(_views(words, bucket), bucket)
        captured.graph.replay()
        return captured.drawn

    def _first(self, bucket: Bucket, words: Tensor, packed: np.ndarray | None) -> Tensor:
        """A bucket's first step: runs it as it is, over `packed` where given, and captures it for the next."""
        if packed is not None:
            self._upload(words, packed)
        rows = _views(words, bucket)
        drawn = self._step(rows, bucket)
        self._captured[bucket] = self._capture(rows, bucket)
        return drawn

    def _step(self, rows: StepRows, bucket: Bucket) -> Tensor:
        """The work of a step: what a graph holds."""
        state, options = self._state, bucket.options
        inputs = step_inputs(rows, self._slots, state.block_size)
        meta = AttentionMeta(
            num_decodes=bucket.num_decodes,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_starts=inputs.query_starts,
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            max_query_len=bucket.num_chunk_tokens or 1,
            max_seq_len=self._max_model_len,
        )
        hidden = self._model.forward(inputs.token_ids, meta, self._caches)
        if bucket.num_chunks:
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
        """Records the step without running it; None where the model does what a graph cannot hold, like reading a
        device value. torch.cuda.graph would synchronize and collect garbage first."""
        try:
            return self._record(rows, bucket)
        except RuntimeError as error:
            torch.cuda.synchronize(self._state.device)  # a real fault is raised here
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())  # else it refuses torch's draws ever after
            _log.warning("steps of %d tokens run without a CUDA graph: %s", bucket.num_tokens, error)
            return None

    def _record(self, rows: StepRows, bucket: Bucket) -> Captured:
        if self._recording is None:
            stream = torch.cuda.Stream(self._state.device)  # type: ignore[no-untyped-call]
            self._recording = (stream, torch.cuda.graph_pool_handle())
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
            return Bucket(_decode_bucket(len(plan.decodes)), 0, 0, options)
        num_chunks = max(len(plan.chunks), len(draws) - len(plan.decodes))
        return Bucket(
            num_decodes=_mixed_decode_bucket(len(plan.decodes)),
            num_chunks=next(size for size in _CHUNK_ROWS if size >= num_chunks),
            num_chunk_tokens=_chunk_bucket(sum(len(chunk.tokens) for chunk in plan.chunks)),
            options=options,
        )

    def _upload(self, words: Tensor, packed: np.ndarray) -> None:
        host = torch.from_numpy(packed)
        words[: len(packed)].copy_(host.pin_memory() if words.is_cuda else host, non_blocking=True)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _decode_bucket(count: int) -> int:
    """1, 2, 4, then multiples of 8, of 16 from 64, of 32 from 256."""
    if count <= 4:
        return 1 << (count - 1).bit_length()
    return _round_up(count, 8 if count <= 64 else (16 if count <= 256 else 32))


def _mixed_decode_bucket(count: int) -> int:
    """Coarser, since these multiply with the chunks' buckets: multiples of 16, of 32 from 64."""
    return _round_up(count, 16 if count <= 64 else 32)


def _chunk_bucket(count: int) -> int:
    """Multiples of 16, of 32 from 64, of 64 from 512, of 128 from 1024."""
    return _round_up(count, 16 if count <= 64 else (32 if count <= 512 else (64 if count <= 1024 else 128)))


def _views(words: Tensor, bucket: Bucket) -> StepRows:
    return StepRows(*torch.split(words[: sum(bucket.sizes)], bucket.sizes))


def _pack_decodes(decodes: tuple[int, ...], bucket: Bucket, padding_slot: int) -> np.ndarray:
    """StepRows of decodes, laid end to end. Padding rows compute token 0 at position 0 of the padding slot."""
    size, count = bucket.num_decodes, len(decodes)
    slots = np.full(size, padding_slot, dtype=np.int64)
    slots[:count] = decodes
    given = np.zeros(size, dtype=np.int64)
    given[:count] = -1
    ends = given.copy()
    ends[count:] = 1
    at = np.arange(size + 1, dtype=np.int64)
    return np.concatenate((slots, given, given, slots, ends, at, at[:-1], slots))


def _pack_mixed(plan: StepPlan, bucket: Bucket, padding_slot: int) -> np.ndarray:
    """StepRows of decodes, padded, then chunks. A padding chunk has no tokens; padding tokens belong to no row and
    write to the padding slot's block. Draws are in the plan's order, padding last."""
    count, first = len(plan.decodes), bucket.num_decodes
    packed = np.zeros(sum(bucket.sizes), dtype=np.int64)
    fields = np.split(packed, np.cumsum(bucket.sizes[:-1]))
    token_slots, token_ids, token_positions, row_slots, row_ends, starts, draw_rows, draw_slots = fields
    for slots in (token_slots, row_slots, draw_slots):
        slots.fill(padding_slot)
        slots[:count] = plan.decodes
    for given in (token_ids, token_positions, row_ends):
        given[:count] = -1
    row_ends[count:first] = 1
    starts[: first + 1] = np.arange(first + 1)
    draw_rows[:count] = np.arange(count)
    at, draw = first, count
    for row, chunk in enumerate(plan.chunks, first):
        end, last = at + len(chunk.tokens), draw + len(chunk.draws)
        token_slots[at:end] = row_slots[row] = chunk.slot
        token_ids[at:end] = chunk.tokens
        token_positions[at:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        row_ends[row] = chunk.start + len(chunk.tokens)
        draw_rows[draw:last] = row
        draw_slots[draw:last] = chunk.draws
        at = starts[row + 1] = end
        draw = last
    starts[first + len(plan.chunks) + 1 :] = at
    return packed
