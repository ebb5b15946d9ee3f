"""When requests expire: as a whole, or for want of a first token.

roster.py asks at every step boundary. Times are passed in; a request that ends leaves at once, so the memory is
bounded by those that have not.
"""

from __future__ import annotations

from collections.abc import Iterator

from aserve.errors import DeadlineError
from aserve.lazy_heap import LazyHeap
from aserve.request import Request


class Deadlines:
    """Requests by deadline, earliest first."""

    def __init__(self) -> None:
        self._whole: LazyHeap[Request] = LazyHeap()
        self._first: LazyHeap[Request] = LazyHeap()

    def add(self, request: Request) -> None:
        """Watches the deadlines the request has."""
        if request.deadline is not None:
            self._whole.push(request.deadline, request)
        if request.first_token_deadline is not None:
            self._first.push(request.first_token_deadline, request)

    def reached_first_token(self, request: Request) -> None:
        """Only the whole request's deadline is left."""
        self._first.discard(request)

    def remove(self, request: Request) -> None:
        """The request has ended."""
        self._whole.discard(request)
        self._first.discard(request)

    def next(self) -> float | None:
        """The earliest deadline."""
        return min((head[0] for heap in (self._whole, self._first) if (head := heap.peek())), default=None)

    def take_expired(self, now: float) -> Iterator[Request]:
        """Requests whose time is up, out of the heaps, with the reason set; those without a token have the error."""
        for heap, what in ((self._whole, "deadline"), (self._first, "first-token deadline")):
            while (head := heap.peek()) is not None and head[0] <= now:
                when, request = head
                self.remove(request)
                request.cancel_reason = "deadline"
                if not any(sequence.output for sequence in request.sequences):
                    seconds = when - request.arrival
                    request.error = DeadlineError(f"the {what} of {seconds:.3f} s passed before the first token")
                yield request
