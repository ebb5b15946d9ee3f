"""The padded shapes in which steps are captured, and a plan laid out for one: graphs.py uploads it as it is.

A step of decodes alone is one shape. Any other step is two, a forward pass and its draws, so that their numbers add up
and do not multiply. Fields are int64 and lie end to end; padding rows belong to the padding slot. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from aserve.plan import StepPlan
from aserve.worker.inputs import DrawOptions

CHUNK_ROWS = (8, 64, 256)
MAX_TOKENS = 2048  # of a captured forward pass: a longer one keeps the device busy for longer than its launches take


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Rows of one token, each with a draw."""

    num_rows: int
    options: DrawOptions

    @property
    def sizes(self) -> list[int]:
        """Lengths of step.StepRows' fields, `new_blocks` first: it is what changes from step to step."""
        return [self.num_rows] * 6 + [self.num_rows + 1] + [self.num_rows] * 2


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """A forward pass: tokens of up to `num_decodes` rows of one, then of chunks. Any of the rows may be missing."""

    num_tokens: int
    num_decodes: int
    num_chunks: int

    @property
    def sizes(self) -> list[int]:
        """Lengths of StepRows' fields up to query_starts."""
        rows = self.num_decodes + self.num_chunks
        return [self.num_tokens] * 3 + [rows, rows, rows + 1]


@dataclass(frozen=True, slots=True)
class DrawShape:
    """Draws from the hidden states that a forward pass left."""

    num_draws: int
    options: DrawOptions

    @property
    def sizes(self) -> list[int]:
        """Lengths of its fields: slots, ends, and starts as StepRows' query_starts."""
        return [self.num_draws, self.num_draws, self.num_draws + 1]


Shape = DecodeShape | ForwardShape | DrawShape


def round_up(count: int, step: int) -> int:
    """The next multiple."""
    return -(-count // step) * step


def decode_rows(count: int) -> int:
    """1, 2, 4, then multiples of 8, of 16 from 64, of 32 from 256."""
    if count <= 4:
        return 1 << (count - 1).bit_length()
    return round_up(count, 8 if count <= 64 else (16 if count <= 256 else 32))


def forward_shape(num_decodes: int, num_chunks: int, num_tokens: int) -> ForwardShape:
    """The smallest shape. Rows that are missing cost next to nothing, padding tokens all of their share."""
    step = 16 if num_tokens <= 128 else (32 if num_tokens <= 512 else (64 if num_tokens <= 1024 else 128))
    rows = max(16, 1 << (num_decodes - 1).bit_length()) if num_decodes else 0
    chunks = next(size for size in CHUNK_ROWS if size >= num_chunks) if num_chunks else 0
    return ForwardShape(round_up(num_tokens, step), rows, chunks)


def draw_options(used: DrawOptions) -> DrawOptions:
    """With any limit in use all three are read: fewer shapes, and the unused ones cost nothing."""
    limited = used.top_k or used.top_p or used.min_p
    return DrawOptions(used.all_greedy, limited, limited, limited)


def likely_shapes(max_num_seqs: int) -> Iterator[Shape]:
    """What a server will need, the most common first."""
    greedy, plain = DrawOptions(), DrawOptions(all_greedy=False)
    low = 0
    for high in (16, 64, 256):
        counts = sorted({decode_rows(count) for count in range(low + 1, min(high, max_num_seqs) + 1)})
        for options in (plain, greedy):
            for count in counts:
                yield DrawShape(count, options)
                yield DecodeShape(count, options)
        rows = [rows for rows in (0, 16, 32, 64, 128, 256) if low < rows <= high or low == rows == 0]
        for num_decodes in rows:
            seen = {forward_shape(num_decodes, 1, count) for count in range(num_decodes // 2 + 1, MAX_TOKENS + 1)}
            yield from sorted(seen, key=lambda shape: shape.num_tokens)
        low = high
    for count in sorted({decode_rows(count) for count in range(low + 1, max_num_seqs + 1)}):
        for options in (plain, greedy):
            yield DrawShape(count, options)
            yield DecodeShape(count, options)


def pack_decodes(decodes: tuple[int, ...], shape: DecodeShape, padding_slot: int) -> np.ndarray:
    """StepRows of decodes, without new blocks. A padding row computes token 0 at position 0 of the padding slot."""
    size, count = shape.num_rows, len(decodes)
    slots = np.full(size, padding_slot, dtype=np.int64)
    slots[:count] = decodes
    given = np.zeros(size, dtype=np.int64)
    given[:count] = -1
    ends = given.copy()
    ends[count:] = 1
    at = np.arange(size + 1, dtype=np.int64)
    return np.concatenate((np.full(size, -1, dtype=np.int64), slots, given, given, slots, ends, at, at[:-1], slots))


def pack_forward(plan: StepPlan, shape: ForwardShape, padding_slot: int) -> np.ndarray:
    """Tokens of the decodes, of the chunks, padding. A missing row has no tokens and no context; padding tokens belong
    to no row and write to the padding slot's block."""
    count, first = len(plan.decodes), shape.num_decodes
    packed = np.zeros(sum(shape.sizes), dtype=np.int64)
    fields = np.split(packed, np.cumsum(shape.sizes[:-1]))
    token_slots, token_ids, token_positions, row_slots, row_ends, starts = fields
    for slots in (token_slots, row_slots):
        slots.fill(padding_slot)
        slots[:count] = plan.decodes
    for given in (token_ids, token_positions, row_ends):
        given[:count] = -1
    starts[:count] = np.arange(count)
    starts[count : first + 1] = at = count
    for row, chunk in enumerate(plan.chunks, first):
        end = at + len(chunk.tokens)
        token_slots[at:end] = row_slots[row] = chunk.slot
        token_ids[at:end] = chunk.tokens
        token_positions[at:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        row_ends[row] = chunk.start + len(chunk.tokens)
        at = starts[row + 1] = end
    starts[first + len(plan.chunks) + 1 :] = at
    return packed


def pack_draws(
    slots: tuple[int, ...], rows: np.ndarray, ends: np.ndarray, shape: DrawShape, padding_slot: int
) -> np.ndarray:
    """Draws of `slots` from the hidden states at `rows`, whose contexts end at `ends`; padding reads row 0."""
    count, size = len(slots), shape.num_draws
    packed = np.ones(sum(shape.sizes), dtype=np.int64)
    packed[:size] = padding_slot
    packed[:count] = slots
    packed[size : size + count] = ends
    packed[2 * size + 1 : 2 * size + 1 + count] = rows + 1
    return packed
