"""Chat messages to prompt text, by the model's own Jinja template.

Called by tokenizer.py. Renders as transformers' `apply_chat_template` does: same sandbox, whitespace rules, filters,
globals and `generation` tag. Never tokenizes; never lets a template reach anything but plain data. Blocking:
prompts.py renders long conversations off the loop.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from collections.abc import Sequence as Items
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict

from aserve.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    import jinja2
    from jinja2 import Template

Message = Mapping[str, Any]  # a ChatMessage, or what else a template knows


class TextPart(TypedDict):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(TypedDict, total=False):
    """One turn of a conversation. `tool_calls` are a past turn's, in OpenAI's form; their arguments are an object."""

    role: Required[str]
    content: str | list[TextPart] | None
    name: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    reasoning_content: str


BUILTIN: Mapping[str, str] = {
    "plain": (
        "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: "
        "{% if message.content is string %}{{ message.content | trim }}{% else %}"
        "{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
        "{{ '\\n\\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for message in messages %}<start_of_turn>"
        "{{ 'model' if message.role == 'assistant' else 'user' }}\n{{ message.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
}
_MARK = "CONTINUE-5c1e7d0a THE FINAL MESSAGE "  # stands where it ends; its last space shows whether templates trim
_REASONING = ("reasoning_content", "thinking", "reasoning")


def load(source: str) -> str:
    """The template named by an option: a built-in name, a file, or the template itself. Raises ConfigError."""
    if source in BUILTIN:
        return BUILTIN[source]
    if "{%" in source or "{{" in source:
        return source
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        names = ", ".join(sorted(BUILTIN))
        raise ConfigError(
            f"--chat-template {source!r} is neither a readable file nor one of {names}: {error}", param="chat_template"
        ) from None


def choose(templates: str | Items[Mapping[str, str]] | None, *, tools: bool = False) -> str | None:
    """One template out of tokenizer_config.json's "chat_template": a string, or a list of named ones."""
    if templates is None or isinstance(templates, str):
        return templates
    named = {entry["name"]: entry["template"] for entry in templates}
    if tools and "tool_use" in named:
        return named["tool_use"]
    return named.get("default") or next(iter(named.values()), None)


def render(
    template: str,
    messages: Items[Message],
    *,
    tools: Items[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for `messages`. With `continue_final_message` it ends inside the last message, as written so far.

    Raises InvalidRequestError with the template's own words where it refuses the conversation.
    """
    import jinja2

    if not messages:
        raise InvalidRequestError("messages must have at least one message", param="messages")
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    try:
        chat = [_normalize(message) for message in messages]
        final = _mark_final(chat[-1]) if continue_final_message else ""
        text = _compile(template).render(
            **{
                **(variables or {}),
                "messages": chat,
                "tools": [_plain(tool) for tool in tools] if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequestError(
            f"the chat template is not valid Jinja: {error.message}", param="chat_template"
        ) from None
    except RecursionError:
        raise InvalidRequestError("the messages are nested too deeply", param="messages") from None
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from None
    return _cut_at_mark(text, final) if continue_final_message else text


def _normalize(message: Message) -> dict[str, Any]:
    """Plain data without nulls (templates print them as None), reasoning under the name templates read."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"a message must be an object, got {type(message).__name__}", param="messages")
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy in JSON's types: a template must not reach methods of a caller's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    return f"<{type(value).__name__}>"


def _mark_final(message: dict[str, Any]) -> str:
    """Appends the mark to the message's last text and returns that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return content
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _MARK
            return text
    raise InvalidRequestError("continue_final_message needs text in the last message", param="messages")


def _cut_at_mark(text: str, final: str) -> str:
    at = text.rfind(_MARK.rstrip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequestError(
            "the chat template changes the last message, so it cannot be continued", param="continue_final_message"
        )
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's words for training; serving only passes them through."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it an instance attribute)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """`namespace()` that cannot hold names of Python's internals."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
            super().__setitem__(name, value)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["namespace"] = Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
