"""What both sampling kernels share: logits by word, Gumbel noise, and the better of scores.

limits.py and sampling.py build on it. Random numbers are those of ops.philox_uniform.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _log(x):
    """libdevice's, because the hardware's log2 is off by 2e-7 near 1, where the largest Gumbel variates come from."""
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def load_logits(logits_ptr, at, V: tl.constexpr):
    return tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)


@triton.jit
def gumbel(word):
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    return -tl.log(-_log(u))


@triton.jit
def best_of(score, token):
    """Largest score and its token, the lowest of equals."""
    value = tl.max(score, axis=0)
    return value, tl.min(tl.where(score == value, token, 2147483647), axis=0)
