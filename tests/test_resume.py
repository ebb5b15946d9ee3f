"""Streams that are cut and go on: whatever was lost on the way, the client ends with each event once."""

from __future__ import annotations

import threading
from typing import Any, cast

import anyio
import pytest
from starlette.types import ASGIApp

from aserve import Engine, NotFoundError
from routes.app import create_app
from routes.resume import Journal
from tests.asgi import Reply, call, get, post
from tests.serving import VOCAB_SIZE, EchoRunner, idle, joined, reasons, serving

pytestmark = pytest.mark.anyio
BODY = {"prompt": "abcdef", "max_tokens": 40, "temperature": 0, "stream": True}
GRACE = {"x-resume-grace": "30"}


def ids(reply: Reply) -> list[str]:
    return [line.removeprefix("id: ") for line in reply.body.decode().split("\n") if line.startswith("id: ")]


def blocks(reply: Reply) -> list[str]:
    return [block for block in reply.body.decode().split("\n\n") if block.startswith("id: ")]


async def cut(app: ASGIApp, path: str, body: Any, at: int, **options: Any) -> Reply:
    reply = await post(app, path, body, headers=GRACE, disconnect_at=at, **options)
    assert not reply.complete
    return reply


async def resume(app: ASGIApp, last: str, **options: Any) -> Reply:
    headers = {"last-event-id": last, **options.pop("headers", {})}
    return await get(app, f"/v1/streams/{last.split(':')[0]}", headers=headers, **options)


@pytest.mark.parametrize("at", [1, 2, 3, 10])
@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream_goes_on_where_it_was_cut(at: int, chat: bool) -> None:
    async with serving(enable_prefix_caching=False) as engine:
        app = create_app(engine)
        path, body = "/v1/completions", {**BODY, "n": 3, "stream_options": {"include_usage": True}}
        if chat:
            path = "/v1/chat/completions"
            body = {**body, "messages": [{"role": "user", "content": "abc"}]}
            del body["prompt"]
        whole = await post(app, path, body)
        first = await cut(app, path, body, at)
        last = ids(first)[-1] if ids(first) else first.headers["x-stream-id"] + ":0"
        second = await resume(app, last)
        assert second.status == 200
        assert second.complete
        assert second.headers["x-stream-id"] == first.headers["x-stream-id"]
        seen = ids(first) + ids(second)
        assert len(seen) == len(set(seen))
        both = Reply([*first.messages, *second.messages[1:]])
        for index in range(3):
            assert joined(both, index) == joined(whole, index)
        assert sorted(reasons(both)) == sorted(reasons(whole))
        assert both.events()[-1] == "[DONE]"
        assert [event["usage"] for event in both.events()[:-1] if event["usage"]] == [
            event["usage"] for event in whole.events()[:-1] if event["usage"]
        ]
        await idle(engine)
        assert engine.metrics.outcomes["length"] == 2
        assert engine.metrics.outcomes["cancelled"] == 0


async def test_any_event_may_be_the_last_that_arrived() -> None:
    """Bytes written are not bytes received: from each offset exactly what follows it comes, byte for byte."""
    async with serving() as engine:
        app = create_app(engine)
        body = {**BODY, "prompt": ["abc", "xyz"], "n": 2, "max_tokens": 5}
        whole = await post(app, "/v1/completions", body, headers=GRACE)
        events = blocks(whole)
        for count, last in enumerate(ids(whole), 1):
            again = await resume(app, last)
            assert blocks(again) == events[count:]
            assert again.events()[-1] == "[DONE]"
        from_the_start = await get(app, f"/v1/streams/{whole.headers['x-stream-id']}")
        assert blocks(from_the_start) == events


async def test_the_first_post_again_goes_on_too() -> None:
    async with serving() as engine:
        app = create_app(engine)
        first = await cut(app, "/v1/completions", BODY, 4)
        again = {"last-event-id": ids(first)[-1]}
        other = await post(app, "/v1/completions", {**BODY, "max_tokens": 41}, headers=again)
        assert other.status == 400
        second = await post(app, "/v1/completions", BODY, headers=again)
        assert joined(Reply([*first.messages, *second.messages[1:]])) == ("abcdef" * 7)[:40]
        assert engine.metrics.outcomes["length"] == 1


async def test_without_a_grace_a_cut_cancels_at_once() -> None:
    async with serving() as engine:
        app = create_app(engine)
        first = await post(app, "/v1/completions", {**BODY, "max_tokens": 2000}, disconnect_at=2)
        assert "x-stream-id" not in first.headers
        await idle(engine)
        assert engine.metrics.outcomes["cancelled"] == 1
        assert (await resume(app, ids(first)[-1])).status == 404


