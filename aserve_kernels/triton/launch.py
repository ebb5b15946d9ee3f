"""Programmatic dependent launch (CUDA 12, Hopper): a kernel starts while its predecessor drains.

Every kernel here calls `begin` before it touches what its predecessor writes or reads. What kernels before that one
wrote is complete already, since a kernel lets its successor start only once its own wait is over: weights, lengths and
page tables may be fetched early.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits until the kernel before is done and its writes are visible, then lets the next one start its prologue."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Starts moving the lines at `pointers` into the L2 cache. CUDA only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that calls `begin`."""
    return {"PDL": True, "launch_pdl": True} if _supported(device) else {"PDL": False}
