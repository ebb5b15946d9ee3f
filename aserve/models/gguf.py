"""A GGUF file: its metadata and its tensors, read through a memory map.

gguf_convert.py and gguf_tokenizer.py read it. The `gguf` package knows the quantized formats; its own reader makes
an array per string and takes ten seconds over a vocabulary of 262,144 tokens, so the header is parsed here.
Never loads a tensor that is not asked for. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aserve.errors import ConfigError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in torch's order; `offset` is absolute in the file of index `part`."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    part: int
    offset: int


class GGUFFile:
    """An open GGUF model, of one file or of a split set given by any of its files.

    Raises ConfigError for a file that is no GGUF, is cut short, or whose set is incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: list[mmap.mmap] = []
        for part, part_path in enumerate(split_paths(path)):
            self._open(part, part_path)

    def _open(self, part: int, path: Path) -> None:
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
        self._maps.append(mapped)
        cursor = _Cursor(mapped)
        try:
            if mapped[:4] != b"GGUF":
                raise ConfigError(f"{path} is not a GGUF file: it does not begin with 'GGUF'", param="model")
            cursor.position = 4
            version, num_tensors, num_keys = cursor.unpack("IQQ")
            if version not in (2, 3):
                raise ConfigError(f"{path} has GGUF version {version}; versions 2 and 3 are read", param="model")
            metadata = {}
            for _ in range(num_keys):
                key = cursor.string()
                metadata[key] = cursor.value(cursor.unpack("I")[0])
            infos = [self._tensor_info(cursor, part) for _ in range(num_tensors)]
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is damaged or cut short: {error}", param="model") from error
        if part == 0:
            self.metadata = metadata
        alignment = metadata.get("general.alignment", 32)
        start = -(-cursor.position // alignment) * alignment
        for info in infos:
            placed = TensorInfo(info.name, info.shape, info.type_id, part, start + info.offset)
            end = placed.offset + self._num_bytes(placed)
            if end > len(mapped):
                raise ConfigError(
                    f"{path} is cut short: tensor {info.name} ends at byte {end}, the file has {len(mapped)}",
                    param="model",
                )
            self.tensors[info.name] = placed

    @staticmethod
    def _tensor_info(cursor: _Cursor, part: int) -> TensorInfo:
        name = cursor.string()
        (num_dims,) = cursor.unpack("I")
        dims = cursor.unpack(f"{num_dims}Q")
        type_id, offset = cursor.unpack("IQ")
        return TensorInfo(name, tuple(reversed(dims)), type_id, part, offset)

    def _num_bytes(self, info: TensorInfo) -> int:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_id)]
        except (ValueError, KeyError):
            raise ConfigError(
                f"{self.path}: tensor {info.name} has type {info.type_id}, which the gguf package does not know",
                param="model",
            ) from None
        num_elements = int(np.prod(info.shape, dtype=np.int64))
        return num_elements // int(block_size) * int(type_size)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, such as "gemma3"."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value of the architecture's own section: get("block_count") reads "gemma3.block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def rows(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 [rows, bytes per row]: a view of the file. A vector is one row."""
        info = self.tensors[name]
        num_rows = int(np.prod(info.shape[:-1], dtype=np.int64)) if len(info.shape) > 1 else 1
        view = np.frombuffer(self._maps[info.part], np.uint8, self._num_bytes(info), info.offset)
        return view.reshape(num_rows, -1)

    def dequantize(self, name: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        """float32 values of stored rows of tensor `name`, exact."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(self.tensors[name].type_id)
        try:
            return np.asarray(dequantize(rows, kind), dtype=np.float32)
        except NotImplementedError:
            raise ConfigError(
                f"{self.path}: tensor {name} is {kind.name}, which the gguf package cannot dequantize", param="model"
            ) from None

    def values(self, name: str) -> NDArray[np.float32]:
        """A whole tensor in float32."""
        return self.dequantize(name, self.rows(name)).reshape(self.tensors[name].shape)


def split_paths(path: Path) -> list[Path]:
    """The files of a model: `path` alone, or for x-00001-of-00003.gguf the three, in order."""
    found = _SPLIT_NAME.fullmatch(path.name)
    if found is None:
        return [path]
    stem, _, count = found.groups()
    paths = [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    for part in paths:
        if not part.is_file():
            raise ConfigError(f"{part} is missing: {path.name} is one of a set of {int(count)} files", param="model")
    return paths


class _Cursor:
    """Reads little-endian values of a header one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def unpack(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self.data, self.position)
        self.position += struct.calcsize(f"<{kinds}")
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        return self._bytes(length).decode()

    def _bytes(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.data):
            raise IndexError(f"a string ends at byte {end}, the file has {len(self.data)}")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise IndexError(f"metadata of unknown type {kind}")
            return self.unpack(_SCALARS[kind])[0]
        item, count = self.unpack("IQ")
        if item == _STRING:
            return self._strings(count)
        if item == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        if item not in _SCALARS:
            raise IndexError(f"an array of unknown type {item}")
        return list(self.unpack(f"{count}{_SCALARS[item]}"))

    def _strings(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands of these: a loop without calls of ours, over plain bytes."""
        data, position, size = self.data, self.position, len(self.data)
        taken = []
        for _ in range(count):
            start = position + 8
            position = start + int.from_bytes(data[position:start], "little")
            if position > size:
                raise IndexError(f"a string ends at byte {position}, the file has {size}")
            taken.append(data[start:position].decode())
        self.position = position
        return taken
