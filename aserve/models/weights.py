"""Where a model's tensors come from: safetensors files, or random numbers.

The decoders ask for each fused weight by the names and rows of its parts, and get it in the model's dtype on its
device. Checkpoint files are mapped and each part is copied straight to its place, so that no weight is in memory
twice. Raises ConfigError, naming the tensor, where a checkpoint and its config.json disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aserve.errors import ConfigError

Arrange = Callable[[Tensor], Tensor]

_STD = 0.02  # of random weights: the usual initializer_range
# buffers that some checkpoints carry along
_DERIVED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")


class Weights(Protocol):
    """Tensors by name, in the model's dtype on its device unless said otherwise."""

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


class CheckpointWeights:
    """Tensors of safetensors files."""

    def __init__(self, paths: Sequence[Path], *, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._paths: dict[str, Path] = {}  # tensor name -> the file it is in
        for path in paths:
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    self._paths |= dict.fromkeys(file.keys(), path)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
        self._unused = set(self._paths)

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int, arrange: Arrange | None = None) -> Tensor:
        return self._stacked(names, [(count, columns) for count in rows], arrange)

    def vector(self, names: Sequence[str], sizes: Sequence[int], arrange: Arrange | None = None) -> Tensor:
        return self._stacked(names, [(size,) for size in sizes], arrange)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        return self._view(name, (size,)).to(self.device, torch.float32) + offset

    def embedding(self, name: str, rows: int, columns: int) -> Tensor:
        view = self._view(name, (rows, columns))
        return view if self.device.type == "cpu" else view.to(self.device, self.dtype)

    def tied_head(self, name: str, embedding: Tensor, head: str) -> Tensor:
        self._unused.discard(head)
        if self.device.type != "cpu":
            return embedding
        return self.matrix([name], [embedding.shape[0]], embedding.shape[1])  # to be packed: let the file's pages go

    def finish(self) -> None:
        left = sorted(name for name in self._unused if not name.endswith(_DERIVED))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ConfigError(
                f"the checkpoint holds {left[0]}{more}, which its config.json has no place for", param="model"
            )

    def _stacked(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], arrange: Arrange | None) -> Tensor:
        total = sum(shape[0] for shape in shapes)
        out = torch.empty((total, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            out[start : start + shape[0]].copy_(self._view(name, shape, arrange))
            start += shape[0]
        return out

    def _view(self, name: str, shape: tuple[int, ...], arrange: Arrange | None = None) -> Tensor:
        """A tensor as a mapping of its file that ends with it: pages are read when it is, and let go after."""
        found = name if name in self._paths else name.partition(".")[2]  # the bare model has no "model." in front
        if found not in self._paths:
            raise ConfigError(f"the checkpoint lacks {name}, which its config.json asks for", param="model")
        self._unused.discard(found)
        with safe_open(self._paths[found], framework="pt", device="cpu") as file:
            view: Tensor = file.get_tensor(found)
        stored = tuple(view.shape)
        if arrange is not None:
            try:
                view = arrange(view)
            except RuntimeError:  # a shape that cannot be arranged so is no shape we asked for
                view = view.new_empty(0)
        if tuple(view.shape) != shape:
            raise ConfigError(
                f"{name} has shape {stored} in the checkpoint and {shape} by its config.json", param="model"
            )
        if view.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise ConfigError(f"{name} is {view.dtype}: quantized checkpoints are not read", param="model")
        return view


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

    def _normal(self, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_(0.0, _STD, generator=self._generator)
