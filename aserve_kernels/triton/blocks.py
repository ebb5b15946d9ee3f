"""Moves of whole KV blocks: copy-on-write inside the pools, and the staging buffer of a swap.

One launch serves every layer: the pools' addresses travel in a small table. Called between steps, never captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _move_blocks_kernel(sources_ptr, targets_ptr, source_blocks_ptr, target_blocks_ptr, num_words, BLOCK: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pool = tl.program_id(1)
    index = tl.program_id(2)
    source = tl.load(sources_ptr + pool).to(tl.pointer_type(tl.int64))
    target = tl.load(targets_ptr + pool).to(tl.pointer_type(tl.int64))
    source += tl.load(source_blocks_ptr + index) * num_words
    target += tl.load(target_blocks_ptr + index) * num_words
    mask = word < num_words
    tl.store(target + word, tl.load(source + word, mask=mask), mask=mask)


def _move(sources: list[Tensor], targets: list[Tensor], source_blocks: Tensor, target_blocks: Tensor) -> None:
    """targets[i][target_blocks[j]] = sources[i][source_blocks[j]] for all i, j; no target is another's source."""
    if not sources or source_blocks.numel() == 0:
        return
    block_bytes = sources[0][0].numel() * sources[0].element_size()
    assert block_bytes % 8 == 0 and all(pool.is_contiguous() for pool in (*sources, *targets))
    addresses = torch.tensor([[pool.data_ptr() for pool in pools] for pools in (sources, targets)])
    addresses = addresses.to(source_blocks.device)
    words = block_bytes // 8
    _move_blocks_kernel[(triton.cdiv(words, 1024), len(sources), source_blocks.numel())](
        addresses[0], addresses[1], source_blocks.contiguous(), target_blocks.contiguous(), words, BLOCK=1024
    )


def copy_blocks_(caches: list[Tensor], pairs: Tensor) -> None:
    """See ops.Kernels."""
    pairs = pairs.to(torch.int64)
    _move(caches, caches, pairs[:, 0], pairs[:, 1])


def gather_blocks(caches: list[Tensor], blocks: Tensor) -> Tensor:
    """See ops.Kernels."""
    staged = caches[0].new_empty(len(caches), blocks.numel(), *caches[0].shape[1:])
    _move(caches, list(staged), blocks.to(torch.int64), torch.arange(blocks.numel(), device=blocks.device))
    return staged


def scatter_blocks_(caches: list[Tensor], blocks: Tensor, staged: Tensor) -> None:
    """See ops.Kernels."""
    staged = staged.contiguous()
    _move(list(staged), caches, torch.arange(blocks.numel(), device=blocks.device), blocks.to(torch.int64))
