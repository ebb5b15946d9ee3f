"""Asks Linux to back large read-only weights with huge pages, in place. Called by PackedLinear on CPU.

A matrix product at a small batch streams its weights once; with pages of 4 KiB it stalls on address translation and
the hardware prefetcher stops at each page's end. Gathering the pages takes as long as packing, so one daemon thread
does it once the loading is over, and ends when nothing is left. A hint only: where the system has no such call
nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from functools import cache

import torch
from torch import Tensor

_HUGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1 and newer: now, rather than when the kernel's own scan comes by

_QUIET = 0.5  # seconds without a new weight after which a model is loaded

_queue: deque[weakref.ref[Tensor]] = deque()
_lock = threading.Lock()
_arrived = threading.Event()
_thread: threading.Thread | None = None


def use_huge_pages(packed: Tensor) -> None:
    """Backs an mkldnn tensor's memory with huge pages, soon; its ends too where their neighbours are mapped."""
    global _thread
    if _libc() is None or torch.ops.mkldnn._nbytes(packed) < _HUGE // 2:
        return
    with _lock:
        _queue.append(weakref.ref(packed))
        _arrived.set()
        if _thread is None:
            _thread = threading.Thread(target=_collapse_all, name="aserve-huge-pages", daemon=True)
            _thread.start()


def _collapse_all() -> None:
    global _thread
    while True:
        if _arrived.is_set():
            while _arrived.wait(_QUIET):
                _arrived.clear()
        with _lock:
            if not _queue:
                _thread = None
                return
            packed = _queue.popleft()()
        if packed is not None:  # held until its memory was advised
            _collapse(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))


def _collapse(address: int, size: int) -> None:
    """The whole huge pages that touch the memory, or those inside it where a neighbour cannot have them."""
    first, last = address // _HUGE, -(-(address + size) // _HUGE)
    if not _advise(first, last):
        _advise(-(-address // _HUGE), (address + size) // _HUGE)


def _advise(first: int, last: int) -> bool:
    """Collapses huge pages [first, last). False where the system refused any of them."""
    libc = _libc()
    assert libc is not None
    begin, length = ctypes.c_void_p(first * _HUGE), ctypes.c_size_t(max(0, last - first) * _HUGE)
    return all(libc.madvise(begin, length, ctypes.c_int(advice)) == 0 for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE))


@cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "madvise") else None
