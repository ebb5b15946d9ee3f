"""The header of a safetensors file (https://github.com/huggingface/safetensors#format): which tensors lie where.

files.py asks whether a file is whole, checkpoint.py where to read. A header that says what cannot be is refused here,
so that no one reads outside of a tensor. No torch.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from aserve.errors import ConfigError

_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16}
_BITS |= {"BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4}


class Stored(NamedTuple):
    """A tensor in a file: its bytes are [offset, offset + num_bytes)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by name, all of them within it. Raises ConfigError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError(f"its header has {length} bytes, the file {size}")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        start = 8 + length
        found = {name: _entry(path, name, entry, start) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise ConfigError(f"{path} is damaged or cut short ({error}): copy it again", param="model") from error
    end = start
    for name, stored in sorted(found.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if stored.offset < end:
            raise ConfigError(f"{path} is damaged ({name} begins within another tensor): copy it again", param="model")
        end = stored.offset + stored.num_bytes
    if size < end:
        raise ConfigError(f"{path} is cut short: {size} of {end} bytes: copy it again", param="model")
    return found


def _entry(path: Path, name: str, entry: Any, start: int) -> Stored:
    """One tensor of a header. Raises ValueError."""
    if not isinstance(entry, dict):
        raise ValueError(f"its header has {entry!r} for {name}")
    dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _counts(shape) or not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"its header has type {dtype!r}, shape {shape!r} and place {span!r} for {name}")
    num_bytes = span[1] - span[0]
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != 8 * num_bytes:
        raise ValueError(f"{name} of type {dtype} and shape {shape} does not have {num_bytes} bytes")
    return Stored(path, dtype, tuple(shape), start + span[0], num_bytes)


def _counts(value: Any) -> TypeGuard[list[int]]:
    """True for a list of numbers from 0 on."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
