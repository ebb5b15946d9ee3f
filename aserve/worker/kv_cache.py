"""The KV pools: one key and one value tensor per layer on the device, and a host pool for swapped blocks.

Owned by runner.py, which applies a plan's copies through it in the plan's order. Block ids come from the scheduler and
are trusted; the last device block is scratch, where padding rows write, and no sequence owns it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aserve.models import KVCache, ModelSpec
from aserve.plan import BlockCopy
from aserve_kernels import Kernels

_STAGED_BYTES = 128 << 20
_RATE_BYTES = 32 << 20  # moved each way to measure the copy rate


def block_bytes(spec: ModelSpec, block_size: int) -> int:
    """Bytes of one block in all layers, keys and values."""
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize


class KVPools:
    """Device pools `caches` and the host pool, block-major so that one block is one contiguous transfer."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        shape = (num_gpu_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)

        def pool() -> Tensor:
            return _zeros(shape, spec.dtype, device)  # zeroed: a masked NaN would still spread

        self.caches: list[KVCache] = [(pool(), pool()) for _ in range(spec.num_layers)]
        self.block_size = block_size
        self.scratch_block = num_gpu_blocks
        self._flat = [tensor for pair in self.caches for tensor in pair]
        self._kernels = kernels
        self._device = device
        self.host = torch.empty(
            (num_cpu_blocks, len(self._flat), *shape[1:]), dtype=spec.dtype, pin_memory=device.type == "cuda"
        )

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks within the device pool; every source is read before any target is written."""
        self._kernels.copy_blocks_(self._flat, torch.tensor(copies, dtype=torch.int64, device=self._device))

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Device blocks (sources) to host blocks (targets), in stream order on CUDA."""
        if self._device.type == "cpu":
            sources, targets = _columns(copies)
            for part, cache in enumerate(self._flat):
                _bytes(self.host)[targets, part] = _bytes(cache)[sources]
            return
        for piece in self._pieces(copies):
            blocks = torch.tensor([copy.source for copy in piece], dtype=torch.int64, device=self._device)
            staged = self._kernels.gather_blocks(self._flat, blocks).transpose(0, 1).contiguous()
            for each, copy in zip(staged, piece, strict=True):
                self.host[copy.target].copy_(each, non_blocking=True)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Host blocks (sources) to device blocks (targets)."""
        if self._device.type == "cpu":
            sources, targets = _columns(copies)
            for part, cache in enumerate(self._flat):
                _bytes(cache)[targets] = _bytes(self.host)[sources, part]
            return
        for piece in self._pieces(copies):
            staged = torch.empty((len(piece), *self.host.shape[1:]), dtype=self.host.dtype, device=self._device)
            for each, copy in zip(staged, piece, strict=True):
                each.copy_(self.host[copy.source], non_blocking=True)
            blocks = torch.tensor([copy.target for copy in piece], dtype=torch.int64, device=self._device)
            self._kernels.scatter_blocks_(self._flat, blocks, staged.transpose(0, 1))

    def _pieces(self, copies: Sequence[BlockCopy]) -> Iterator[Sequence[BlockCopy]]:
        """Copies of at most _STAGED_BYTES: what is staged on the device is memory that nobody planned for."""
        size = max(1, _STAGED_BYTES // max(1, self.host[:1].nbytes))
        return (copies[start : start + size] for start in range(0, len(copies), size))

    def measure_copy_rate(self) -> float:
        """Bytes a second between the pools, out and in again; call before any block is owned. Infinite without a host
        pool: nothing is ever copied."""
        block_bytes = self.host[:1].nbytes
        count = min(len(self.host), self.scratch_block, max(1, _RATE_BYTES // max(1, block_bytes)))
        if not count:
            return float("inf")
        copies = [BlockCopy(block, block) for block in range(count)]
        self.swap_out(copies)  # zeros; memory is taken at its first write
        self.swap_in(copies)
        self._synchronize()
        start = time.perf_counter()
        self.swap_out(copies)
        self.swap_in(copies)
        self._synchronize()
        return 2 * count * block_bytes / (time.perf_counter() - start)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def scrub(self, blocks: Tensor) -> None:
        """Replaces non-finite keys and values of these blocks by zero, so that whoever owns them next is not hurt."""
        for cache in self._flat:
            cache.index_copy_(0, blocks, cache.index_select(0, blocks).nan_to_num_(0.0, 0.0, 0.0))


def _columns(copies: Sequence[BlockCopy]) -> tuple[Any, Any]:
    """Sources and targets."""
    table = np.array(copies, dtype=np.int64)
    return table[:, 0], table[:, 1]


def _bytes(tensor: Tensor) -> Any:
    """The tensor's memory for numpy, which copies it on this thread alone: torch would wait for a team of threads, and
    a busy machine makes that longer than the copy."""
    return tensor.view(torch.uint8).numpy()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the host numpy's, which take memory only where they are written (torch writes them all at once)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)).view(dtype)
