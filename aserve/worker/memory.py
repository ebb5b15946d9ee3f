"""How large things are: dtype, threads, KV blocks, context length. Called once by runner.py while loading.

Sizes that cannot work raise ConfigError with the numbers and the option to change.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.models import Model, ModelSpec
from aserve.worker.kv_cache import block_bytes
from aserve_kernels import AttentionMeta

logger = logging.getLogger("aserve.worker")
GIB = 1 << 30
_OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory", re.IGNORECASE)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Limits(NamedTuple):
    """The step bounds, resolved for the device."""

    max_num_seqs: int
    max_num_batched_tokens: int


class PoolSizes(NamedTuple):
    """Blocks in the device and host pools, and the longest context, in tokens."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    max_model_len: int


def resolve_device(config: EngineConfig) -> torch.device:
    """`auto` is CUDA where there is a card."""
    if config.device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device", param="device")
    return torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")


def resolve_dtype(config: EngineConfig, model_dtype: str | None, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the processor multiplies it natively, else float32; on CUDA the model's half type."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type == "cuda":
        return torch.float16 if model_dtype == "float16" else torch.bfloat16
    return torch.bfloat16 if _cpu_has_bfloat16() else torch.float32


def _cpu_has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def resolve_threads(config: EngineConfig) -> int:
    """The cores this process may use, or the option."""
    return config.num_threads or len(os.sched_getaffinity(0))


def resolve_limits(config: EngineConfig, device: torch.device) -> Limits:
    """How many sequences and tokens one step may hold."""
    # On CPU a prompt's tokens cost the same in small steps, and the first of several prompts answer sooner.
    seqs, tokens = (1024, 8192) if device.type == "cuda" else (64, 256)
    max_num_seqs = config.max_num_seqs or seqs
    return Limits(max_num_seqs, config.max_num_batched_tokens or max(tokens, max_num_seqs))


def size_pools(config: EngineConfig, spec: ModelSpec, *, available: int) -> PoolSizes:
    """Divides `available` bytes (what a device has left for KV) into blocks. Raises ConfigError when none fit."""
    per_block = block_bytes(spec, config.block_size)
    num_gpu_blocks = config.num_gpu_blocks_override or max(available, 0) // per_block
    if num_gpu_blocks < 1:
        raise ConfigError(
            f"no memory for KV: {available / GIB:.2f} GiB are left and one block of {config.block_size} tokens takes "
            f"{per_block / GIB:.4f} GiB; use a smaller model, or raise --gpu-memory-utilization or --kv-cache-memory",
            param="gpu_memory_utilization",
        )
    capacity = num_gpu_blocks * config.block_size
    longest = spec.max_position_embeddings
    if config.max_model_len is None:
        if longest > capacity:
            logger.warning(
                "the context is %d tokens, what the KV pool holds, and not the model's %d: "
                "raise --kv-cache-memory or --gpu-memory-utilization for more",
                capacity,
                longest,
            )
        longest = min(longest, capacity)
    elif config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is longer than the model's {longest} positions",
            param="max_model_len",
        )
    elif config.max_model_len > capacity:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} does not fit the KV pool of {capacity} tokens",
            param="max_model_len",
        )
    else:
        longest = config.max_model_len
    num_cpu_blocks = min(int(config.swap_space * GIB) // per_block, num_gpu_blocks)
    return PoolSizes(num_gpu_blocks, num_cpu_blocks, longest)


def check_host(*, kv_bytes: int, swap_bytes: int) -> None:
    """Raises ConfigError where pools on the host would not fit what memory the machine has to give.

    Linux gives memory out before it has it: without this the process is killed once the pools are used.
    """
    available = _host_available()
    if available is not None and kv_bytes + swap_bytes > available:
        option = "--kv-cache-memory" if kv_bytes >= swap_bytes else "--swap-space"
        raise ConfigError(
            f"{kv_bytes / GIB:.2f} GiB of KV cache and {swap_bytes / GIB:.2f} GiB of swap space do not fit the "
            f"{available / GIB:.2f} GiB of memory that are free: lower {option}",
            param=option[2:].replace("-", "_"),
        )


def _host_available() -> int | None:
    """Bytes a process may still take without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


@contextmanager
def stage(doing: str, options: str) -> Iterator[None]:
    """Turns running out of memory within into a ConfigError that names what was done and the `options` to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"out of memory while {doing} ({reason}): {options}", param="memory") from error


def run_largest_step(model: Model, limits: Limits, config: EngineConfig, device: torch.device) -> None:
    """The largest step there can be, over a throwaway pool, so that the peak of memory is known."""
    spec, block_size = model.spec, config.block_size
    count = limits.max_num_batched_tokens
    longest = min(count, config.max_model_len or spec.max_position_embeddings)
    ends = [*range(longest, count, longest), count]
    starts = torch.tensor([0, *ends], dtype=torch.int32)
    lens = starts.diff()
    positions = torch.cat([torch.arange(int(n)) for n in lens])
    width = -(-longest // block_size)
    rows = torch.repeat_interleave(torch.arange(len(ends)), lens)
    tables = torch.arange(len(ends) * width, dtype=torch.int32).view(-1, width)
    meta = AttentionMeta(
        num_decodes=0,
        positions=positions.to(device),
        slot_mapping=(rows * width * block_size + positions).to(device),
        query_starts=starts.to(device),
        seq_lens=lens.to(device),
        block_tables=tables.to(device),
        max_query_len=longest,
        max_seq_len=longest,
    )
    shape = (tables.numel() + 1, block_size, spec.num_kv_heads, spec.head_dim)
    pair = [torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(2)]
    caches = [(pair[0], pair[1])] * spec.num_layers
    hidden = model.forward(torch.zeros_like(meta.positions), meta, caches)
    logits = model.logits(hidden[: limits.max_num_seqs]).float()
    logits.softmax(dim=-1)
    torch.cuda.synchronize(device)


def ran_out(error: Exception) -> bool:
    """True where memory was short. torch's host allocator and the CUDA driver have no type of their own for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def cuda_available_bytes(config: EngineConfig, device: torch.device) -> int:
    """What gpu_memory_utilization leaves for KV. Call after a profile run: its peak stays reserved for steps."""
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)  # other processes and the CUDA context
    return int(total * config.gpu_memory_utilization) - outside - torch.cuda.max_memory_allocated(device)