async def test_the_server_bounds_the_grace_and_refuses_one_that_is_no_number() -> None:
    async with serving() as engine:
        app = create_app(engine, resume_grace=5.0, max_resume_grace=20.0)
        for asked, given in ((None, "5"), ("7.5", "7.5"), ("1e9", "20"), ("inf", "20")):
            headers = {"x-resume-grace": asked} if asked else {}
            reply = await post(app, "/v1/completions", BODY, headers=headers)
            assert reply.headers["x-resume-grace"] == given
        assert (
            "x-resume-grace" not in (await post(app, "/v1/completions", BODY, headers={"x-resume-grace": "0"})).headers
        )
        for bad in ("soon", "nan", "-1"):
            assert (await post(app, "/v1/completions", BODY, headers={"x-resume-grace": bad})).status == 400


async def test_the_grace_ends() -> None:
    async with serving() as engine:
        app = create_app(engine)
        body = {**BODY, "max_tokens": 2000, "min_tokens": 2000}
        first = await post(app, "/v1/completions", body, headers={"x-resume-grace": "0.01"}, disconnect_at=2)
        await idle(engine)
        assert engine.metrics.outcomes["cancelled"] + engine.metrics.outcomes["length"] == 1
        while (await resume(app, ids(first)[-1])).status != 404:
            await anyio.lowlevel.checkpoint()


class Gated:
    """An engine whose steps wait at a gate once `count` tokens are out, so that a test decides what happens when."""

    def __init__(self, free_steps: int) -> None:
        self.gate = threading.Event()
        self.runner = EchoRunner(
            num_gpu_blocks=256,
            block_size=16,
            max_model_len=1024,
            vocab_size=VOCAB_SIZE,
            before_step=lambda plan: cast(None, plan.number > free_steps and self.gate.wait(10)),
        )


async def cut_and_held(app: ASGIApp, max_tokens: int = 500) -> Reply:
    return await cut(app, "/v1/completions", {**BODY, "max_tokens": max_tokens}, 2)


async def ends_as(engine: Engine, gated: Gated, outcome: Any) -> None:
    gated.gate.set()
    await idle(engine)
    assert engine.metrics.outcomes[outcome] == 1
    assert sum(engine.metrics.outcomes.values()) == 1


async def test_delete_ends_a_request_despite_its_grace() -> None:
    gated = Gated(5)
    async with serving(runner=gated.runner) as engine:
        app = create_app(engine)
        first = await cut_and_held(app)
        key = first.headers["x-stream-id"]
        assert (await call(app, "DELETE", f"/v1/requests/cmpl-{key}")).status == 200
        assert (await call(app, "DELETE", f"/v1/requests/cmpl-{key}")).status == 404
        assert (await resume(app, ids(first)[-1])).status == 404
        await ends_as(engine, gated, "cancelled")


@pytest.mark.parametrize("prompt", ["abc", ["abc", "abd"]])
async def test_delete_ends_a_request_whose_client_reads_despite_its_grace(prompt: Any) -> None:
    """No time passes before its memory is free."""
    gated = Gated(5)
    async with serving(runner=gated.runner) as engine, anyio.create_task_group() as tasks:
        app = create_app(engine)

        def on_message(reply: Reply) -> None:
            if len(reply.messages) == 3:
                tasks.start_soon(call, app, "DELETE", f"/v1/requests/{reply.headers['x-stream-id']}")

        body = {**BODY, "prompt": prompt, "max_tokens": 900}
        reply = await post(app, "/v1/completions", body, headers=GRACE, on_message=on_message)
        assert reply.events()[-1]["error"]["code"] == "request_cancelled"
        gated.gate.set()
        await idle(engine)
        assert engine.metrics.outcomes["cancelled"] == (1 if isinstance(prompt, str) else 2)


async def test_a_deadline_ends_a_request_despite_its_grace_and_the_client_learns_it() -> None:
    gated = Gated(5)
    async with serving(runner=gated.runner) as engine:
        app = create_app(engine)
        first = await cut(app, "/v1/completions", {**BODY, "max_tokens": 500, "timeout": 1000.0}, 2)
        roster = engine._scheduler._roster
        [request] = roster.unfinished
        request.deadline = request.arrival  # it has passed
        roster.deadlines.add(request)
        await ends_as(engine, gated, "deadline")
        second = await resume(app, ids(first)[-1])
        assert second.events()[-1]["error"]["code"] == "deadline_exceeded"
        assert "[DONE]" not in second.events()
        third = await resume(app, ids(first)[-1])
        assert third.events() == second.events()


