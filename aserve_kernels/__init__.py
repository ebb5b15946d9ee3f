"""The model's hot operations over paged memory: one namespace of functions per backend, same signatures.

`load("torch")` gives the pure-torch twins (the oracle, and the CPU path); `load("triton")` the CUDA kernels. Imports
nothing of aserve, no asyncio. Everything that a decode step calls can be captured in a CUDA graph: no host reads of
device values, no data-dependent shapes.
"""

from __future__ import annotations

import importlib
from typing import Literal, cast

from aserve_kernels.ops import AttentionMeta, Kernels, SamplingRows

__all__ = ["AttentionMeta", "Kernels", "SamplingRows", "load"]


def load(backend: Literal["torch", "triton", "flash"]) -> Kernels:
    """The kernels of a backend. Raises ImportError where its library is missing."""
    return cast(Kernels, importlib.import_module(f"aserve_kernels.{backend}_ops"))
