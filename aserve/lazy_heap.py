"""A heap whose items can be taken out from the middle: waiting requests, deadlines, tenants.

Used by policy.py and scheduler.py. Removed entries stay in the list until they surface or make up half of it, so every
operation is O(log n) amortized and the memory is bounded by the items present.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Items by key, smallest first; equal keys in order of arrival. Pushing an item again moves it."""

    __slots__ = ("_count", "_entries", "_live")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, T]] = []
        self._live: dict[T, int] = {}  # item -> number of its only valid entry
        self._count = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: T) -> bool:
        return item in self._live

    def push(self, key: Any, item: T) -> None:
        """Adds the item, or moves it to a new key."""
        self._count += 1
        self._live[item] = self._count
        heapq.heappush(self._entries, (key, self._count, item))
        self._compact()

    def discard(self, item: T) -> None:
        """Takes the item out where it is in."""
        if self._live.pop(item, None) is not None:
            self._compact()

    def peek(self) -> tuple[Any, T] | None:
        """Smallest (key, item), or None."""
        entries = self._entries
        while entries:
            key, number, item = entries[0]
            if self._live.get(item) == number:
                return key, item
            heapq.heappop(entries)
        return None

    def _compact(self) -> None:
        if len(self._entries) > 2 * len(self._live) + 16:
            self._entries = [entry for entry in self._entries if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)
