"""Steps as CUDA graph replays over slot state, in the padded shapes of buckets.py.

Owned by runner.py, on the model thread. Decodes alone are one graph, from embedding to sampled ids. Any other step is
one for its forward pass, whose hidden states stay in a buffer, and one for its draws; draws that need the host run
outside of graphs over the same buffer. A shape's first step runs as it is, which compiles what it needs, and is
captured right after; `idle` does so ahead of need. All graphs share one memory pool. What is captured reads no host
value: lengths, positions and last tokens are slot state.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aserve.models import KVCache, Model
from aserve.plan import StepPlan, StepTimings
from aserve.worker import buckets
from aserve.worker.buckets import DecodeShape, DrawShape, ForwardShape, Shape
from aserve.worker.inputs import DrawOptions, SlotState
from aserve_kernels import AttentionMeta, Kernels, SamplingRows
from aserve_kernels.triton.step import SlotTensors, StepInputs, StepRows, commit_draws, step_inputs, update_slots

_log = logging.getLogger("aserve.worker")
_EMPTY = StepPlan(0)
_HEADER = 3  # words that say where the updates of slot state are, and how many
_MAX_UPDATES = 1 << 15  # words of updates that travel with a step


@dataclass(slots=True)
class Captured:
    """A graph and the tensor it leaves its result in; no graph where the model cannot be captured."""

    graph: torch.cuda.CUDAGraph | None
    out: Tensor


class StepGraphs:
    """Captured steps by shape, and the static buffers they read."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        caches: list[KVCache],
        state: SlotState,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._caches = caches
        self._state = state
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_tokens = buckets.forward_shape(0, 0, max_tokens).num_tokens
        self._slots = SlotTensors(**{name: getattr(state, name) for name in SlotTensors.__slots__})
        self._captured: dict[Shape, Captured] = {}
        self._ahead: deque[Shape] = deque()  # what `idle` will capture
        self._recording: tuple[torch.cuda.Stream, Any] | None = None  # a side stream, the graphs' pool
        # decode steps have their own words, so that another step in between does not cost them an upload
        max_draws = buckets.decode_rows(max_num_seqs)
        largest = buckets.forward_shape(max_num_seqs, buckets.CHUNK_ROWS[-1], max_tokens)
        self._decode_words = self._zeros(sum(DecodeShape(max_draws, DrawOptions()).sizes))
        self._base = sum(DrawShape(max_draws, DrawOptions()).sizes)  # a step's draws lie before this word
        self._words = self._zeros(self._base + _HEADER + sum(largest.sizes) + _MAX_UPDATES)
        self._rows = torch.arange(max_draws, device=state.device)
        self._hidden = torch.zeros(
            (self._max_tokens, model.spec.hidden_size), dtype=model.spec.dtype, device=state.device
        )  # of the last forward pass
        self._uploaded: tuple[tuple[int, ...], DecodeShape] | None = None  # what the decode words hold
        self._grown = False  # they hold new blocks too
        self._row_of: tuple[tuple[int, ...], dict[int, int]] = (), {}  # of the last decodes that grew

    def warm(self) -> None:
        """Captures the largest decode steps, so that smaller ones fit in their memory, and compiles what a first
        request needs."""
        largest = buckets.decode_rows(self._max_num_seqs)
        few = [size for size in (128, 64, 32, 16, 8) if size < largest]  # each has linear kernels of its own
        for options, sizes in (
            (DrawOptions(), [largest, *few, 1]),
            (DrawOptions(all_greedy=False), [largest, 1]),
        ):
            for size in sizes:
                self._prepare(DecodeShape(size, options))
            self._prepare(DrawShape(1, options))
        self._prepare(buckets.forward_shape(0, 1, 1))
        self._ahead.extend(buckets.likely_shapes(self._max_num_seqs))

    def idle(self) -> bool:
        """Captures the next shape that a server is likely to need; False where none is left. To be called with no
        step in flight."""
        while self._ahead:
            shape = self._ahead.popleft()
            fits = not isinstance(shape, ForwardShape) or shape.num_tokens <= self._max_tokens
            if fits and shape not in self._captured:
                try:
                    self._prepare(shape)
                except torch.OutOfMemoryError:
                    _log.warning("no memory is left for graphs ahead of need")
                    self._ahead.clear()
                if not self._ahead:
                    _log.info("captured %d shapes of steps", len(self._captured))
                return True
        return False

    def takes(self, plan: StepPlan) -> bool:
        """True where the plan's forward pass has a shape."""
        return 0 < plan.num_tokens <= self._max_tokens and len(plan.chunks) <= buckets.CHUNK_ROWS[-1]

    def draws(self, plan: StepPlan) -> bool:
        """True where its draws have one too. Options that need the sampler's extras are the runner's to see."""
        return len(plan.draws) <= self._max_num_seqs

    def run(self, plan: StepPlan, timings: StepTimings) -> Tensor | None:
        """Starts a whole step. Returns its draws on the device, int64 [2, S'] with S' >= the plan's draws."""
        if not plan.chunks:
            decode_shape = self._place_decodes(plan)
            timings.inputs = time.perf_counter() - timings.began
            return self._replay(decode_shape)
        shape, packed = self._pack(plan)
        draws = plan.draws
        if not draws:
            self._upload(self._words[self._base :], packed)
            timings.inputs = time.perf_counter() - timings.began
            self._replay(shape)
            return None
        draw_shape = DrawShape(buckets.decode_rows(len(draws)), self._options(draws))
        rows, ends = self._state.host_draws(plan)
        drawing = buckets.pack_draws(draws, rows, ends, draw_shape, self._state.padding_slot)
        self._upload(self._words[self._base - len(drawing) :], np.concatenate((drawing, packed)))
        timings.inputs = time.perf_counter() - timings.began
        self._replay(shape)
        return self._replay(draw_shape)

    def forward(self, plan: StepPlan, timings: StepTimings) -> Tensor:
        """Starts a forward pass alone. Returns the hidden states of the plan's tokens."""
        shape, packed = self._pack(plan)
        self._upload(self._words[self._base :], packed)
        timings.inputs = time.perf_counter() - timings.began
        self._replay(shape)
        return self._hidden[: plan.num_tokens]

    def _pack(self, plan: StepPlan) -> tuple[ForwardShape, np.ndarray]:
        """The words of a forward pass: header, rows, updates."""
        shape = buckets.forward_shape(len(plan.decodes), len(plan.chunks), plan.num_tokens)
        rows = buckets.pack_forward(plan, shape, self._state.padding_slot)
        slots, places = self._state.updates_of(plan)
        updates = [*slots, *places]
        if 8 * len(slots[0]) + 2 * len(places[0]) > _MAX_UPDATES:
            self._state.update(plan)
            updates = [column[:0] for column in updates]
        header = np.array((_HEADER + len(rows), len(updates[0]), len(updates[-1])), dtype=np.int64)
        self._state.forget_rows(plan)
        return shape, np.concatenate((header, rows, *updates))

    def _place_decodes(self, plan: StepPlan) -> DecodeShape:
        """Uploads what has changed since the last step of decodes alone."""
        new_blocks = None if plan.slots else self._new_blocks(plan)
        if new_blocks is None:
            self._state.update(plan)
            new_blocks = {}
        if self._uploaded is not None and plan.decodes is self._uploaded[0] and not plan.slots:
            shape = self._uploaded[1]
            if new_blocks or self._grown:
                packed = np.full(shape.num_rows, -1, dtype=np.int64)
                packed[list(new_blocks)] = list(new_blocks.values())
                self._upload(self._decode_words, packed)
        else:
            shape = DecodeShape(buckets.decode_rows(len(plan.decodes)), self._options(plan.decodes))
            packed = buckets.pack_decodes(plan.decodes, shape, self._state.padding_slot)
            packed[list(new_blocks)] = list(new_blocks.values())
            self._upload(self._decode_words, packed)
            self._uploaded = (plan.decodes, shape)
        self._grown = bool(new_blocks)
        return shape

    def _new_blocks(self, plan: StepPlan) -> dict[int, int] | None:
        """By row, the block that its token is the first to be written to; None where the deltas are of another kind."""
        if not plan.blocks:
            return {}
        position, size = self._state.host_position, self._state.block_size
        if self._row_of[0] is not plan.decodes:
            self._row_of = plan.decodes, {slot: row for row, slot in enumerate(plan.decodes)}
        row_of = self._row_of[1]
        found: dict[int, int] = {}
        for slot, start, blocks in plan.blocks:
            if len(blocks) != 1 or slot not in row_of or start != position[slot] // size:
                return None
            found[row_of[slot]] = blocks[0]
        return found

    def _replay(self, shape: Shape) -> Tensor:
        """Runs a shape over the words; the first time as it is, then it is captured for the next. A large one is always
        run as it is: padded all the same, since lengths of all kinds would each compile kernels."""
        if isinstance(shape, ForwardShape) and shape.num_tokens > buckets.MAX_TOKENS:
            return self._work(shape)()
        captured = self._captured.get(shape)
        if captured is None:
            work = self._work(shape)
            out = work()
            self._captured[shape] = self._capture(work) or Captured(None, out)
            return out
        if captured.graph is None:
            return self._work(shape)()
        captured.graph.replay()
        return captured.out

    def _prepare(self, shape: Shape) -> None:
        """Captures a shape, after a step of nothing but padding."""
        padding = self._state.padding_slot
        if isinstance(shape, DecodeShape):
            self._upload(self._decode_words, buckets.pack_decodes((), shape, padding))
            self._uploaded = None
        elif isinstance(shape, ForwardShape):
            rows = buckets.pack_forward(_EMPTY, shape, padding)
            self._upload(self._words[self._base :], np.concatenate((np.zeros(_HEADER, dtype=np.int64), rows)))
        else:
            none = np.empty(0, dtype=np.int64)
            packed = buckets.pack_draws((), none, none, shape, padding)
            self._upload(self._words[self._base - len(packed) :], packed)
        self._replay(shape)

    def _work(self, shape: Shape) -> Callable[[], Tensor]:
        """What a graph of this shape holds."""
        if isinstance(shape, DecodeShape):
            return partial(self._decode_step, shape)
        return (
            partial(self._forward_step, shape) if isinstance(shape, ForwardShape) else partial(self._draw_step, shape)
        )

    def _decode_step(self, shape: DecodeShape) -> Tensor:
        rows = StepRows(*torch.split(self._decode_words[: sum(shape.sizes)], shape.sizes))
        inputs = step_inputs(rows, self._slots, self._state.block_size)
        hidden = self._model.forward(inputs.token_ids, self._meta(inputs, shape.num_rows, 1), self._caches)
        return self._draw(hidden, rows, inputs, shape.options)

    def _forward_step(self, shape: ForwardShape) -> Tensor:
        header = self._words[self._base :]
        update_slots(header, self._slots)
        words = header[_HEADER : _HEADER + sum(shape.sizes)]
        none = words[:0]
        ids, positions, slots, rows_of, ends, starts = torch.split(words, shape.sizes)
        rows = StepRows(None, ids, positions, slots, rows_of, ends, starts, none, none)
        inputs = step_inputs(rows, self._slots, self._state.block_size)
        meta = self._meta(inputs, shape.num_decodes, shape.num_tokens if shape.num_chunks else 1)
        hidden = self._model.forward(inputs.token_ids, meta, self._caches)
        return self._hidden[: shape.num_tokens].copy_(hidden)

    def _draw_step(self, shape: DrawShape) -> Tensor:
        slots, ends, starts = torch.split(self._words[self._base - sum(shape.sizes) : self._base], shape.sizes)
        none = slots[:0]
        rows = StepRows(None, none, none, none, slots, ends, starts, self._rows[: shape.num_draws], slots)
        inputs = step_inputs(rows, self._slots, self._state.block_size)
        return self._draw(self._hidden.index_select(0, inputs.hidden_rows), rows, inputs, shape.options)

    def _meta(self, inputs: StepInputs, num_decodes: int, max_query_len: int) -> AttentionMeta:
        return AttentionMeta(
            num_decodes=num_decodes,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_starts=inputs.query_starts,
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            max_query_len=max_query_len,
            max_seq_len=self._max_model_len,
        )

    def _draw(self, hidden: Tensor, rows: StepRows, inputs: StepInputs, options: DrawOptions) -> Tensor:
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

    def _capture(self, work: Callable[[], Tensor]) -> Captured | None:
        """Records the work without running it; None where the model does what a graph cannot hold, like reading a
        device value. torch.cuda.graph would synchronize and collect garbage first."""
        try:
            return self._record(work)
        except RuntimeError as error:
            torch.cuda.synchronize(self._state.device)  # a real fault is raised here
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())  # else it refuses torch's draws ever after
            _log.warning("steps of a shape run without a CUDA graph: %s", error)
            return None

    def _record(self, work: Callable[[], Tensor]) -> Captured:
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
                    out = work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        return Captured(graph, out)

    def _options(self, draws: tuple[int, ...]) -> DrawOptions:
        return buckets.draw_options(self._state.draw_options(draws))

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._state.device)

    def _upload(self, words: Tensor, packed: np.ndarray) -> None:
        words[: len(packed)].copy_(self._state.staging.pinned(packed), non_blocking=True)
