"""/v1/responses: items and events of one response agree, and what is stored can be continued, cancelled, forgotten."""

from __future__ import annotations

import json
import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest

from aserve.plan import StepPlan
from routes.app import create_app
from routes.records import Record
from routes.response_body import ResponseBody
from routes.response_store import Entry, ResponseStore
from tests.asgi import Reply, call, get, post
from tests.serving import BARE, EchoRunner, application, idle, serving

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
GREEDY = {"temperature": 0, "max_output_tokens": 400}


def events(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream; their framing and numbers are checked."""
    found = []
    for block in reply.body.decode("ascii").split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        assert list(fields) == ["id", "event", "data"]
        data = json.loads(fields["data"])
        assert data["type"] == fields["event"]
        assert data["sequence_number"] == len(found)
        found.append(data)
    return found


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What two runs of one request have in common."""
    text = json.dumps(response)
    for name in ("id", "call_id"):
        for item in [response, *response["output"]]:
            text = text.replace(str(item.get(name)), "ID")
    return json.loads(text) | {"created_at": 0}


async def test_a_text_is_one_message() -> None:
    async with application(tokenizer=BARE) as app:
        reply = await post(app, PATH, {"input": "hello<eos>", **GREEDY, "metadata": {"a": "b"}})
    body = reply.json()
    assert reply.status == 200
    assert body["status"] == "completed"
    assert body["metadata"] == {"a": "b"}
    [item] = body["output"]
    assert item["role"] == "assistant"
    assert item["content"][0]["text"] == "hello"
    assert body["usage"]["input_tokens"] == 6
    assert body["usage"]["output_tokens"] == 6


async def test_streamed_events_tell_of_the_response_that_is_not_streamed() -> None:
    text = f"<think>hm</think>Let me look. {CALL}{CALL}"
    request = {"input": text + "<eos>", "tools": TOOLS, **GREEDY}
    options = {
        "tokenizer": BARE,
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
        "enable_prefix_caching": False,
    }
    async with application(**options) as app:
        whole = (await post(app, PATH, request)).json()
        stream = events(await post(app, PATH, request | {"stream": True}))
    assert [event["type"] for event in stream[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert stream[-1]["type"] == "response.completed"
    final = stream[-1]["response"]
    assert without_ids(final) == without_ids(whole)
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert final["output"][0]["content"][0]["text"] == "hm"
    assert final["output"][1]["content"][0]["text"] == "Let me look."
    assert final["output"][2]["arguments"] == '{"city": "Paris"}'
    for index, item in enumerate(final["output"]):
        mine = [event for event in stream if event.get("output_index") == index]
        text = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[-1] == mine[-1] | {"type": "response.output_item.done", "item": item}


async def test_an_output_at_its_limit_is_incomplete() -> None:
    request = {"input": "abc", "temperature": 0, "max_output_tokens": 5}
    async with application(tokenizer=BARE) as app:
        body = (await post(app, PATH, request)).json()
        stream = events(await post(app, PATH, request | {"stream": True}))
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["content"][0]["text"] == "abcab"
    assert stream[-1]["type"] == "response.incomplete"


async def test_logprobs_come_with_the_text() -> None:
    request = {"input": "ab<eos>", **GREEDY, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with application(tokenizer=BARE) as app:
        body = (await post(app, PATH, request)).json()
        stream = events(await post(app, PATH, request | {"stream": True}))
    entries = body["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == ["a", "b", "<eos>"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 3
    done = next(event for event in stream if event["type"] == "response.output_text.done")
    assert [entry["token"] for entry in done["logprobs"]][:2] == ["a", "b"]


async def test_a_response_is_continued_with_its_calls_and_without_its_instructions() -> None:
    first = {"input": f"{CALL}<eos>", "tools": TOOLS, "instructions": "be brief.", **GREEDY}
    async with application(tokenizer=BARE, tool_call_parser="hermes") as app:
        one = (await post(app, PATH, first)).json()
        assert one["output"][0]["content"][0]["text"].startswith("be brief.")
        call_id = one["output"][1]["call_id"]
        item = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
        two = (await post(app, PATH, {"previous_response_id": one["id"], "input": [item], **GREEDY})).json()
        missing = await post(app, PATH, {"previous_response_id": "resp_none", "input": "a"})
        kept = (await get(app, f"{PATH}/{two['id']}")).json()
    assert two["output"][0]["content"][0]["text"] == CALL  # the echo ends at the prompt's <eos>
    assert two["usage"]["input_tokens"] > one["usage"]["input_tokens"]
    assert kept == two
    assert missing.status == 404
    assert missing.json()["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_forgotten_meanwhile_is_continued_all_the_same(stream: bool) -> None:
    gate, begun = threading.Event(), threading.Event()

    def wait(plan: StepPlan) -> None:
        if plan.slots[:1] and plan.slots[0].num_prompt_tokens > 3:
            begun.set()
            gate.wait(10)

    runner = EchoRunner(num_gpu_blocks=256, max_model_len=512, vocab_size=BARE.vocab_size, before_step=wait)
    async with application(tokenizer=BARE, runner=runner) as app:
        one = (await post(app, PATH, {"input": "a<eos>", **GREEDY})).json()
        request = {"previous_response_id": one["id"], "input": "bcd<eos>", "stream": stream, **GREEDY}
        replies: list[Reply] = []

        async def run() -> None:
            replies.append(await post(app, PATH, request))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.to_thread.run_sync(begun.wait, 10)
            assert (await call(app, "DELETE", f"{PATH}/{one['id']}")).status == 200
            gate.set()
        assert replies[0].status == 200
        two = events(replies[0])[-1]["response"] if stream else replies[0].json()
        assert two["status"] == "completed"
        three = (await post(app, PATH, {"previous_response_id": two["id"], "input": "e<eos>", **GREEDY})).json()
        assert three["usage"]["input_tokens"] > two["usage"]["input_tokens"]


async def test_items_become_the_messages_of_a_chat() -> None:
    body = ResponseBody(
        input=[
            {"role": "developer", "content": "be brief"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ]
    )
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"a": 1}}},
    ]
    assert body.messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "stream": True, "background": True}, "background"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "a", "max_tokens": 5}, "max_tokens"),
        ({"input": "a", "include": ["everything"]}, "include[0]"),
        ({"input": "a", "reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"input": "a", "text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with application(tokenizer=BARE) as app:
        reply = await post(app, PATH, fields)
    assert reply.status == 400
    assert reply.json()["error"]["param"] == param


async def _until(app: Any, id: str, status: str) -> dict[str, Any]:
    with anyio.fail_after(10):
        while (body := (await get(app, f"{PATH}/{id}")).json())["status"] != status:
            await anyio.lowlevel.checkpoint()
    return dict(body)


async def test_what_has_no_effect_is_checked_and_given_back() -> None:
    reasoning = {"effort": "low", "summary": "auto"}
    async with application() as app:
        body = {"input": "a", "include": ["reasoning.encrypted_content"], "reasoning": reasoning} | GREEDY
        reply = await post(app, PATH, body | {"text": {"verbosity": "low"}, "max_output_tokens": 2})
    assert reply.status == 200
    assert reply.json()["reasoning"] == reasoning


async def test_a_background_response_runs_on_and_can_be_fetched() -> None:
    async with application(tokenizer=BARE) as app:
        begun = (await post(app, PATH, {"input": "abc<eos>", "background": True, **GREEDY})).json()
        assert begun["status"] == "in_progress"
        done = await _until(app, begun["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "abc"
        again = await call(app, "POST", f"{PATH}/{begun['id']}/cancel")
        assert again.json()["status"] == "completed"


async def test_a_background_response_can_be_cancelled_and_deleted() -> None:
    async with serving(tokenizer=BARE) as engine:
        app = create_app(engine)
        for method, suffix in (("POST", "/cancel"), ("DELETE", "")):
            begun = (await post(app, PATH, {"input": "abc", "background": True, "temperature": 0})).json()
            reply = await call(app, method, f"{PATH}/{begun['id']}{suffix}")
            assert reply.status == 200
            await idle(engine)
            if method == "POST":
                assert (await _until(app, begun["id"], "cancelled"))["error"]["message"]
            else:
                assert (await get(app, f"{PATH}/{begun['id']}")).status == 404
                assert reply.json()["deleted"] is True


async def test_cancelling_a_streamed_response_tells_its_client() -> None:
    async with serving(tokenizer=BARE) as engine:
        app = create_app(engine)
        replies: list[Reply] = []
        id: list[str] = []

        def note(reply: Reply) -> None:
            if len(reply.messages) == 2:
                id.append(json.loads(reply.bodies[0].decode().split("data: ")[1].split("\n")[0])["response"]["id"])

        async def run() -> None:
            request = {"input": "abc", "stream": True, "temperature": 0}
            replies.append(await post(app, PATH, request, on_message=note))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                while not id:
                    await anyio.lowlevel.checkpoint()
                await call(app, "POST", f"{PATH}/{id[0]}/cancel")
        last = events(replies[0])[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "cancelled"
        assert (await get(app, f"{PATH}/{id[0]}")).json() == last["response"]


async def test_a_client_that_leaves_cancels_its_response() -> None:
    async with serving(tokenizer=BARE) as engine:
        app = create_app(engine)
        reply = await post(app, PATH, {"input": "abc", "stream": True, "temperature": 0}, disconnect_at=3)
        await idle(engine)
        id = json.loads(reply.bodies[0].decode().split("data: ")[1].split("\n")[0])["response"]["id"]
        assert (await get(app, f"{PATH}/{id}")).json()["status"] == "cancelled"


async def test_a_stream_that_was_cut_goes_on_where_it_stopped() -> None:
    request = {"input": "abcdefgh" * 10 + "<eos>", "stream": True, **GREEDY}
    async with application(tokenizer=BARE) as app:
        whole = events(await post(app, PATH, request))
        cut = await post(app, PATH, request, headers={"x-resume-grace": "30"}, disconnect_at=3)
        last = cut.body.decode().rpartition("id: ")[2].split("\n")[0]
        rest = await get(app, f"/v1/streams/{last.partition(':')[0]}", headers={"last-event-id": last})
    merged = Reply([*cut.messages, *rest.messages[1:]])
    text = [event["delta"] for event in events(merged) if event["type"] == "response.output_text.delta"]
    assert "".join(text) == whole[-1]["response"]["output"][0]["content"][0]["text"] == "abcdefgh" * 10
    assert events(merged)[-1]["response"]["status"] == "completed"


async def test_what_is_not_to_be_stored_is_not() -> None:
    async with application(tokenizer=BARE) as app:
        body = (await post(app, PATH, {"input": "a<eos>", "store": False, **GREEDY})).json()
        assert body["store"] is False
        assert (await get(app, f"{PATH}/{body['id']}")).status == 404
        assert (await get(app, f"{PATH}/{body['id']}?stream=true")).status == 404


async def test_the_store_lets_the_oldest_go() -> None:
    store = ResponseStore(max_responses=3, max_bytes=4000)
    async with serving() as engine:
        stream = engine.generate("a")

    def add(id: str, text: str = "") -> None:
        response = {"id": id, "status": "completed", "background": False, "text": text}
        store.add(Entry(response, [], Record(""), stream))

    def kept() -> list[str]:
        return list(store._entries)

    for id in "abcd":
        add(id)
    assert kept() == ["b", "c", "d"]
    add("e", "x" * 3820)
    assert kept() == ["d", "e"]
    store.get("e").response["text"] = ""
    store.measure(store.get("e"))
    store.remove("d")
    add("f", "x" * 3820)
    assert kept() == ["e", "f"]
