"""Host memory that a step's copies go through, to the device and back.

Owned by runner.py and used on the model thread; what a step took is given back once it was waited for, on whichever
thread did. On CUDA it is pinned and never handed back to torch: torch asks the device about pinned memory that it
frees, in a destructor, which after a fault of the device ends the whole process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 4096  # bytes


class Staging:
    """Buffers that are kept and used again. On a CPU there are none: everything is where it should be."""

    def __init__(self, device: torch.device) -> None:
        self._used = device.type == "cuda"
        self._all: list[Tensor] = []  # keeps them from torch
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by bytes
        self._taken: list[Tensor] = []  # since the last step

    def pinned(self, array: np.ndarray) -> Tensor:
        """The array as a host tensor that an asynchronous copy may read until the step is done."""
        source = torch.from_numpy(array)
        if not self._used:
            return source
        return self._take(source).copy_(source)

    def to_host(self, tensor: Tensor) -> Tensor:
        """The device's tensor on the host, once the step is done; to be read before its buffers are given back."""
        if not self._used:
            return tensor
        return self._take(tensor).copy_(tensor, non_blocking=True)

    def hand_over(self) -> list[Tensor]:
        """The buffers taken since the last call; they are the step's now."""
        taken, self._taken = self._taken, []
        return taken

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """The step that had them is done."""
        for buffer in buffers:
            self._free[buffer.nbytes].append(buffer)

    def _take(self, like: Tensor) -> Tensor:
        """Of like's shape and dtype, uninitialized."""
        size = max(_SMALLEST, 1 << (like.nbytes - 1).bit_length())
        free = self._free[size]
        if not free:
            self._all.append(torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
            free.append(self._all[-1])
        buffer = free.pop()
        self._taken.append(buffer)
        return buffer[: like.nbytes].view(like.dtype).view(like.shape)
