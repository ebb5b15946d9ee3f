"""The ends of a step, one launch each: the host's updates of slot state, from it to the model's inputs, and from draws
to slot state.

aserve/worker/graphs.py captures them in a CUDA graph; worker/inputs.py does the same with torch operations. Slot state
is one element (or block-table row) per slot, as inputs.SlotState keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve_kernels.triton.launch import begin, overlapped


@dataclass(frozen=True, slots=True)
class StepRows:
    """What the host says of a padded step, int64 on the device: T tokens, R rows, S draws.

    A `token_ids`, `token_positions` or `row_ends` of -1 stands for what the slot's state holds.
    """

    new_blocks: Tensor | None  # [R]: the page that the row's last position is the first of, or -1; T = R then
    token_slots: Tensor  # [T]
    token_ids: Tensor  # [T]
    token_positions: Tensor  # [T]
    row_slots: Tensor  # [R]
    row_ends: Tensor  # [R]: context after the step; 0 for a padding row of a mixed step
    query_starts: Tensor  # [R + 1]
    draw_rows: Tensor  # [S]
    draw_slots: Tensor  # [S]


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """The slot state that these kernels read and write, [num_slots, ...] each."""

    last_token: Tensor  # int64
    position: Tensor  # int64: where last_token will be computed
    prompt_len: Tensor  # int64
    seed: Tensor  # int64
    choice: Tensor  # int64
    top_k: Tensor  # int64
    temperature: Tensor  # float32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    block_table: Tensor  # int32 [num_slots, max_blocks]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model and the draw read; same shapes and meanings as AttentionMeta's and SamplingRows'."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    seq_lens: Tensor  # int32 [R]
    query_starts: Tensor  # int32 [R + 1]
    block_tables: Tensor  # int32 [R, max_blocks]
    hidden_rows: Tensor  # int64 [S]: the token whose hidden state each draw reads
    output_index: Tensor  # int64 [S]
    seeds: Tensor  # int64 [S]
    choices: Tensor  # int64 [S]
    top_k: Tensor  # int64 [S]
    temperature: Tensor  # float32 [S]
    top_p: Tensor  # float32 [S]
    min_p: Tensor  # float32 [S]


@triton.jit
def _update_kernel(
    header_ptr,
    prompt_len_ptr,
    seed_ptr,
    choice_ptr,
    top_k_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    block_table_ptr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    first = tl.program_id(0) * BLOCK
    num_slots = tl.load(header_ptr + 1).to(tl.int32)
    num_blocks = tl.load(header_ptr + 2).to(tl.int32)
    words = header_ptr + tl.load(header_ptr)
    for start in range(first, num_slots, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < num_slots
        slot = tl.load(words + i, mask=mask, other=0)
        i += num_slots
        tl.store(prompt_len_ptr + slot, tl.load(words + i, mask=mask), mask=mask)
        i += num_slots
        tl.store(seed_ptr + slot, tl.load(words + i, mask=mask), mask=mask)
        i += num_slots
        tl.store(choice_ptr + slot, tl.load(words + i, mask=mask), mask=mask)
        i += num_slots
        tl.store(top_k_ptr + slot, tl.load(words + i, mask=mask), mask=mask)
        i += num_slots
        bits = tl.load(words + i, mask=mask).to(tl.int32)
        tl.store(temperature_ptr + slot, bits.to(tl.float32, bitcast=True), mask=mask)
        i += num_slots
        bits = tl.load(words + i, mask=mask).to(tl.int32)
        tl.store(top_p_ptr + slot, bits.to(tl.float32, bitcast=True), mask=mask)
        i += num_slots
        bits = tl.load(words + i, mask=mask).to(tl.int32)
        tl.store(min_p_ptr + slot, bits.to(tl.float32, bitcast=True), mask=mask)
    words += 8 * num_slots
    for start in range(first, num_blocks, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < num_blocks
        at = tl.load(words + i, mask=mask, other=0)
        block = tl.load(words + num_blocks + i, mask=mask, other=0)
        tl.store(block_table_ptr + at, block.to(tl.int32), mask=mask)


def update_slots(header: Tensor, slots: SlotTensors) -> None:
    """Writes what the words say, int64: `header` holds how far behind it they begin, and how many slots and block table
    entries they are for. Of each slot there are its number, prompt_len, seed, choice, top_k and the float32 bits of
    temperature, top_p and min_p; of each entry its place and the block; one kind after the other."""
    programs = 8
    _update_kernel[(programs,)](
        header,
        slots.prompt_len,
        slots.seed,
        slots.choice,
        slots.top_k,
        slots.temperature,
        slots.top_p,
        slots.min_p,
        slots.block_table,
        BLOCK=128,
        PROGRAMS=programs,
        **overlapped(header.device),
    )


@triton.jit
def _row_end(row, row_slots_ptr, row_ends_ptr, position_ptr, mask):
    end = tl.load(row_ends_ptr + row, mask=mask, other=0)
    slot = tl.load(row_slots_ptr + row, mask=mask, other=0)
    return tl.where(end < 0, tl.load(position_ptr + slot, mask=mask, other=0) + 1, end)


@triton.jit
def _inputs_kernel(
    token_slots_ptr,
    given_ids_ptr,
    given_positions_ptr,
    row_slots_ptr,
    row_ends_ptr,
    given_starts_ptr,
    draw_rows_ptr,
    draw_slots_ptr,
    new_blocks_ptr,
    last_token_ptr,
    position_ptr,
    prompt_len_ptr,
    seed_ptr,
    choice_ptr,
    top_k_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    block_table_ptr,
    ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    block_tables_ptr,
    hidden_rows_ptr,
    output_index_ptr,
    seeds_ptr,
    choices_ptr,
    top_ks_ptr,
    temperatures_ptr,
    top_ps_ptr,
    min_ps_ptr,
    num_tokens,
    num_rows,
    num_draws,
    max_blocks,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)

    if program * BLOCK < num_tokens:
        mask = at < num_tokens
        slot = tl.load(token_slots_ptr + at, mask=mask, other=0)
        token = tl.load(given_ids_ptr + at, mask=mask, other=0)
        token = tl.where(token < 0, tl.load(last_token_ptr + slot, mask=mask, other=0), token)
        position = tl.load(given_positions_ptr + at, mask=mask, other=0)
        position = tl.where(position < 0, tl.load(position_ptr + slot, mask=mask, other=0), position)
        block = tl.load(block_table_ptr + slot * max_blocks + position // PAGE, mask=mask, other=0).to(tl.int64)
        if GROWS:
            new = tl.load(new_blocks_ptr + at, mask=mask, other=-1)
            block = tl.where(new >= 0, new, block)
        tl.store(ids_ptr + at, token, mask=mask)
        tl.store(positions_ptr + at, position, mask=mask)
        tl.store(slot_mapping_ptr + at, block * PAGE + position % PAGE, mask=mask)

    if program * BLOCK < num_draws:
        mask = at < num_draws
        row = tl.load(draw_rows_ptr + at, mask=mask, other=0)
        slot = tl.load(draw_slots_ptr + at, mask=mask, other=0)
        end = _row_end(row, row_slots_ptr, row_ends_ptr, position_ptr, mask)
        prompt_len = tl.load(prompt_len_ptr + slot, mask=mask, other=0)
        tl.store(output_index_ptr + at, tl.maximum(end - prompt_len, 0), mask=mask)
        hidden_row = tl.load(given_starts_ptr + row + 1, mask=mask, other=1) - 1
        tl.store(hidden_rows_ptr + at, tl.maximum(hidden_row, 0), mask=mask)
        tl.store(seeds_ptr + at, tl.load(seed_ptr + slot, mask=mask), mask=mask)
        tl.store(choices_ptr + at, tl.load(choice_ptr + slot, mask=mask), mask=mask)
        tl.store(top_ks_ptr + at, tl.load(top_k_ptr + slot, mask=mask), mask=mask)
        tl.store(temperatures_ptr + at, tl.load(temperature_ptr + slot, mask=mask), mask=mask)
        tl.store(top_ps_ptr + at, tl.load(top_p_ptr + slot, mask=mask), mask=mask)
        tl.store(min_ps_ptr + at, tl.load(min_p_ptr + slot, mask=mask), mask=mask)

    if program < num_rows:
        tl.store(query_starts_ptr + program, tl.load(given_starts_ptr + program).to(tl.int32))
        if program == num_rows - 1:
            tl.store(query_starts_ptr + num_rows, tl.load(given_starts_ptr + num_rows).to(tl.int32))
        end = _row_end(program, row_slots_ptr, row_ends_ptr, position_ptr, True)
        tl.store(seq_lens_ptr + program, end.to(tl.int32))
        slot = tl.load(row_slots_ptr + program)
        row = program.to(tl.int64)
        last, new = -1, -1
        if GROWS:
            last, new = (end - 1) // PAGE, tl.load(new_blocks_ptr + program)
            tl.store(block_table_ptr + slot * max_blocks + last, new.to(tl.int32), mask=new >= 0)
        for start in range(0, tl.cdiv(end, PAGE), BLOCK):  # to a whole BLOCK of pages: what lies beyond is never read
            page = start + tl.arange(0, BLOCK)
            block = tl.load(block_table_ptr + slot * max_blocks + page, mask=page < max_blocks, other=0)
            if GROWS:
                block = tl.where((page == last) & (new >= 0), new.to(tl.int32), block)
            tl.store(block_tables_ptr + row * max_blocks + page, block, mask=page < max_blocks)


def step_inputs(rows: StepRows, slots: SlotTensors, block_size: int) -> StepInputs:
    """New tensors made from the rows and the slots' state, whose block tables first get the rows' new blocks."""
    num_tokens, num_rows, num_draws = (t.shape[0] for t in (rows.token_slots, rows.row_slots, rows.draw_slots))
    device = rows.token_slots.device
    max_blocks = slots.block_table.shape[1]

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    inputs = StepInputs(
        token_ids=new(num_tokens),
        positions=new(num_tokens),
        slot_mapping=new(num_tokens),
        seq_lens=new(num_rows, dtype=torch.int32),
        query_starts=new(num_rows + 1, dtype=torch.int32),
        block_tables=new(num_rows, max_blocks, dtype=torch.int32),
        hidden_rows=new(num_draws),
        output_index=new(num_draws),
        seeds=new(num_draws),
        choices=new(num_draws),
        top_k=new(num_draws),
        temperature=new(num_draws, dtype=torch.float32),
        top_p=new(num_draws, dtype=torch.float32),
        min_p=new(num_draws, dtype=torch.float32),
    )
    block = 128
    _inputs_kernel[(max(num_rows, triton.cdiv(max(num_tokens, num_draws), block)),)](
        rows.token_slots,
        rows.token_ids,
        rows.token_positions,
        rows.row_slots,
        rows.row_ends,
        rows.query_starts,
        rows.draw_rows,
        rows.draw_slots,
        rows.token_slots if rows.new_blocks is None else rows.new_blocks,
        slots.last_token,
        slots.position,
        slots.prompt_len,
        slots.seed,
        slots.choice,
        slots.top_k,
        slots.temperature,
        slots.top_p,
        slots.min_p,
        slots.block_table,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        inputs.query_starts,
        inputs.block_tables,
        inputs.hidden_rows,
        inputs.output_index,
        inputs.seeds,
        inputs.choices,
        inputs.top_k,
        inputs.temperature,
        inputs.top_p,
        inputs.min_p,
        num_tokens,
        num_rows,
        num_draws,
        max_blocks,
        PAGE=block_size,
        BLOCK=block,
        GROWS=rows.new_blocks is not None,
        **overlapped(device),
    )
    return inputs


@triton.jit
def _commit_kernel(
    drawn_ptr,
    tokens_ptr,
    hidden_ptr,
    logits_ptr,
    draw_rows_ptr,
    draw_slots_ptr,
    seq_lens_ptr,
    last_token_ptr,
    position_ptr,
    num_draws,
    hidden_stride,
    logits_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    draw = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + draw)
    slot = tl.load(draw_slots_ptr + draw)
    seq_len = tl.load(seq_lens_ptr + tl.load(draw_rows_ptr + draw))
    tl.store(last_token_ptr + slot, token)
    tl.store(position_ptr + slot, seq_len.to(tl.int64))
    # a NaN or inf among the logits comes from the hidden state, or wins the draw
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(hidden_ptr + draw * hidden_stride + column, mask=column < H, other=0.0).to(tl.float32)
    chosen = tl.load(logits_ptr + draw * logits_stride + token).to(tl.float32)
    finite = (tl.abs(tl.sum(total, axis=0)) < float("inf")) & (chosen < float("inf"))
    tl.store(drawn_ptr + draw, token)
    tl.store(drawn_ptr + num_draws + draw, finite.to(tl.int64))


def commit_draws(
    tokens: Tensor, hidden: Tensor, logits: Tensor, rows: StepRows, inputs: StepInputs, slots: SlotTensors
) -> Tensor:
    """Makes the tokens [S] their slots' last ones, at the next position. Returns int64 [2, S]: tokens, and 1 where
    the draw's logits were finite."""
    num_draws, size = hidden.shape
    drawn = torch.empty(2, num_draws, dtype=torch.int64, device=tokens.device)
    _commit_kernel[(num_draws,)](
        drawn,
        tokens,
        hidden,
        logits,
        rows.draw_rows,
        rows.draw_slots,
        inputs.seq_lens,
        slots.last_token,
        slots.position,
        num_draws,
        hidden.stride(0),
        logits.stride(0),
        H=size,
        BLOCK=min(2048, triton.next_power_of_2(size)),
        **overlapped(tokens.device),
    )
    return drawn