async def test_a_cancelled_task_ends_a_request_despite_its_grace() -> None:
    gated = Gated(5)
    async with serving(runner=gated.runner) as engine, anyio.create_task_group() as tasks:
        app = create_app(engine)

        def on_message(reply: Reply) -> None:
            if len(reply.messages) == 3:
                tasks.cancel_scope.cancel()

        await post(app, "/v1/completions", BODY, headers=GRACE, on_message=on_message)
    gated.gate.set()
    assert engine.metrics.outcomes["cancelled"] == 1


async def test_only_the_same_key_may_resume() -> None:
    async with serving() as engine:
        app = create_app(engine, api_keys=["mine", "yours"])
        mine, yours = {"authorization": "Bearer mine"}, {"authorization": "Bearer yours"}
        whole = await post(app, "/v1/completions", BODY, headers={**GRACE, **mine})
        last = ids(whole)[5]
        assert (await resume(app, last)).status == 401
        assert (await resume(app, last, headers=yours)).status == 404
        assert (await resume(app, last, headers=mine)).status == 200


async def test_a_position_that_is_none_is_refused() -> None:
    async with serving() as engine:
        app = create_app(engine)
        whole = await post(app, "/v1/completions", BODY, headers=GRACE)
        key = whole.headers["x-stream-id"]
        bad = ("-1", "x", "", "9" * 5000, "1_0")
        for last, status in ((f"{key}:41", 404), *((f"{key}:{offset}", 400) for offset in bad), ("x:1", 404)):
            assert (await resume(app, last)).status == status
        assert (await get(app, f"/v1/streams/{key}", headers={"last-event-id": "other:1"})).status == 400


async def test_a_newer_connection_takes_the_stream_over() -> None:
    """As when a proxy still holds the old one open: that one ends short, and loses nothing for the new one."""
    gated = Gated(3)
    replies: list[Reply] = []
    async with serving(runner=gated.runner) as engine, anyio.create_task_group() as tasks:
        app = create_app(engine)
        seen = anyio.Event()

        def on_message(reply: Reply) -> None:
            if ids(reply):
                replies.append(reply)
                seen.set()

        async def old() -> None:
            assert not (await post(app, "/v1/completions", BODY, headers=GRACE, on_message=on_message)).complete

        tasks.start_soon(old)
        await seen.wait()
        key = replies[0].headers["x-stream-id"]

        def go_on(reply: Reply) -> None:
            gated.gate.set()

        new = await get(app, f"/v1/streams/{key}", on_message=go_on)
        assert joined(new) == ("abcdef" * 7)[:40]
    assert engine.metrics.outcomes["length"] == 1


async def test_what_waits_for_a_client_that_is_away_is_bounded() -> None:
    async with serving(max_model_len=2048) as engine:
        app = create_app(engine, journal_bytes=1000)
        body = {**BODY, "max_tokens": 2000, "ignore_eos": True}
        first = await cut(app, "/v1/completions", body, 2)
        await idle(engine)
        assert engine.metrics.outcomes["cancelled"] == 1
        second = await resume(app, ids(first)[-1])
        assert "unread" in second.events()[-1]["error"]["message"]


async def test_a_drain_waits_for_a_client_that_is_away_and_lets_it_come_back() -> None:
    gated = Gated(5)
    async with serving(runner=gated.runner) as engine, anyio.create_task_group() as tasks:
        app = create_app(engine)
        first = await cut_and_held(app, 40)
        tasks.start_soon(engine.stop, 60.0)
        await anyio.lowlevel.checkpoint()
        gated.gate.set()
        second = await resume(app, ids(first)[-1])
        assert joined(Reply([*first.messages, *second.messages[1:]])) == ("abcdef" * 7)[:40]


def test_a_journal_keeps_the_newest_events() -> None:
    journal = Journal("k", 400)
    for offset in range(1, 51):
        journal.add(f"id: k:{offset}\ndata: x\n\n")
        assert journal.size <= 400
    assert journal.since(49) == "id: k:50\ndata: x\n\n"
    assert journal.since(50) == ""
    for lost in (0, 1, 51):
        with pytest.raises(NotFoundError, match="cannot go on after"):
            journal.since(lost)
