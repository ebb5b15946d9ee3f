"""Asks Linux to back large read-only weights with huge pages, in place. Called by PackedLinear on CPU.

A matrix product at a small batch streams its weights once; with pages of 4 KiB it stalls on address translation and
the hardware prefetcher stops at each page's end. A hint only: where the system has no such call nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_HUGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1 and newer: now, rather than when the kernel's own scan comes by


def use_huge_pages(address: int, size: int) -> None:
    """Backs [address, address + size) with huge pages, its ends included where their neighbours are mapped too."""
    libc = _libc()
    if libc is None or size < _HUGE // 2:
        return
    begin = address // _HUGE * _HUGE
    length = -(-(address + size) // _HUGE) * _HUGE - begin
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(advice))


@cache
def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "madvise") else None
