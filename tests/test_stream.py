"""Streams: order, joining, ends, errors, and every way a reader can go away."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from aserve.errors import DeadlineError, InvalidRequestError, RequestFailedError
from aserve.request import Delta, FinishReason, Request
from aserve.stream import Mailbox, Stream
from tests.fakes import make_request

pytestmark = pytest.mark.anyio


class Side:
    """The engine's side of one stream, and what was cancelled."""

    def __init__(self, *, n: int = 1, admitted: bool = True) -> None:
        self.cancelled: list[Request] = []
        self.request = make_request([1, 2, 3])
        self.box = Mailbox(asyncio.get_running_loop(), self.cancelled.append)
        if admitted:
            self.box.request = self.request
        self.count = [0] * n

    def stream(self) -> Stream:
        return Stream(self.box, key="k", n=len(self.count))

    def push(self, text: str, index: int = 0, reason: FinishReason | None = None, logprob: object = None) -> None:
        self.count[index] += 1
        entries = None if logprob is None else (logprob,)
        self.box.push(Delta(index, text, (self.count[index],), reason, None, self.count[index], entries))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_text_that_a_deadline_cut_does_not_look_whole() -> None:
    for reason in ("length", "deadline"):
        side = Side()
        side.push("one")
        side.push(" two", reason=reason)
        side.box.end()
        if reason == "length":
            assert await side.stream().text() == "one two"
        else:
            with pytest.raises(DeadlineError, match="whole"):
                await side.stream().text()


async def test_a_reader_that_keeps_up_gets_each_delta() -> None:
    side = Side()
    got: list[Delta] = []

    async def read() -> None:
        async for delta in side.stream():
            got.append(delta)

    reader = asyncio.ensure_future(read())
    for text in "abc":
        await settle()
        side.push(text)
    side.box.end()
    await reader
    assert [(delta.text, delta.token_ids, delta.offset) for delta in got] == [
        ("a", (1,), 1),
        ("b", (2,), 2),
        ("c", (3,), 3),
    ]
    assert side.cancelled == []


async def test_deltas_join_per_choice_when_the_reader_is_slow() -> None:
    side = Side(n=2)
    stream = side.stream()
    for text, index in (("a", 0), ("x", 1), ("b", 0), ("", 1), ("c", 0)):
        side.push(text, index, logprob=(text, index))
    side.push("y", 1, "stop")
    side.push("d", 0, "length")
    side.box.end()
    first, second = [delta async for delta in stream]
    assert (first.text, first.token_ids, first.offset, first.finish_reason) == ("abcd", (1, 2, 3, 4), 4, "length")
    assert (second.text, second.token_ids, second.offset, second.finish_reason) == ("xy", (1, 2, 3), 3, "stop")
    assert first.logprobs == (("a", 0), ("b", 0), ("c", 0))


async def test_take_nowait_and_ready_serve_a_writer() -> None:
    side = Side()
    stream = side.stream()
    assert stream.take_nowait() == []
    side.push("a")
    side.push("b")
    assert await stream.ready()
    assert [delta.text for delta in stream.take_nowait()] == ["ab"]
    side.push("c")
    side.box.end()
    assert await stream.ready()
    assert [delta.text for delta in stream.take_nowait()] == ["c"]
    assert not await stream.ready()


async def test_take_nowait_also_gives_what_iteration_took_ahead() -> None:
    side = Side(n=2)
    stream = side.stream()
    side.push("a", 0)
    side.push("x", 1)
    assert (await anext(stream)).text == "a"
    side.push("y", 1)
    assert [delta.text for delta in stream.take_nowait()] == ["x", "y"]


async def test_an_error_comes_after_the_deltas_before_it() -> None:
    side = Side()
    stream = side.stream()
    side.push("a")
    side.box.end(RequestFailedError("broken"))
    assert (await anext(stream)).text == "a"
    for _ in range(2):
        with pytest.raises(RequestFailedError, match="broken"):
            await anext(stream)


async def test_the_first_end_decides() -> None:
    side = Side()
    side.box.end()
    side.box.end(RequestFailedError("late"))
    assert [delta async for delta in side.stream()] == []


async def test_leaving_the_context_cancels() -> None:
    side = Side()
    async with side.stream() as stream:
        side.push("a")
        async for _ in stream:
            break
    assert side.cancelled == [side.request]
    assert [delta async for delta in stream] == []
    await stream.aclose()
    assert side.cancelled == [side.request]


async def test_leaving_the_context_of_a_finished_stream_cancels_nothing() -> None:
    side = Side()
    async with side.stream() as stream:
        side.push("a", 0, "stop")
        side.box.end()
        assert await stream.text() == "a"
    assert side.cancelled == []


async def test_dropping_an_unfinished_stream_cancels() -> None:
    side = Side()
    stream = side.stream()
    side.push("a")
    await anext(stream)
    del stream
    await settle()
    assert side.cancelled == [side.request]


async def test_a_stream_collected_on_another_thread_cancels_on_the_loop() -> None:
    side = Side()
    stream = side.stream()
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle
    collected = asyncio.get_running_loop().run_in_executor(None, gc.collect)
    await collected
    await settle()
    assert side.cancelled == [side.request]


def test_dropping_a_stream_after_its_loop_is_closed_is_quiet() -> None:
    async def main() -> Stream:
        return Side().stream()

    stream = asyncio.run(main())
    del stream
    gc.collect()  # an exception in a finalizer would fail the test as a warning


