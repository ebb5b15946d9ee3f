"""Where a model's tensors come from: safetensors files, or random numbers.

The decoders ask for each fused weight by the names and rows of its parts, and get it in the model's dtype on its
device. Each part goes from the file straight to its place; on the host a weight of one part is a view of the file,
which packing reads, so that no weight is in memory twice. Raises ConfigError, naming the tensor, where a checkpoint
and its config.json disagree.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.models.checkpoint import Checkpoint, DeviceCopier, PickledCheckpoint, dtype_of

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
Arrange = Callable[[Tensor], Tensor]

_STD = 0.02  # of random weights: the usual initializer_range
# the parts of a model with vision that text needs not, and where it keeps the others
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_TEXT = ("language_model.", "model.language_model.")
# buffers that some checkpoints carry along
_DERIVED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")


class Weights(Protocol):
    """Tensors by name, in the model's dtype on its device unless said otherwise. None is written to: it may be a view
    of the file. On CUDA they are whole after `finish`."""

    device: torch.device
    dtype: torch.dtype

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int, arrange: Arrange | None = None) -> Tensor:
        """The named matrices [rows[i], columns] stacked: a fused weight [sum of rows, columns]. `arrange` makes a
        matrix of that shape from one as the checkpoint stores it."""
        ...

    def vector(self, names: Sequence[str], sizes: Sequence[int], arrange: Arrange | None = None) -> Tensor:
        """The named vectors joined: a fused bias."""
        ...

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """A norm's weight in float32: what is stored plus `offset`."""
        ...

    def embedding(self, name: str, rows: int, columns: int) -> Tensor:
        """A table whose rows are looked up. On the host it is a view of the file, in the file's dtype."""
        ...

    def tied_head(self, name: str, embedding: Tensor, head: str) -> Tensor:
        """The matrix of a head that is the embedding `name`: in the model's dtype, shared where it can be. The
        checkpoint may hold it once more under the name `head`."""
        ...

    def finish(self) -> None:
        """Called when the model is built. Raises ConfigError if the checkpoint holds what no one asked for."""
        ...

    def close(self) -> None:
        """Ends threads and open files, whether or not the model came to be."""
        ...


class CheckpointWeights:
    """Tensors of safetensors files, or of `pickled` ones."""

    def __init__(
        self, paths: Sequence[Path], *, device: torch.device, dtype: torch.dtype, pickled: bool = False
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._checkpoint = PickledCheckpoint(paths) if pickled else Checkpoint(paths)
        self._copier = DeviceCopier(device) if device.type == "cuda" and not pickled else None
        self._unused = set(self._checkpoint.tensors)

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int, arrange: Arrange | None = None) -> Tensor:
        if len(names) == 1 and self.device.type == "cpu":
            view = self._view(names[0], (rows[0], columns), arrange)
            if view.dtype == self.dtype:
                return view
        return self._stacked(names, [(count, columns) for count in rows], arrange)

    def vector(self, names: Sequence[str], sizes: Sequence[int], arrange: Arrange | None = None) -> Tensor:
        return self._stacked(names, [(size,) for size in sizes], arrange)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        return self._view(name, (size,)).to(self.device, torch.float32) + offset

    def embedding(self, name: str, rows: int, columns: int) -> Tensor:
        if self.device.type == "cpu":
            return self._view(name, (rows, columns))
        return self.matrix([name], [rows], columns)

    def tied_head(self, name: str, embedding: Tensor, head: str) -> Tensor:
        self._unused -= {head, f"{_TEXT[0]}{head}"}
        if self.device.type != "cpu":
            return embedding
        return self.matrix([name], [embedding.shape[0]], embedding.shape[1])  # to be packed: let the file's pages go

    def finish(self) -> None:
        if self._copier is not None:
            self._copier.flush()
        check_complete(unused=self._unused)

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()

    def _stacked(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], arrange: Arrange | None) -> Tensor:
        total = sum(shape[0] for shape in shapes)
        out = _empty((total, *shapes[0][1:]), self.dtype, self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            part = out[start : start + shape[0]]
            if self._copier is not None and arrange is None:
                stored = self._checkpoint.tensors[self._found(name, shape)]
                self._copier.copy(stored, dtype_of(name, stored), part)
            else:
                part.copy_(self._view(name, shape, arrange))
            start += shape[0]
        return out

    def _view(self, name: str, shape: tuple[int, ...], arrange: Arrange | None = None) -> Tensor:
        """A tensor on the host as checkpoint.py maps it, arranged."""
        if arrange is None:
            return self._checkpoint.view(self._found(name, shape))
        found = self._found(name)
        stored = self._checkpoint.view(found)
        try:
            view = arrange(stored)
        except RuntimeError:  # a shape that cannot be arranged so is no shape we asked for
            view = stored.new_empty(0)
        if tuple(view.shape) != shape:
            raise wrong_shape(name, tuple(stored.shape), shape)
        return view

    def _found(self, name: str, shape: tuple[int, ...] | None = None) -> str:
        """The checkpoint's name of a tensor. Raises ConfigError if it has none, or another shape."""
        tensors = self._checkpoint.tensors
        bare = name.partition(".")[2]  # the bare model has no "model." in front
        names = (name, bare, f"{_TEXT[0]}{name}", f"{_TEXT[1]}{bare}")
        found = next((each for each in names if each in tensors), "")
        if not found:
            check_complete(missing=[name])
        self._unused.discard(found)
        if shape is not None and tensors[found].shape != shape:
            raise wrong_shape(name, tensors[found].shape, shape)
        return found


def check_complete(*, missing: Iterable[str] = (), unused: Iterable[str] = ()) -> None:
    """Raises ConfigError where a checkpoint lacks tensors, or holds some that no one asked for."""
    unused = (name for name in unused if not name.endswith(_DERIVED) and not name.startswith(_VISION))
    for names, wrong in (
        (sorted(missing), "the checkpoint lacks {}, which its config.json asks for"),
        (sorted(unused), "the checkpoint holds {}, which its config.json has no place for"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(wrong.format(f"{names[0]}{more}"), param="model")


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty. On the host as a mapping of its own: once packed it is freed, and the allocator would keep it."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size, _PRIVATE), dtype=dtype).view(shape)


def wrong_shape(name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> ConfigError:
    return ConfigError(f"{name} has shape {stored} in the checkpoint and {shape} by its config.json", param="model")


class DummyWeights:
    """Random normal weights by seed, made on the device; norms leave their input's scale alone."""

    def __init__(self, *, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int, arrange: Arrange | None = None) -> Tensor:
        return self._normal(sum(rows), columns)

    def vector(self, names: Sequence[str], sizes: Sequence[int], arrange: Arrange | None = None) -> Tensor:
        return self._normal(sum(sizes))

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        return torch.ones(size, dtype=torch.float32, device=self.device)

    def embedding(self, name: str, rows: int, columns: int) -> Tensor:
        return self._normal(rows, columns)

    def tied_head(self, name: str, embedding: Tensor, head: str) -> Tensor:
        return embedding

    def finish(self) -> None:
        """Random weights have no leftovers."""

    def close(self) -> None:
        """Nothing is open."""

    def _normal(self, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_(0.0, _STD, generator=self._generator)
