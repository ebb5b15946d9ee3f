"""Tool calls in a model's text, found as the text comes, in the style the model was trained to write.

turn.py feeds one `ToolParser` per choice and hands on what it gives: content, and calls whose arguments are passed on
while they are written. Pure. It never loses text: what looked like a call and is none becomes content as it stands,
unless its name is out already; then the arguments end where the JSON does.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text

_MAX_NAME = 256
_CLOSERS = {"{": "}", "[": "]"}
_BARE = frozenset(string.digits + string.whitespace + "+-.,:eEtrufalsn")  # JSON outside strings and brackets
_ID_LETTERS = string.ascii_letters + string.digits


class Content(NamedTuple):
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The next call: its place among the calls of this choice, a fresh id, and whom it calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """More of a call's arguments, JSON as the model writes it."""

    index: int
    text: str


Piece = Content | CallStart | CallText


class _MalformedError(Exception):
    """This is no call."""


class ToolParser:
    """One choice's text, cut into pieces. `names` are the tools there are: JSON without a tag is only then a call.
    `short_ids` are of 9 letters and digits, the only ones that Mistral's templates take."""

    def __init__(
        self, style: Callable[[ToolParser], Steps[None]], names: Collection[str] = (), *, short_ids: bool = False
    ) -> None:
        self._names = frozenset(names)
        self._short_ids = short_ids
        self._text = ""  # from where a call may have begun, else from what is undecided
        self._at = 0  # how far it is read
        self._ended = False
        self._started = False  # the name of the call being read is out
        self._num_calls = 0
        self._arguments: list[str] = []  # read, and not yet given out
        self._pieces: list[Piece] = []
        self._steps: Steps[None] | None = style(self)

    def push(self, text: str) -> list[Piece]:
        """What is certain after this text."""
        self._text += text
        return self._advance()

    def flush(self) -> list[Piece]:
        """What the end of the text makes certain."""
        self._ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        if self._steps is None:
            self._give(self._text[self._at :])
            self._text, self._at = "", 0
        self._give_arguments()
        pieces, self._pieces = self._pieces, []
        return pieces

    # out

    def _give(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    def _give_arguments(self) -> None:
        if self._arguments:
            self._pieces.append(CallText(self._num_calls - 1, "".join(self._arguments)))
            self._arguments.clear()

    def start(self, name: str) -> None:
        """The name of a call is certain: what was read so far can no longer become content."""
        fresh = "".join(map(secrets.choice, [_ID_LETTERS] * 9)) if self._short_ids else f"call_{secrets.token_hex(12)}"
        self._pieces.append(CallStart(self._num_calls, fresh, name))
        self._num_calls += 1
        self._started = True

    def _drop(self) -> None:
        """Forgets what was read."""
        self._text, self._at = self._text[self._at :], 0

    # in

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            if self._started:
                self._drop()
            yield
        return self._text[self._at]

    def space(self) -> Steps[str]:
        """Skips white space; the next character."""
        while (char := (yield from self.peek())) and char.isspace():
            self._at += 1
        return char

    def literal(self, text: str) -> Steps[bool]:
        """Reads `text` if it is next, nothing otherwise."""
        began = self._at
        for expected in text:
            while self._at == len(self._text) and not self._ended:
                yield
            if self._text[self._at : self._at + 1] != expected:
                self._at = began
                return False
            self._at += 1
        return True

    def content(self, tag: str) -> Steps[bool]:
        """Gives out everything before `tag` and the white space next to it. False where there is no tag."""
        if self._num_calls:
            yield from self.space()
        self._drop()
        while (found := self._text.find(tag)) < 0:
            if self._ended:
                return False
            certain = len(self._text) - held_back(self._text, tag)
            self._give(self._text[:certain])
            self._text = self._text[certain:]
            yield
        end = len(self._text[:found].rstrip())
        self._give(self._text[:end])
        self._text, self._at = self._text[end:], found - end + len(tag)
        return True

    def attempt(self, steps: Steps[None]) -> Steps[bool]:
        """Runs what reads a call; False where it was none, and then all that was read is content."""
        self._started = False
        try:
            yield from steps
            return True
        except _MalformedError:
            if self._started:
                return True
            self._give(self._text[: self._at])
            return False
        finally:
            self._give_arguments()
            self._started = False
            self._drop()

    def value(self, out: list[str]) -> Steps[None]:
        """Reads one JSON value, character by character into `out`."""
        closers: list[str] = []
        quoted = escaped = False
        while char := (yield from self.peek()):
            if not quoted and not closers and out and (char in ",}]" or char.isspace()):
                return  # after a number or a word
            out.append(char)
            if quoted:
                self._at += 1
                quoted = escaped or char != '"'
                escaped = char == "\\" and not escaped
                if not quoted and not closers:
                    return
                continue
            if char == '"':
                quoted = True
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif closers and char == closers[-1]:
                closers.pop()
                if not closers:
                    self._at += 1
                    return
            elif char not in _BARE:
                out.pop()
                raise _MalformedError
            self._at += 1
        raise _MalformedError

    def decoded(self) -> Steps[Any]:
        """Reads one JSON value."""
        out: list[str] = []
        yield from self.value(out)
        try:
            return json.loads("".join(out))
        except (ValueError, RecursionError):
            raise _MalformedError from None

    # calls

    def call(self, *, known: bool = False) -> Steps[None]:
        """Reads {"name": ..., "arguments": {...}}; `known`: only the name of a tool makes it a call."""
        yield from self._expect("{")
        name = ""
        arguments = "{}"
        while (yield from self.space()) != "}":
            key = yield from self.decoded()
            yield from self._expect(":")
            first = yield from self.space()
            if key in ("arguments", "parameters"):
                if self._started:
                    raise _MalformedError
                if name and first == "{":
                    self._start_if(name, known)
                    yield from self.value(self._arguments)
                else:
                    arguments = _as_object((yield from self.decoded()))
            elif key == "name":
                name = yield from self.decoded()
                if not isinstance(name, str):
                    raise _MalformedError
            else:
                yield from self.decoded()
            if (yield from self.space()) == ",":
                self._at += 1
        self._at += 1
        if not self._started:
            self._start_if(name, known)
            self._arguments.append(arguments)

    def _start_if(self, name: str, known: bool) -> None:
        if not name or len(name) > _MAX_NAME or (known and name not in self._names):
            raise _MalformedError
        self.start(name)

    def calls(self) -> Steps[None]:
        """Reads [call, call, ...], at least one."""
        yield from self._expect("[")
        after = ","
        while after == ",":
            yield from self.call()
            self._give_arguments()
            after = yield from self.space()
            if after not in (",", "]"):
                raise _MalformedError
            self._started = False
            self._drop()
            self._at = 1

    def named_call(self) -> Steps[None]:
        """Reads name[ARGS]{...} as Mistral's newer models write it, [CALL_ID]... between them or not."""
        began = self._at
        while (char := (yield from self.peek())) != "{":
            self._at += 1
            if not char or self._at - began > _MAX_NAME:
                raise _MalformedError
        name = self._text[began : self._at].removesuffix("[ARGS]").partition("[CALL_ID]")[0].strip()
        if not name or not name.isprintable() or set(name) & set("[]<> "):
            raise _MalformedError
        self.start(name)
        yield from self.value(self._arguments)

    def only_arguments(self, name: str) -> Steps[None]:
        """Reads the arguments of a call whose name is known before it."""
        self.start(name)
        yield from self.space()
        yield from self.value(self._arguments)

    def _expect(self, char: str) -> Steps[None]:
        if (yield from self.space()) != char:
            raise _MalformedError
        self._at += 1


def _as_object(value: Any) -> str:
    """Arguments that came before the name, or as a string that holds them."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _MalformedError from None
    if value is not None and not isinstance(value, dict):
        raise _MalformedError
    return json.dumps(value or {}, ensure_ascii=False)


def held_back(text: str, tag: str) -> int:
    """How many last characters of `text` may belong to a coming `tag`: its beginning, and white space before it."""
    begun = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    body = text[: len(text) - begun]
    return len(text) - len(body.rstrip())


# styles


def hermes(parser: ToolParser) -> Steps[None]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write it, any number of times."""
    while (yield from parser.content("<tool_call>")):
        if (yield from parser.attempt(parser.call())):
            yield from parser.space()
            yield from parser.literal("</tool_call>")


def llama3_json(parser: ToolParser) -> Steps[None]:
    """{"name": ..., "parameters": {...}} as the whole output, calls separated by semicolons."""
    yield from parser.space()
    yield from parser.literal("<|python_tag|>")
    while (yield from parser.attempt(parser.call(known=True))):
        if (yield from parser.space()) not in (";", ","):
            return
        yield from parser.literal(";")
        yield from parser.literal(",")


def mistral(parser: ToolParser) -> Steps[None]:
    """[TOOL_CALLS] before a list of calls, or, by newer models, before each name[ARGS]{...}."""
    while (yield from parser.content("[TOOL_CALLS]")):
        first = yield from parser.space()
        listed = parser.calls() if first == "[" else parser.call() if first == "{" else parser.named_call()
        yield from parser.attempt(listed)


def required(parser: ToolParser) -> Steps[None]:
    """A list of calls and nothing else, as the grammar of tool_choice "required" makes it."""
    yield from parser.attempt(parser.calls())


def named(name: str) -> Callable[[ToolParser], Steps[None]]:
    """The arguments of one call and nothing else, as the grammar of a named tool_choice makes it."""

    def style(parser: ToolParser) -> Steps[None]:
        yield from parser.attempt(parser.only_arguments(name))

    return style


STYLES: dict[str, Callable[[ToolParser], Steps[None]]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
}
SPECIAL_TAGS = frozenset({"llama3_json", "mistral"})  # styles whose tag is a special token, which text must then show
