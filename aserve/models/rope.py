"""Tables of cosines and sines for rotary position embeddings (Su et al., 2021) and their scaled kinds.

decoder.py makes one per RopeConfig at load. The frequencies are computed in float32 step by step as transformers'
modeling_rope_utils.py does, so that tables agree to the last bit; no table changes after load.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from aserve.models.families import RopeConfig

_ROWS = 4096  # of the table at a time: a long context's is as large as a weight


def cos_sin_table(rope: RopeConfig, num_positions: int, device: torch.device) -> Tensor:
    """float32 [num_positions, rope.dim]: cosines of the dim / 2 angles, then their sines."""
    inverse, factor = frequencies(rope, num_positions)
    half, inverse = len(inverse), inverse.to(device)
    table = torch.empty(num_positions, 2 * half, dtype=torch.float32, device=device)
    for start in range(0, num_positions, _ROWS):
        part = table[start : start + _ROWS]
        positions = torch.arange(start, start + len(part), dtype=torch.float32, device=device)
        angles = positions.unsqueeze(1) * inverse
        part[:, :half], part[:, half:] = angles.cos() * factor, angles.sin() * factor
    return table


def frequencies(rope: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    """Inverse wavelengths float32 [dim / 2] on the host, and what cosines and sines are multiplied by."""
    scaling = dict(rope.scaling)
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    inverse = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "linear":
            return inverse / scaling["factor"], 1.0
        case "llama3":
            return _llama3(inverse, scaling), 1.0
        case "yarn":
            return _yarn(rope, scaling), _yarn_factor(scaling)
        case "longrope":
            return _longrope(rope, exponents, scaling, num_positions), _longrope_factor(scaling)
        case _:  # dynamic scaling begins beyond the context that is served
            return inverse, 1.0


def _llama3(inverse: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeConfig, scaling: dict[str, Any]) -> Tensor:
    """YaRN (Peng et al., 2023): interpolate slow dimensions, keep fast ones, ramp between."""
    dim, theta, original = rope.dim, rope.theta, scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ramp
    inverse: Tensor = 1.0 / (scaling["factor"] * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return inverse


def _yarn_factor(scaling: dict[str, Any]) -> float:
    if (stated := scaling.get("attention_factor")) is not None:
        return float(stated)

    def magnitude(weight: float) -> float:
        factor = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(over) / magnitude(under) if over and under else magnitude(1.0)


def _longrope(rope: RopeConfig, exponents: Tensor, scaling: dict[str, Any], num_positions: int) -> Tensor:
    """LongRoPE (Ding et al., 2024): a divisor per dimension; the long set once more positions are served than the
    model was first trained for, so that all keys of a sequence turn alike."""
    long = num_positions > scaling["original_max_position_embeddings"]
    divisors = torch.tensor(scaling["long_factor" if long else "short_factor"], dtype=torch.float32)
    wavelengths: Tensor = divisors * rope.theta**exponents
    return 1.0 / wavelengths


def _longrope_factor(scaling: dict[str, Any]) -> float:
    if (stated := scaling.get("attention_factor")) is not None:
        return float(stated)
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
