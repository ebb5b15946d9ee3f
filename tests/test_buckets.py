"""The padded shapes of steps, and what a plan looks like in one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.plan import Chunk, StepPlan
from aserve.worker import buckets
from aserve.worker.buckets import DecodeShape, DrawShape, ForwardShape
from aserve.worker.inputs import DrawOptions

PADDING = 99
GREEDY = DrawOptions()


@given(st.integers(0, 1024), st.integers(0, 256), st.integers(1, 8192))
def test_a_forward_shape_holds_what_it_is_for(num_decodes: int, num_chunks: int, num_tokens: int) -> None:
    shape = buckets.forward_shape(num_decodes, num_chunks, num_tokens)
    assert shape.num_decodes >= num_decodes and shape.num_chunks >= num_chunks
    assert num_tokens <= shape.num_tokens <= max(num_tokens + 15, 1.25 * num_tokens)
    assert (shape.num_decodes == 0) == (num_decodes == 0) and (shape.num_chunks == 0) == (num_chunks == 0)


@given(st.integers(1, 1024))
def test_decodes_are_padded_by_little(count: int) -> None:
    assert count <= buckets.decode_rows(count) < count + max(4, min(32, count))


def test_tokens_that_no_row_owns_follow_the_rows_of_a_forward_pass() -> None:
    plan = StepPlan(1, (7, 3), (Chunk(5, 4, (40, 41, 42), (5,)), Chunk(6, 0, (50, 51))))
    shape = ForwardShape(16, 4, 3)
    fields = np.split(buckets.pack_forward(plan, shape, PADDING), np.cumsum(shape.sizes[:-1]))
    slots, ids, positions, row_slots, row_ends, starts = (field.tolist() for field in fields)
    assert slots == [7, 3, 5, 5, 5, 6, 6, *[PADDING] * 9]
    assert ids == [-1, -1, 40, 41, 42, 50, 51, *[0] * 9]
    assert positions == [-1, -1, 4, 5, 6, 0, 1, *[0] * 9]
    assert row_slots == [7, 3, PADDING, PADDING, 5, 6, PADDING]
    assert row_ends == [-1, -1, 0, 0, 7, 2, 0]  # -1: what the slot has; 0: a missing row
    assert starts == [0, 1, 2, 2, 2, 5, 7, 7]


def test_draws_name_the_tokens_whose_hidden_states_they_read() -> None:
    shape = DrawShape(4, GREEDY)
    packed = buckets.pack_draws((7, 5), np.array([0, 4]), np.array([9, 7]), shape, PADDING)
    slots, ends, starts = (field.tolist() for field in np.split(packed, np.cumsum(shape.sizes[:-1])))
    assert slots == [7, 5, PADDING, PADDING]
    assert ends == [9, 7, 1, 1]
    assert [start - 1 for start in starts[1:]] == [0, 4, 0, 0]


def test_decodes_come_with_room_for_a_new_block_each() -> None:
    shape = DecodeShape(4, GREEDY)
    fields = np.split(buckets.pack_decodes((8, 2), shape, PADDING), np.cumsum(shape.sizes[:-1]))
    assert fields[0].tolist() == [-1] * 4
    assert fields[1].tolist() == [8, 2, PADDING, PADDING]
    assert fields[5].tolist() == [-1, -1, 1, 1]
    assert fields[6].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("max_num_seqs", [1, 8, 100, 1024])
def test_likely_shapes_cover_every_batch_of_decodes(max_num_seqs: int) -> None:
    shapes = list(buckets.likely_shapes(max_num_seqs))
    for options in (GREEDY, DrawOptions(all_greedy=False)):
        sizes = {shape.num_rows for shape in shapes if isinstance(shape, DecodeShape) and shape.options == options}
        assert sizes == {buckets.decode_rows(count) for count in range(1, max_num_seqs + 1)}
    assert len(set(shapes)) == len(shapes) < 600
