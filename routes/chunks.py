"""From a delta to the text of one SSE event, at the cost of one format and one escape.

A chunk's JSON is the same for every token of a stream but for three holes: the event's offset (its last entry in the
response's journal: one per token per choice, and one for an event without tokens), the choice's index, and the text.
`ChunkFrames` cuts it into fixed pieces once. completions.py and chat.py subclass it; sse.py calls it. Its output is
ASCII, so U+2028, U+2029, U+0085 and control characters reach the wire as JSON escapes and no reader can split an event
at one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Generic, TypeVar

from aserve import Delta, SamplingParams, Stream, Usage
from routes.response_body import ResponseBody
from routes.schemas import ChatBody, CompletionBody

B = TypeVar("B", CompletionBody, ChatBody, ResponseBody)


@dataclass(slots=True)
class Offset:
    """How far a response's events have come, over all its choices and prompts. It grows with every event."""

    value: int = 0


@dataclass(frozen=True, slots=True)
class Job(Generic[B]):
    """One checked and submitted request: what its answer needs to know. One stream per prompt."""

    body: B
    params: SamplingParams
    model: str
    created: int  # seconds since the epoch
    streams: Sequence[Stream]
    offset: Offset = field(default_factory=Offset)

    def usage(self) -> dict[str, Any]:
        """The OpenAI usage object over all prompts, final once they have ended."""
        return usage_object([stream.usage for stream in self.streams])


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    """Token counts in the OpenAI shape."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


class ChunkFrames:
    """Events of job.streams[position]. Subclasses give the JSON around the text, and the choice object of a chunk
    that needs more than text. The last text of a choice and its finish reason share a chunk."""

    before = ',"text":'
    after = ',"logprobs":null,"finish_reason":null}]'

    def __init__(self, job: Job[Any], position: int, envelope: dict[str, Any]) -> None:
        self.job = job
        self._stream = job.streams[position]
        self._offset = job.offset
        self._num_tokens = 0
        self._first_index = position * job.params.n
        self._plain = job.params.logprobs is None and not job.body.wants_running_usage
        head = json.dumps(envelope, separators=(",", ":"))[:-1]
        self._id = f"id: {job.streams[0].key}:"
        self._data = f'\ndata: {head},"choices":['
        self._head = f'{self._data}{{"index":'
        self._close = ',"usage":null}\n\n' if job.body.wants_usage else "}\n\n"
        self._tail = f"{self.after}{self._close}"

    def opening(self) -> str:
        """Events that go before the first delta."""
        return ""

    def choice(self, delta: Delta) -> dict[str, Any] | None:
        """The choice object of a chunk, less its index; None where there is nothing to say yet."""
        raise NotImplementedError

    def render(self, delta: Delta) -> str:
        """The event of a delta; "" while its text is held back (part of a character or of a stop string)."""
        num_tokens = len(delta.token_ids)
        self._num_tokens += num_tokens
        self._offset.value += num_tokens or 1
        if self._plain and delta.finish_reason is None:
            if not delta.text:
                return ""
            index = self._first_index + delta.index
            return f"{self._id}{self._offset.value}{self._head}{index}{self.before}{quote(delta.text)}{self._tail}"
        choice = self.choice(delta)
        return "" if choice is None else self.event(choice, delta.index)

    def opening_event(self, choice: dict[str, Any], index: int) -> str:
        """An event before the first token."""
        self._offset.value += 1
        return self.event(choice, index)

    def event(self, choice: dict[str, Any], index: int) -> str:
        """One event with any choice object."""
        body = _dump({"index": self._first_index + index} | choice)
        if not self.job.body.wants_running_usage:
            return f"{self._id}{self._offset.value}{self._data}{body}]{self._close}"
        prompt, _, cached = self._stream.usage
        usage = _dump(usage_object([Usage(prompt, self._num_tokens, cached)]))
        return f'{self._id}{self._offset.value}{self._data}{body}],"usage":{usage}}}\n\n'

    def closing(self) -> str:
        """The chunk before [DONE] for a client that asked for usage: no choices, the counts of the whole request."""
        if not self.job.body.wants_usage:
            return ""
        self._offset.value += 1
        return f'{self._id}{self._offset.value}{self._data}],"usage":{_dump(self.job.usage())}}}\n\n'


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
