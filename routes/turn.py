"""An assistant's turn taken apart as it comes: reasoning, content, tool calls. chat.py and responses.py use it.

`TurnFormat` is the server's: which parsers it was started with. `Turn` is one choice's. Both transports of an answer
go through the same parsers, so that joined deltas equal the message that is not streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from aserve import ConfigError
from routes.reasoning import REASONING_PARSERS, ReasoningParser, opens_reasoning
from routes.tools import SPECIAL_TAGS, STYLES, CallStart, CallText, Content, Steps, ToolParser, named, required

_PROMPT_END = 16  # tokens that are looked at for an open <think>


class Reasoning(NamedTuple):
    """Thoughts."""

    text: str


Piece = Reasoning | Content | CallStart | CallText


class Turn:
    """One choice's text, in pieces."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, parallel: bool = True) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self.called = False  # a call was found

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """What is certain after this text; everything where it is the last."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            thoughts, text = self._reasoning.push(text, last=last)
            if thoughts:
                pieces.append(Reasoning(thoughts))
        if self._tools is None:
            return [*pieces, Content(text)] if text else pieces
        found = self._tools.push(text) if text else []
        if last:
            found += self._tools.flush()
        for piece in found:
            self.called = self.called or isinstance(piece, CallStart)
            if self._parallel or isinstance(piece, Content) or piece.index == 0:
                pieces.append(piece)
        return pieces


class Decoder(Protocol):
    """The part of a tokenizer that this file needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How this server's model writes calls and thoughts. Raises ConfigError for a parser that does not exist."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def __post_init__(self) -> None:
        for option, value, known in (
            ("tool_call_parser", self.tool_call_parser, STYLES),
            ("reasoning_parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            if value is not None and value not in known:
                flag = f"--{option.replace('_', '-')}"
                raise ConfigError(f"{flag} must be one of {', '.join(sorted(known))}, got {value!r}", param=option)

    @property
    def shows_special_tokens(self) -> bool:
        """True where calls cannot be seen in a text that leaves special tokens out."""
        return self.tool_call_parser in SPECIAL_TAGS

    def turn(
        self, tools: ToolUse, prompt: Sequence[int], decoder: Decoder | None, *, structured: bool = False
    ) -> Turn | None:
        """The parsers of one choice; None where its text is its content. A `structured` output has a form of its own
        from its first token on: no thoughts, and calls only where they are that form."""
        reasoning = parser = None
        if self.reasoning_parser is not None and decoder is not None and not structured:
            opened = self.reasoning_parser == "deepseek_r1"
            opened = opened or opens_reasoning(decoder.decode(prompt[-_PROMPT_END:], False))
            reasoning = ReasoningParser(opened=opened)
        style: Callable[[ToolParser], Steps[None]] | None = None
        if tools.choice == "required":
            style = required
        elif tools.choice == "named":
            style = named(tools.names[0])
        elif tools.choice == "auto" and tools.names and self.tool_call_parser is not None and not structured:
            style = STYLES[self.tool_call_parser]
        if style is not None:
            parser = ToolParser(style, tools.names, short_ids=self.tool_call_parser == "mistral")
        if reasoning is None and parser is None:
            return None
        return Turn(reasoning, parser, parallel=tools.parallel)


class ToolUse(NamedTuple):
    """What a request lets the model call: "named" is the one tool of `names`."""

    choice: str = "none"  # none | auto | required | named
    names: tuple[str, ...] = ()
    parallel: bool = True


class ChatDelta:
    """Pieces as the fields of OpenAI's streamed delta; pieces of one call in one delta are joined."""

    def __init__(self) -> None:
        self._reasoning = ""
        self._content = ""
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, pieces: Sequence[Piece]) -> ChatDelta:
        """Takes more pieces."""
        for piece in pieces:
            if isinstance(piece, Reasoning):
                self._reasoning += piece.text
            elif isinstance(piece, Content):
                self._content += piece.text
            elif isinstance(piece, CallStart):
                self._calls[piece.index] = {
                    "index": piece.index,
                    "id": piece.id,
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
            else:
                call = self._calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        return self

    def fields(self) -> dict[str, Any]:
        """Those that have something to say."""
        fields: dict[str, Any] = {}
        if self._reasoning:
            fields["reasoning_content"] = self._reasoning
        if self._content:
            fields["content"] = self._content
        if self._calls:
            fields["tool_calls"] = list(self._calls.values())
        return fields

    def message(self) -> dict[str, Any]:
        """The whole message; content is null beside calls alone."""
        fields = self.fields()
        if "tool_calls" in fields:
            fields["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in fields["tool_calls"]
            ]
        return {"role": "assistant", "content": None if "tool_calls" in fields else "", **fields}
