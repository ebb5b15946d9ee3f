"""What a reader gets of a request that computes more choices than it returns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aserve.errors import RequestFailedError
from aserve.plan import TokenLogprobs
from aserve.ranking import Ranking
from aserve.request import Delta, FinishReason, Request, SamplingParams
from aserve.stream import Mailbox

pytestmark = pytest.mark.anyio


def mailbox() -> Mailbox:
    box = Mailbox(asyncio.get_running_loop(), lambda request: None)
    box.request = Request(1, "k", (5,), SamplingParams(), 0, 10, 0.0)
    return box


def delta(index: int, text: str, *values: float, end: FinishReason | None = "stop") -> Delta:
    entries = tuple(TokenLogprobs(7, value) for value in values)
    return Delta(index, text, tuple(7 for _ in values), end, None, len(values), entries)


async def test_the_highest_mean_logprobs_come_first_and_nothing_before_the_end() -> None:
    box = mailbox()
    ranking = Ranking(box, SamplingParams(n=2, best_of=3, logprobs=0))
    ranking.push(delta(0, "a", -3.0, end=None))
    ranking.push(delta(1, "low", -9.0))
    ranking.push(delta(2, "high", -1.0))
    ranking.push(delta(0, "b", -1.0, -1.0))
    assert box.take() == []
    ranking.end()
    first, second = box.take()
    assert (first.index, first.text, second.index, second.text) == (0, "high", 1, "ab")
    assert second.token_ids == (7, 7, 7) and second.logprobs is not None and len(second.logprobs) == 3
    assert box.ended


async def test_beams_come_in_order_and_logprobs_only_where_asked() -> None:
    box = mailbox()
    ranking = Ranking(box, SamplingParams(n=2, best_of=3, use_beam_search=True))
    for index, value in enumerate((-5.0, -1.0, -3.0)):
        ranking.push(delta(index, str(index), value))
    ranking.end()
    assert [(d.index, d.text, d.logprobs) for d in box.take()] == [(0, "0", None), (1, "1", None)]


@pytest.mark.parametrize("gone", [False, True])
async def test_a_request_that_fails_shows_nothing(gone: Any) -> None:
    box = mailbox()
    ranking = Ranking(box, SamplingParams(n=1, best_of=2))
    ranking.push(delta(0, "a", -1.0))
    if gone:
        box.cancel()
    ranking.end(RequestFailedError("no"))
    assert box.take() == [] and box.ended and (box.error is None) == gone


async def test_a_preemption_is_told_at_once() -> None:
    box, told = mailbox(), []
    box.on_change = told.append
    Ranking(box, SamplingParams(n=1, best_of=2)).tell("preempted")
    assert told == ["preempted"]
