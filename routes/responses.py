"""POST /v1/responses and what follows from it: OpenAI's newer API, over the same engine and the same chat template.

app.py mounts it; endpoint.py drives the creation. A response is kept in memory (response_store.py) unless `store` is
false: it can be retrieved, cancelled, deleted and continued with previous_response_id until newer ones push it out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from aserve import AserveError, Completion, Delta, InvalidRequestError, SamplingParams, Stream, TokenLogprobs
from routes.chunks import Job
from routes.endpoint import GenerationEndpoint, close_all, submit_all
from routes.http import json_response
from routes.logprobs import chat_logprobs
from routes.messages import Message, conversation
from routes.records import CancelledRequestError, Record, abnormal
from routes.response_body import ResponseBody
from routes.response_output import ResponseWriter
from routes.response_store import Entry, ResponseStore
from routes.sse import EventStream
from routes.tools import Content
from routes.turn import ChatDelta, Turn


class Responses(GenerationEndpoint[ResponseBody]):
    """The endpoint that creates."""

    kind = ResponseBody

    def __init__(self, *arguments: Any, store: ResponseStore) -> None:
        super().__init__(*arguments)
        self.store = store
        # what each stream answers: by its end, the response that it continues may be gone
        self._conversations: WeakKeyDictionary[Stream, list[dict[str, Any]]] = WeakKeyDictionary()

    async def submit(self, body: ResponseBody, params: SamplingParams, record: Record) -> list[Stream]:
        messages = self._conversation(body)
        tools = body.chat_tools()
        if tools and body.skip_special_tokens is None and self.options.turn_format.shows_special_tokens:
            params = replace(params, skip_special_tokens=False)
        instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
        submission = self.engine.submit_chat(
            [*instructions, *messages],
            params,
            tools=tools if body.tool_choice != "none" else None,
            chat_template_kwargs=body.chat_template_kwargs,
            **(body.submit_arguments() | self.options.submit_arguments() | record.submit_arguments()),
        )
        streams = await submit_all([submission])
        self._conversations[streams[0]] = messages
        return streams

    def _conversation(self, body: ResponseBody) -> list[dict[str, Any]]:
        """The messages to answer: those of the response that this one continues, and the new ones."""
        if body.previous_response_id is None:
            return body.messages()
        before = self.store.get(body.previous_response_id, "previous_response_id")
        if before.running:
            raise InvalidRequestError("the previous response is still running", param="previous_response_id")
        return [*before.messages, *body.messages()]

    def frames(self, job: Job[ResponseBody], position: int = 0) -> ResponseFrames:
        """The response as it begins, stored where it is to be."""
        stream = job.streams[position]
        structured = job.params.structured is not None
        turn = self.options.turn_format.turn(
            job.body.tool_use(), stream.prompt_token_ids, self.engine.tokenizer, structured=structured
        )
        writer = ResponseWriter(_response(job), stream.key)
        entry = Entry(writer.response, self._conversations[stream], self.live.record(stream), stream)
        if job.body.store is not False:
            self.store.add(entry)
        return ResponseFrames(self, job, writer, entry, turn)

    def _stream(self, job: Job[ResponseBody], record: Record, headers: dict[str, str]) -> EventStream:
        frames = self.frames(job)
        return EventStream(
            [(job.streams[0], frames)],
            record,
            closing=frames.closing,
            failing=frames.fail,
            done="",
            ping_interval=self.options.ping_interval,
            headers=headers,
        )

    async def _collect(
        self, job: Job[ResponseBody], record: Record, receive: Receive, headers: dict[str, str]
    ) -> Response:
        if not job.body.background:
            return await super()._collect(job, record, receive, headers)
        frames = self.frames(job)
        self.store.run(self._run(job, frames))
        return json_response(frames.writer.response, headers=headers)

    async def _run(self, job: Job[ResponseBody], frames: ResponseFrames) -> None:
        """Finishes a response that nobody waits for."""
        record = frames.entry.record
        try:
            with record.cancellable():
                [done] = await job.streams[0].completions()
            if error := record.cancellation or abnormal(done.finish_reason):
                raise error
            frames.finish(done)
        except AserveError as error:
            frames.fail(error)
        finally:
            with anyio.CancelScope(shield=True):
                await close_all(job.streams)

    def answer(self, job: Job[ResponseBody], completions: list[list[Completion]]) -> dict[str, Any]:
        frames = self.frames(job)
        frames.finish(completions[0][0])
        return frames.writer.response

    def logprobs(self, job: Job[ResponseBody], entries: Any) -> list[dict[str, Any]]:
        """Entries of a delta as chat has them, empty where none were asked for."""
        if job.params.logprobs is None:
            return []
        found: list[TokenLogprobs] = list(entries or ())
        content: list[dict[str, Any]] = chat_logprobs(self.engine.tokenizer, found, num_top=job.params.logprobs)[
            "content"
        ]
        return content


class ResponseFrames:
    """One response on its way: deltas in, events out; sse.py's Renderer."""

    def __init__(
        self, endpoint: Responses, job: Job[ResponseBody], writer: ResponseWriter, entry: Entry, turn: Turn | None
    ) -> None:
        self.writer = writer
        self.entry = entry
        self._endpoint = endpoint
        self._job = job
        self._turn = turn
        self._message = ChatDelta()
        self._finish_reason: str | None = None

    def opening(self) -> str:
        """The events before the first token."""
        return self.writer.begin()

    def render(self, delta: Delta) -> str:
        """The events of a delta."""
        last = delta.finish_reason is not None
        self._finish_reason = delta.finish_reason
        if self._turn is not None:
            pieces = self._turn.push(delta.text, last=last)
        else:
            pieces = [Content(delta.text)] if delta.text else []
        self._message.add(pieces)
        return self.writer.push(pieces, self._endpoint.logprobs(self._job, delta.logprobs))

    def closing(self) -> str:
        """The events after the last token; the turn is now part of the conversation."""
        events = self.writer.end(self._finish_reason, self._job.streams[0].usage)
        turn = msgspec.convert(self._message.message(), Message)
        self.entry.messages = [*self.entry.messages, *conversation([turn])]
        self._endpoint.store.measure(self.entry)
        return events

    def finish(self, done: Completion) -> None:
        """The whole turn at once."""
        self.opening()
        self.render(Delta(0, done.text, done.token_ids, done.finish_reason, done.stop_reason, 0, done.logprobs))
        self.closing()

    def fail(self, error: AserveError) -> str:
        """The event of a turn that failed."""
        return self.writer.fail(error, cancelled=isinstance(error, CancelledRequestError))


