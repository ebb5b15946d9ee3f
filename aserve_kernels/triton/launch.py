"""Programmatic dependent launch (CUDA 12, Hopper): a kernel starts while its predecessor drains.

Every kernel here calls `begin` before it touches a tensor that another kernel writes or reads; weights may be fetched
before it. A chain of such kernels stays ordered: each ends only after it has waited for the one before.
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
    """Lets the next kernel start its prologue, then waits until every earlier one is done and visible."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that calls `begin`."""
    return {"PDL": True, "launch_pdl": True} if _supported(device) else {"PDL": False}
