"""The body of POST /v1/responses: its fields, and how its items become a conversation and chat tools.

responses.py calls it. The sampling fields are those of schemas.Body; what this API names otherwise is translated here,
so that everything behind it knows one form of messages, tools and formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from aserve import InvalidRequestError, SamplingParams, StructuredOutput
from routes.messages import Message, conversation
from routes.schemas import MAX_TOP_LOGPROBS, Body, tool_use
from routes.structured import tool_calls
from routes.turn import ToolUse

LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


class TextOptions(msgspec.Struct):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, omit_defaults=True):
    """How the model shall think, as OpenAI's models may be told; checked, and without effect here."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseBody(Body, kw_only=True):
    """POST /v1/responses."""

    format_field: ClassVar[str] = "text.format"

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Include] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        form = self.text.format if self.text is not None else None
        if form is not None and form.get("type") == "json_schema":
            schema = {name: value for name, value in form.items() if name != "type"}
            form = {"type": "json_schema", "json_schema": schema}
        if form is not None:
            self.response_format = form

    def check(self) -> None:
        Body.check(self)
        for name in ("n", "best_of", "use_beam_search"):
            if getattr(self, name) not in (None, False, 1):
                raise InvalidRequestError(f"{name}: a response has one choice", param=name)
        if self.stream and self.background:
            raise InvalidRequestError("a background response is not streamed here", param="background")
        if self.background and self.store is False:
            raise InvalidRequestError("a background response must be stored", param="store")
        if self.truncation not in (None, "disabled"):
            raise InvalidRequestError("truncation must be disabled on this server", param="truncation")
        if self.prompt_logprobs is not None or self.echo:
            name = "echo" if self.echo else "prompt_logprobs"
            raise InvalidRequestError(f"{name} is not part of this API", param=name)
        if self.max_tokens is not None:
            raise InvalidRequestError("max_tokens is called max_output_tokens in this API", param="max_tokens")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequestError(f"top_logprobs must be 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")
        self.tool_use()

    @property
    def wants_logprobs(self) -> bool:
        """True where the text comes with logprobs."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters."""
        top = (self.top_logprobs or 0) if self.wants_logprobs else None
        return self.sampling(defaults, logprobs=top, max_tokens=self.max_output_tokens)

    def aliases(self) -> dict[str, str]:
        return {"max_tokens": "max_output_tokens"}

    def chat_tools(self) -> list[dict[str, Any]]:
        """The tools in the form that chat uses. Raises InvalidRequestError for a tool that is no function."""
        for i, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function":
                raise InvalidRequestError(
                    f"only functions are supported, got type {tool.get('type')!r}", param=f"tools[{i}]"
                )
        return [
            {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
            for tool in self.tools or ()
        ]

    def tool_use(self) -> ToolUse:
        """What the model may call."""
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        return tool_use(self.chat_tools(), choice, parallel=self.parallel_tool_calls is not False)

    def forced_calls(self) -> StructuredOutput | None:
        return tool_calls(self.chat_tools(), self.tool_use())

    def messages(self) -> list[dict[str, Any]]:
        """The input as chat messages, without the instructions. Raises InvalidRequestError."""
        if self.input is None or not self.input:
            raise InvalidRequestError("input is required: text, or a list of items", param="input")
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for i, item in enumerate(self.input):
            message = _message(item, f"input[{i}]")
            last = messages[-1] if messages else {}
            if last.get("role") == message["role"] == "assistant" and "content" not in last:
                # a turn's thoughts, text and calls are items of their own here, and one message there
                calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
                last.update(message)
                if calls:
                    last["tool_calls"] = calls
            elif last.get("role") == "assistant" and "tool_calls" in message and last.get("content") is not None:
                last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            else:
                messages.append(message)
        return conversation([msgspec.convert(message, Message) for message in messages])


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """One input item as (part of) a chat message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequestError(f"role must be user, assistant, system or developer, got {role!r}", param=where)
        return {"role": role, "content": _text(item.get("content"), f"{where}.content")}
    if kind == "function_call":
        function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _text(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        return {"role": "assistant", "reasoning_content": "\n".join(text for text in texts if isinstance(text, str))}
    raise InvalidRequestError(f"items of type {kind!r} are not supported", param=f"{where}.type")


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{name} must be a text", param=f"{where}.{name}")
    return value


def _text(content: Any, where: str) -> str:
    """Text, or text parts joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError("content must be text or a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise InvalidRequestError("only text parts are supported", param=f"{where}[{i}]")
        texts.append(text)
    return "\n".join(texts)
