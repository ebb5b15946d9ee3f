"""The thread that makes masks: whoever holds a row back until a mask is there hears of it."""

from __future__ import annotations

import threading

import pytest

from aserve.grammar import MaskThread


class Fake:
    """A mask of a matcher whose masks take long at one time and not at another."""

    def __init__(self, before: bool, after: bool) -> None:
        self.slow = before
        self._after = after

    def read(self) -> bytes:
        self.slow = self._after
        return b""


@pytest.mark.parametrize(("before", "after", "told"), [(True, False, 1), (False, True, 1), (False, False, 0)])
def test_a_mask_that_is_waited_for_is_announced_even_where_it_was_quick(before: bool, after: bool, told: int) -> None:
    calls: list[None] = []
    ended = threading.Event()
    masks = MaskThread(lambda: calls.append(None))
    masks.start(Fake(before, after))  # type: ignore[arg-type]

    class Last(Fake):
        def read(self) -> bytes:
            ended.set()
            return b""

    masks.start(Last(False, False))  # type: ignore[arg-type]
    assert ended.wait(10)
    masks.close()
    assert len(calls) == told