async def test_cancelling_the_reading_task_cancels_the_request() -> None:
    side = Side()
    stream = side.stream()
    reader = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
    await settle()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert side.cancelled == [side.request]


async def test_a_timeout_on_ready_leaves_the_request_running() -> None:
    side = Side()
    stream = side.stream()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await stream.ready()
    assert side.cancelled == []
    side.push("a")
    assert (await anext(stream)).text == "a"


async def test_two_readers_at_once_are_refused() -> None:
    side = Side()
    stream = side.stream()
    reader = asyncio.ensure_future(stream.ready())
    await settle()
    with pytest.raises(RuntimeError, match="another task"):
        await stream.ready()
    side.box.end()
    assert await reader is False


async def test_a_lazy_stream_submits_once_at_first_use() -> None:
    side = Side(admitted=False)
    opened: list[int] = []

    async def open_() -> None:
        opened.append(1)
        side.box.request = side.request
        side.push("a", 0, "stop")
        side.box.end()

    stream = Stream(side.box, key="k", open=open_)
    assert opened == []
    assert await stream.text() == "a"
    await stream.submit()
    assert opened == [1]


async def test_a_refusal_is_raised_at_first_use_and_ends_the_stream() -> None:
    side = Side(admitted=False)

    async def open_() -> None:
        raise InvalidRequestError("no")

    stream = Stream(side.box, key="k", open=open_)
    with pytest.raises(InvalidRequestError):
        await anext(stream)
    assert [delta async for delta in stream] == []
    assert side.cancelled == []


async def test_a_lazy_stream_that_is_never_used_is_no_request() -> None:
    side = Side(admitted=False)

    async def open_() -> None:
        raise AssertionError("it must not be submitted")

    stream = Stream(side.box, key="k", open=open_)
    await stream.aclose()
    del stream
    await settle()
    assert side.cancelled == []


async def test_completions_are_whole_and_in_order() -> None:
    side = Side(n=2)
    side.push("x", 1)
    side.push("a", 0, "stop")
    side.push("y", 1, "length")
    side.box.end()
    first, second = await side.stream().completions()
    assert (first.index, first.text, first.finish_reason) == (0, "a", "stop")
    assert (second.index, second.text, second.token_ids) == (1, "xy", (1, 2))


async def test_a_reader_of_the_whole_is_woken_once_and_never_late() -> None:
    paced: list[bool] = []
    side = Side()
    side.box = Mailbox(
        asyncio.get_running_loop(), side.cancelled.append, limit=8, pace=lambda box: paced.append(box.behind)
    )
    side.box.request = side.request
    reading = asyncio.create_task(side.stream().text())
    await settle()
    looks: list[int] = []
    for number in range(300):
        side.push(chr(97 + number % 26))
        await settle()
        looks.append(len(side.box._deltas))  # it took nothing
    assert looks[0] == 1
    assert min(looks) >= 1
    assert max(looks) < 100  # joined on the way
    assert paced == []
    side.push("!", reason="stop")
    side.box.end()
    assert await reading == "".join(chr(97 + number % 26) for number in range(300)) + "!"


async def test_a_cancelled_reader_of_the_whole_cancels_its_request() -> None:
    side = Side()
    reading = asyncio.create_task(side.stream().completions())
    await settle()
    with pytest.raises(RuntimeError, match="another task"):
        await side.stream().text()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert side.cancelled == [side.request]


async def test_text_needs_one_choice() -> None:
    side = Side(n=2)
    with pytest.raises(InvalidRequestError, match="n = 2"):
        await side.stream().text()


async def test_usage_counts_committed_tokens() -> None:
    side = Side()
    stream = side.stream()
    side.request.sequences[0].output += [7, 8]
    side.request.num_cached = 2
    assert stream.usage == (3, 2, 2)
    assert stream.prompt_token_ids == (1, 2, 3)


async def test_the_mailbox_is_handed_over_without_a_thread() -> None:
    before = threading.active_count()
    side = Side()
    side.push("a", 0, "stop")
    side.box.end()
    assert await side.stream().text() == "a"
    assert threading.active_count() == before


async def test_a_reader_that_is_behind_is_noticed_once_and_again_when_it_has_caught_up() -> None:
    paced: list[bool] = []
    box = Mailbox(
        asyncio.get_running_loop(), lambda request: None, limit=1000, pace=lambda box: paced.append(box.behind)
    )
    for number in range(500):
        box.push(Delta(0, "word", (number,)))
    assert paced == [True]
    assert sum(len(delta.token_ids) for delta in box.take()) == 500
    assert paced == [True, False]
    for number in range(60):  # a reader that is merely late
        box.push(Delta(0, "word", (number,)))
    assert paced == [True, False]


async def test_what_piles_up_unread_is_one_delta_per_choice() -> None:
    box = Mailbox(asyncio.get_running_loop(), lambda request: None, n=2)
    for number in range(1000):
        box.push(Delta(number % 2, str(number % 10), (number,)))
    assert len(box._deltas) <= 64 + 2
    assert [(delta.index, len(delta.token_ids)) for delta in box.take()] == [(0, 500), (1, 500)]


async def test_while_nobody_reads_another_limit_holds() -> None:
    paced: list[bool] = []
    box = Mailbox(asyncio.get_running_loop(), lambda request: None, limit=10, pace=lambda box: paced.append(box.behind))
    box.leave(10_000)
    for number in range(500):
        box.push(Delta(0, "word", (number,)))
    assert (paced, box.away) == ([], True)
    box.come_back()
    assert not box.away
