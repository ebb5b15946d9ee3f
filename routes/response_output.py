"""What a response of /v1/responses holds and how it grows: output items, and the events that tell of them.

responses.py feeds a `ResponseWriter` with the pieces of a turn. Pure. Streamed or not, a response is built here, so
what retrieval gives later is what the events said. Each event has an id line like chat's, for resuming.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from aserve import AserveError, Usage
from routes.tools import CallStart, CallText, Content
from routes.turn import Piece

_TEXT_EVENTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseWriter:
    """One response. `response` is its wire form at any time; methods give the events of what they change."""

    def __init__(self, response: dict[str, Any], key: str) -> None:
        self.response = response
        self._key = key
        self._sequence = 0
        self._parts: list[str] = []  # text of the item that is open
        self._logprobs: list[dict[str, Any]] = []
        self._kind = ""  # its type; "" where none is open
        self._delta = ""  # what goes before the text of its delta events

    def begin(self) -> str:
        """The events before the first token."""
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def push(self, pieces: list[Piece], logprobs: list[dict[str, Any]] | None = None) -> str:
        """More of the turn; `logprobs` of the tokens of these pieces go with the text among them."""
        events = ""
        for piece in pieces:
            if isinstance(piece, CallStart):
                events += self._close() + self._open("function_call", call_id=piece.id, name=piece.name, arguments="")
                continue
            kind = "function_call" if isinstance(piece, CallText) else _kind(piece)
            if kind != self._kind:
                events += self._close() + self._open(kind)
            entries = logprobs or [] if kind == "message" else []
            events += self._text(piece.text, entries)
        return events

    def end(self, finish_reason: str | None, usage: Usage) -> str:
        """The events of a turn that ended by itself or at its limit."""
        cut = finish_reason == "length"
        events = "" if self.response["output"] else self._open("message")
        events += self._close(incomplete=cut)
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = usage_object(usage)
        return events + self._event(f"response.{self.response['status']}", response=self.response)

    def fail(self, error: AserveError, *, cancelled: bool = False) -> str:
        """The events of a turn that failed, or was cancelled."""
        events = self._close(incomplete=True)
        self.response["status"] = "cancelled" if cancelled else "failed"
        self.response["error"] = {"code": "server_error", "message": error.message}
        return events + self._event("response.failed", response=self.response)

    def _open(self, kind: str, **fields: Any) -> str:
        index = len(self.response["output"])
        item: dict[str, Any] = {"type": kind, "id": f"{_PREFIXES[kind]}_{self._key}_{index}", "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.response["output"].append(item | fields)
        self._kind, self._parts, self._logprobs = kind, [], []
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        events = self._event("response.output_item.added", output_index=index, item=item | fields)
        if kind != "function_call":
            place["content_index"] = 0
            events += self._event("response.content_part.added", **place, part=self._part(""))
        name = f"response.{_TEXT_EVENTS[kind]}.delta"
        self._delta = f"\nevent: {name}\ndata: {_dump({'type': name, **place})[:-1]},"
        return events

    def _text(self, text: str, logprobs: list[dict[str, Any]]) -> str:
        self._parts.append(text)
        self._logprobs += logprobs
        extra = f'"logprobs":{_dump(logprobs)},' if self._kind == "message" else ""
        self._sequence += 1
        number = self._sequence
        head = f"id: {self._key}:{number}{self._delta}{extra}"
        return f'{head}"delta":{quote(text)},"sequence_number":{number - 1}}}\n\n'

    def _close(self, *, incomplete: bool = False) -> str:
        if not self._kind:
            return ""
        index = len(self.response["output"]) - 1
        item = self.response["output"][index]
        text = "".join(self._parts)
        item["status"] = "incomplete" if incomplete else "completed"
        place = {"item_id": item["id"], "output_index": index}
        name = f"response.{_TEXT_EVENTS[self._kind]}.done"
        if self._kind == "function_call":
            item["arguments"] = text
            events = self._event(name, **place, name=item["name"], arguments=text)
        else:
            place["content_index"] = 0
            part = self._part(text)
            item["content"] = [part]
            extra = {"logprobs": self._logprobs} if self._kind == "message" else {}
            events = self._event(name, **place, text=text, **extra)
            events += self._event("response.content_part.done", **place, part=part)
        self._kind = ""
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _event(self, type: str, /, **fields: Any) -> str:
        self._sequence += 1
        body = _dump({"type": type, "sequence_number": self._sequence - 1, **fields})
        return f"id: {self._key}:{self._sequence}\nevent: {type}\ndata: {body}\n\n"


def _kind(piece: Piece) -> str:
    return "message" if isinstance(piece, Content) else "reasoning"


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts in this API's shape. Thoughts are not counted apart: their tokens are output like others."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
