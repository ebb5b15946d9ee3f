"""Messages of a conversation as clients send them, and as a chat template takes them.

schemas.py and response_body.py use it for every route that takes a conversation, so that all read it the same way.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec

from aserve import InvalidRequestError


class Part(msgspec.Struct):
    """One part of a message's content; this server reads text only."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """One turn of a conversation, as the chat template will see it."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def conversation(messages: list[Message] | None) -> list[dict[str, Any]]:
    """The messages as a chat template takes them. Raises InvalidRequestError."""
    if not messages:
        raise InvalidRequestError("messages must have at least one entry", param="messages")
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    if not message.role:
        raise InvalidRequestError("role must not be empty", param=f"{where}.role")
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if message.role == "developer":
        plain["role"] = "system"  # its older name, which chat templates know
    plain.setdefault("content", None)
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    if isinstance(message.content, list):
        texts = []
        for i, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                what = "its text is missing" if part.type == "text" else f"got type {part.type!r}"
                raise InvalidRequestError(f"only text parts are supported: {what}", param=f"{where}.content[{i}]")
            texts.append(part.text)
        plain["content"] = "\n".join(texts)
    if plain["content"] is None and not message.tool_calls and message.role != "assistant":
        raise InvalidRequestError("content is required", param=f"{where}.content")
    return plain


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call as templates take it: its arguments are an object, which the wire writes as a string."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("a tool call must have a function with a name", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # a model may have written it so, and shall see it so
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
