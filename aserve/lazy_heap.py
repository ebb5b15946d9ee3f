"""A heap whose items can be taken out from the middle: waiting requests, deadlines, tenants.

Used by policy.py and deadlines.py. Items whose keys come in order, as arrivals and timeouts do, queue up beside the
heap at O(1) each; the others cost O(log n), amortized. Removed entries stay until they surface or make up half of it
all, so the memory is bounded by the items present.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Items by key, smallest first; equal keys in order of arrival. Pushing an item again moves it."""

    __slots__ = ("_count", "_heap", "_live", "_run")

    def __init__(self) -> None:
        self._run: deque[tuple[Any, int, T]] = deque()  # in order
        self._heap: list[tuple[Any, int, T]] = []  # those that were smaller than the last of the run
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
        if not self._run or self._run[-1][0] <= key:
            self._run.append((key, self._count, item))
        else:
            heapq.heappush(self._heap, (key, self._count, item))
        self._compact()

    def discard(self, item: T) -> None:
        """Takes the item out where it is in."""
        if self._live.pop(item, None) is not None:
            self._compact()

    def peek(self) -> tuple[Any, T] | None:
        """Smallest (key, item), or None."""
        run, heap, live = self._run, self._heap, self._live
        while run and live.get(run[0][2]) != run[0][1]:
            run.popleft()
        while heap and live.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        if heap and not (run and run[0] < heap[0]):
            return heap[0][0], heap[0][2]
        return (run[0][0], run[0][2]) if run else None

    def _compact(self) -> None:
        if len(self._run) + len(self._heap) > 2 * len(self._live) + 16:
            live = self._live
            self._run = deque(entry for entry in self._run if live.get(entry[2]) == entry[1])
            self._heap = [entry for entry in self._heap if live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
