"""Tensors of safetensors files, by name, and fast reads of them.

weights.py asks by name. On the host a tensor is a mapping of its part of the file, read ahead of its use; to a CUDA
device bytes go through a ring of pinned buffers that threads fill. Knows no model, keeps no tensor.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle  # nosec B403 # for its error; torch reads such files, with weights_only
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.models.stored import Stored, read_header

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_READ_AHEAD = 256 << 20  # bytes of a file that are on their way from the disk while a tensor is used
_BUFFER_BYTES = 16 << 20
_NUM_BUFFERS = 8
_NUM_READERS = 4  # one thread copies from the page cache at about a fifth of what a PCIe 5 link takes


class Checkpoint:
    """The tensors of several files, by name."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.tensors: dict[str, Stored] = {}
        self._advised: dict[Path, int] = {}  # up to which byte a file was asked for
        for path in paths:
            self.tensors |= read_header(path)

    def view(self, name: str) -> Tensor:
        """The tensor as a mapping of its file that ends with it: pages are read when it is, and let go after.

        Raises ConfigError for a dtype that is no floating-point number.
        """
        stored = self.tensors[name]
        dtype = dtype_of(name, stored)
        if not stored.num_bytes:
            return torch.empty(stored.shape, dtype=dtype)
        begin = stored.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with stored.path.open("rb") as file:
            self._read_ahead(file.fileno(), stored)
            length = stored.offset - begin + stored.num_bytes
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=begin)
        count = math.prod(stored.shape)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=stored.offset - begin).view(stored.shape)

    def _read_ahead(self, descriptor: int, stored: Stored) -> None:
        begin = max(stored.offset, self._advised.get(stored.path, 0))
        end = stored.offset + stored.num_bytes + _READ_AHEAD
        if begin < end:
            os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
            self._advised[stored.path] = end


def dtype_of(name: str, stored: Stored) -> torch.dtype:
    """The tensor's dtype. Raises ConfigError where it is not a floating-point number's."""
    if stored.dtype not in _DTYPES:
        raise ConfigError(f"{name} is {stored.dtype}: quantized checkpoints are not read", param="model")
    return _DTYPES[stored.dtype]


@dataclass(slots=True)
class _Buffer:
    """One pinned buffer of the ring, and the copy that it is part of."""

    memory: Tensor
    reading: Future[None] | None = None
    source: Tensor | None = None  # what was read, in its dtype
    target: Tensor | None = None
    sent: torch.cuda.Event | None = None


class PickledCheckpoint:
    """The tensors of torch.save's files, mapped, by name. Nothing but tensors is unpickled."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.tensors: dict[str, Stored] = {}
        self._views: dict[str, Tensor] = {}
        for path in paths:
            try:
                self._views |= torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise ConfigError(f"{path} cannot be read: {reason}", param="model") from error
        for name, view in self._views.items():
            self.tensors[name] = Stored(Path(), str(view.dtype), tuple(view.shape), 0, view.nbytes)

    def view(self, name: str) -> Tensor:
        """The tensor, a view of its file. Raises ConfigError for a dtype that is no floating-point number."""
        view = self._views[name]
        if not view.is_floating_point():
            raise ConfigError(f"{name} is {view.dtype}: quantized checkpoints are not read", param="model")
        return view


class DeviceCopier:
    """Copies tensors from files to a device: threads read into pinned buffers while earlier ones are on the bus.

    A copy is complete after `flush`. Called on one thread.
    """

    def __init__(self, device: torch.device, *, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._ring = [
            _Buffer(torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=cuda)) for _ in range(_NUM_BUFFERS)
        ]
        self._next = 0
        self._readers = ThreadPoolExecutor(_NUM_READERS, "aserve-load")
        self._files: dict[Path, int] = {}

    def copy(self, stored: Stored, dtype: torch.dtype, out: Tensor) -> None:
        """Fills the contiguous `out` with the tensor's numbers, in out's dtype."""
        if stored.path not in self._files:
            self._files[stored.path] = os.open(stored.path, os.O_RDONLY)
        flat = out.view(-1)
        size = self._ring[0].memory.numel()
        for start in range(0, stored.num_bytes, size):
            length = min(size, stored.num_bytes - start)
            buffer = self._ring[self._next]
            self._next = (self._next + 1) % len(self._ring)
            self._send(buffer)
            if buffer.sent is not None:
                buffer.sent.synchronize()
            part = buffer.memory[:length]
            buffer.source = part.view(dtype)
            buffer.target = flat[start // dtype.itemsize : (start + length) // dtype.itemsize]
            buffer.reading = self._readers.submit(_read, self._files[stored.path], part, stored.offset + start, stored)

    def flush(self) -> None:
        """Waits until all is on the device."""
        for step in range(len(self._ring)):
            self._send(self._ring[(self._next + step) % len(self._ring)])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Ends the threads and closes the files, dropping what `flush` has not waited for."""
        self._readers.shutdown(cancel_futures=True)
        while self._files:
            os.close(self._files.popitem()[1])

    def _send(self, buffer: _Buffer) -> None:
        """Starts the way to the device of what a buffer's reader has read."""
        if buffer.reading is None:
            return
        assert buffer.source is not None and buffer.target is not None
        buffer.reading.result()
        source = buffer.source
        if source.dtype != buffer.target.dtype:  # converted on the device
            source = source.to(self._device, non_blocking=True)
        buffer.target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            buffer.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.sent.record()
        buffer.reading = buffer.source = buffer.target = None


def _read(descriptor: int, into: Tensor, offset: int, stored: Stored) -> None:
    view = into.numpy().data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise ConfigError(f"{stored.path} was cut short while it was read: copy it again", param="model")
        view, offset = view[count:], offset + count
