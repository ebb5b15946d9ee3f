"""Request bodies of the OpenAI endpoints: bytes in, typed values out, or an error that names the field.

Owns which fields exist, their types, and how they become SamplingParams; completions.py, chat.py and admin.py call it.
msgspec decodes and checks types in one pass (measured faster than pydantic and orjson + checks). Null means absent.
It must never accept a known field with a bad value, and never raise anything but InvalidRequestError.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from aserve import InvalidRequestError, SamplingParams, StructuredOutput
from routes.messages import Message, conversation
from routes.structured import structured_output, tool_calls
from routes.turn import ToolUse

Prompt = str | list[int]

MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 256
_TOOL_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_BLAME_BYTES = 1 << 20  # larger broken bodies are not read a second time to find the field


class StreamOptions(msgspec.Struct):
    """Both count only when exactly true."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """Fields that all generation endpoints take."""

    format_field: ClassVar[str] = "response_format"  # where the client says which form the text shall have

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    echo: bool | None = None
    user: str | None = None
    priority: int | None = None
    timeout: float | None = None
    ttft_timeout: float | None = None
    cache_salt: str | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    bad_words: list[str] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def wants_usage(self) -> bool:
        """True where a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def wants_running_usage(self) -> bool:
        """True where each chunk of a stream carries the counts so far."""
        return (
            self.wants_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats is True
        )

    def check(self) -> None:
        """Raises InvalidRequestError, naming the field, for what no other part of the way would notice."""
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs are not streamed", param="prompt_logprobs")
        for name in ("timeout", "ttft_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise InvalidRequestError(f"{name} must be more than 0 seconds, got {seconds}", param=name)
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise InvalidRequestError(f"priority must fit in 32 bits, got {self.priority}", param="priority")

    def aliases(self) -> dict[str, str]:
        """The client's own names of parameters that it gave by another one."""
        drawn = self.best_of is not None and self.best_of > (self.n or 1)
        return {"n": "best_of"} if drawn else {}

    def rename(self, error: InvalidRequestError) -> None:
        """Puts the client's own names into an error about how many tokens it asked for."""
        if error.param in ("n", "max_tokens", "min_tokens", "prompt"):
            aliases = self.aliases()
            for name, given in aliases.items():
                error.message = re.sub(rf"\b{name}\b", given, error.message)
            error.param = aliases.get(error.param, error.param)

    def submit_arguments(self) -> dict[str, Any]:
        """What engine.submit takes beside prompt and parameters, where the client gave it."""
        given = {
            "priority": self.priority,
            "tenant": self.user,
            "timeout": self.timeout,
            "ttft_timeout": self.ttft_timeout,
            "cache_salt": self.cache_salt,
        }
        return {name: value for name, value in given.items() if value is not None}

    def forced_calls(self) -> StructuredOutput | None:
        """The tool calls that the output has to be; None where it may be text."""
        return None

    def sampling(self, defaults: Mapping[str, Any], **changes: Any) -> SamplingParams:
        """The body's parameters over the model's `defaults`, of which beam search takes none. Raises
        InvalidRequestError, naming the field."""
        given = {name: value for name in _DIRECT if (value := getattr(self, name)) is not None}
        given.update((name, value) for name, value in changes.items() if value is not None)
        given["structured"] = structured_output(self, self.forced_calls(), format_field=self.format_field)
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        try:
            return SamplingParams(**{**({} if self.use_beam_search else defaults), **given})
        except InvalidRequestError as error:
            self.rename(error)
            raise


_DIRECT = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name in Body.__struct_fields__)


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None

    def check(self) -> None:
        Body.check(self)
        if self.suffix:
            raise InvalidRequestError("suffix is not supported by this server", param="suffix")

    def prompts(self) -> list[Prompt]:
        """The prompts in order. Raises InvalidRequestError where there is none, one is empty, or kinds are mixed."""
        if self.prompt is None:
            raise InvalidRequestError("prompt is required: text, token ids, or a list of either", param="prompt")
        items: list[Any]  # Prompt, once the checks below have passed
        if isinstance(self.prompt, str) or (self.prompt and set(map(type, self.prompt)) == {int}):
            items = [self.prompt]
        else:
            items = list(self.prompt)
        if len({type(item) for item in items}) > 1 or any(type(item) is int for item in items):
            raise InvalidRequestError("prompt must not mix text, token ids and lists of token ids", param="prompt")
        if not items or not all(items):
            raise InvalidRequestError("prompt must not be empty", param="prompt")
        if len(items) > MAX_PROMPTS:
            raise InvalidRequestError(f"prompt has {len(items)} entries, at most {MAX_PROMPTS}", param="prompt")
        return items

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters. With echo, logprobs are of the prompt too."""
        prompt = self.logprobs if self.echo and self.prompt_logprobs is None else None
        return self.sampling(defaults, logprobs=self.logprobs, prompt_logprobs=prompt)


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None

    def check(self) -> None:
        Body.check(self)
        self.tool_use()
        for name in ("functions", "function_call"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(f"{name} is not supported by this server; use tools", param=name)
        if self.chat_template is not None:
            raise InvalidRequestError(
                "chat_template is chosen when the server starts, with --chat-template", param="chat_template"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if self.top_logprobs is not None:
            if self.logprobs is not True:
                raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
                raise InvalidRequestError(
                    f"top_logprobs must be at least 0 and at most {MAX_TOP_LOGPROBS}, got {self.top_logprobs}",
                    param="top_logprobs",
                )

    def tool_use(self) -> ToolUse:
        """What the model may call. Raises InvalidRequestError for tools that are none, or a choice among others."""
        return tool_use(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def aliases(self) -> dict[str, str]:
        named = {"max_tokens": "max_completion_tokens"} if self.max_completion_tokens is not None else {}
        return Body.aliases(self) | named

    def forced_calls(self) -> StructuredOutput | None:
        return tool_calls(self.tools or (), self.tool_use())

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as plain dicts, text parts joined by newlines. Raises InvalidRequestError."""
        return conversation(self.messages)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters; max_completion_tokens goes before its old name max_tokens."""
        top = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(defaults, logprobs=top, max_tokens=self.max_completion_tokens)


def tool_use(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, *, parallel: bool) -> ToolUse:
    """What OpenAI's `tools` and `tool_choice` let the model call. Raises InvalidRequestError."""
    names = tuple(_tool_name(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if choice is None or choice == "none":
        return ToolUse("auto" if choice is None and names else "none", names, parallel)
    if isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, dict):
            raise InvalidRequestError(
                'tool_choice must be none, auto, required or {"type": "function", ...}', param="tool_choice"
            )
        name = function.get("name")
        if name not in names:
            raise InvalidRequestError(f"tool_choice names {name!r}, which is not in tools", param="tool_choice")
        return ToolUse("named", (name,), parallel)
    if choice not in ("auto", "required"):
        raise InvalidRequestError(
            f"tool_choice must be none, auto, required or a function of tools, got {choice!r}", param="tool_choice"
        )
    if choice == "required" and not names:
        raise InvalidRequestError("tool_choice required needs tools", param="tool_choice")
    return ToolUse(choice, names, parallel)


def _tool_name(tool: dict[str, Any], where: str) -> str:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequestError('a tool must be {"type": "function", "function": {...}}', param=where)
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise InvalidRequestError(
            "a function's name must be 1 to 128 letters, digits and . _ - :", param=f"{where}.function.name"
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequestError("parameters must be a JSON schema", param=f"{where}.function.parameters")
    return name


class TokenizeBody(msgspec.Struct):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


T = TypeVar("T", bound=msgspec.Struct)

_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MISSING = re.compile(r"missing required field `(\w+)`$")
_WHERE = re.compile(r"^(.*) - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)


def parse(body: bytes, kind: type[T]) -> T:
    """Decodes and checks types. Raises InvalidRequestError, naming the field where one is to blame."""
    try:
        return _decoder(kind).decode(body)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        message = str(error)
        found = _WHERE.match(message)
        if found is None and (missing := _MISSING.search(message)) is not None:
            raise InvalidRequestError(f"{missing[1]} is required", param=missing[1]) from None
        if found is None:
            raise InvalidRequestError(f"the body must be a JSON object: {message}") from None
        where = found[2].replace("[...]", "")
        raise InvalidRequestError(f"{where}: {_lower(found[1])}", param=where or None) from None
    except msgspec.DecodeError as error:
        param, reason = _blame(body)
        raise InvalidRequestError(reason or f"the body is not valid JSON: {error}", param=param) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


@functools.cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def unknown_fields(body: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Top-level names of a valid body that `kind` does not have: accepted, and reported to the client."""
    known = frozenset(kind.__struct_fields__)
    return [name for name in _KEYS.decode(body) if name not in known]


def _blame(body: bytes) -> tuple[str | None, str | None]:
    """The field and the reason, where a body is not JSON only because of a NaN, an infinity or a lone surrogate."""
    if len(body) > _BLAME_BYTES:
        return None, None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(fields, dict):
        return None, None
    for name, value in fields.items():
        try:
            name.encode()
        except UnicodeEncodeError:
            return None, f"the name of a field holds a lone surrogate, which is no character: {name!a}"
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return name, f"{name}: text holds a lone surrogate, which is no character"
        except ValueError:
            return name, f"{name}: numbers must be finite"
    return None, None