def _response(job: Job[ResponseBody]) -> dict[str, Any]:
    """The wire form of a response that has just begun."""
    body, params = job.body, job.params
    return {
        "id": f"resp_{job.streams[0].key}",
        "object": "response",
        "created_at": job.created,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": job.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": msgspec.to_builtins(body.reasoning),
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


class StoredResponses:
    """GET and DELETE /v1/responses/{id}, POST /v1/responses/{id}/cancel."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def retrieve(self, request: Request) -> Response:
        """A response as it is now."""
        if request.query_params.get("stream") == "true":
            raise InvalidRequestError("a stored response is not streamed again; ask without stream", param="stream")
        return json_response(self._entry(request).response)

    async def cancel(self, request: Request) -> Response:
        """Cancels a response that runs; one that has ended stays as it is."""
        entry = self._entry(request)
        if entry.running:
            entry.record.cancel("the response was cancelled")
            entry.response["status"] = "cancelled"
        return json_response(entry.response)

    async def delete(self, request: Request) -> Response:
        """Forgets a response, and cancels it where it runs."""
        entry = self._entry(request)
        if entry.running:
            entry.record.cancel("the response was deleted")
        self._store.remove(entry.response["id"])
        return json_response({"id": entry.response["id"], "object": "response", "deleted": True})

    def _entry(self, request: Request) -> Entry:
        return self._store.get(request.path_params["id"])
