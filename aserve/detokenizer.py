"""Turns token ids into text as they come: no character is split.

Called by output.py for every token, so its work per token is constant. Pure: it is handed the vocabulary as a
function and never loads, locks or waits. Joined pieces equal the tokenizer's decode of the whole output, except that
a SentencePiece word space at its beginning stays: the output continues a prompt.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from typing import Any, Literal, Protocol

Style = Literal["bytes", "runs", "words"]  # how the bytes of tokens that are no whole characters come together
WINDOW = 8  # tokens of context the windowed decoder re-reads; a character spans at most 4


class Detokenizer(Protocol):
    """One output's text, token by token."""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What an ending leaves incomplete, as U+FFFD."""
        ...

    def fork(self) -> Detokenizer:
        """Another output's that begins with the same tokens."""
        ...


class TokenTable(dict[int, "str | bytes"]):
    """Token id -> its text where it stands alone, its bytes where it may be part of a character. Filled on use.

    `style` "bytes" is a byte-level vocabulary: any run of tokens is decoded as one byte string, a maximal invalid
    part becoming one U+FFFD. "runs" is SentencePiece with byte fallback: neighbouring byte tokens are one string if
    that is valid UTF-8, else one U+FFFD each (so their text is certain only when the run ends). "words" puts a space
    between any two. b"" is a token that decoding leaves out: special, or not in the vocabulary.
    """

    def __init__(self, style: Style, token_of: Callable[[int], str | None], skip: Collection[int] = ()) -> None:
        super().__init__()
        self.style = style
        self._token_of = token_of
        self._skip = frozenset(skip)

    def __missing__(self, token_id: int) -> str | bytes:
        token = None if token_id in self._skip else self._token_of(token_id)
        if token is None:
            entry: str | bytes = b""
        elif self.style == "bytes":
            entry = _byte_level(token)
        elif self.style == "words":
            entry = token
        else:
            entry = _byte_fallback(token)
        self[token_id] = entry
        return entry


class ByteDetokenizer:
    """Byte-level vocabularies: bytes are kept only while a character is incomplete."""

    __slots__ = ("_pending", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._pending = b""

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if isinstance(piece, str):
            return self.flush() + piece if self._pending else piece
        data = self._pending + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")

    def fork(self) -> ByteDetokenizer:
        other = ByteDetokenizer(self._table)
        other._pending = self._pending
        return other


class RunDetokenizer:
    """SentencePiece with byte fallback: byte tokens wait for the end of their run."""

    __slots__ = ("_run", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if isinstance(piece, str):
            return self.flush() + piece if self._run else piece
        self._run += piece
        return ""

    def flush(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def fork(self) -> RunDetokenizer:
        other = RunDetokenizer(self._table)
        other._run = self._run[:]
        return other


class WordDetokenizer:
    """A vocabulary without a decoder of its own: words, with a space before all but the first of prompt and output."""

    __slots__ = ("_space", "_table")

    def __init__(self, table: TokenTable, prompt: Items[int] = ()) -> None:
        self._table = table
        self._space = " " if any(table[token_id] != b"" for token_id in prompt) else ""

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if not isinstance(piece, str):
            return ""
        text = self._space + piece
        self._space = " "
        return text

    def flush(self) -> str:
        return ""

    def fork(self) -> WordDetokenizer:
        other = WordDetokenizer(self._table)
        other._space = self._space
        return other


class WindowDetokenizer:
    """Any tokenizer: decodes a short window with and without the new tokens and gives the difference.

    `prompt` supplies the context that decides whether a word space stands before the first token. A tail that ends
    in U+FFFD waits for the rest of its character, WINDOW tokens at most.
    """

    __slots__ = ("_before", "_decode", "_known", "_window")

    def __init__(self, decode: Callable[[list[int]], str], prompt: Items[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt[-WINDOW:])
        self._known = len(self._window)  # tokens of the window whose text is out
        self._before: str | None = None  # that text, as the window gives it

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        before, after = self._known_text(), self._decode(self._window)
        incomplete = after.endswith("\ufffd") and len(self._window) - self._known < WINDOW
        if incomplete or len(after) <= len(before):
            return ""
        self._advance(after)
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._known_text(), self._decode(self._window)
        self._advance(after)
        return after[len(before) :]

    def fork(self) -> WindowDetokenizer:
        other = WindowDetokenizer(self._decode)
        other._window, other._known, other._before = self._window[:], self._known, self._before
        return other

    def _known_text(self) -> str:
        if self._before is None:
            self._before = self._decode(self._window[: self._known])
        return self._before

    def _advance(self, text: str) -> None:
        """All of the window's text is out. The window is cut back once it is twice as long: decoding is what costs."""
        self._before = text
        if len(self._window) > 2 * WINDOW:
            del self._window[:-WINDOW]
            self._before = None
        self._known = len(self._window)


def from_table(table: TokenTable, prompt: Items[int] = ()) -> Detokenizer:
    """A detokenizer for one output of the table's vocabulary."""
    if table.style == "words":
        return WordDetokenizer(table, prompt)
    return ByteDetokenizer(table) if table.style == "bytes" else RunDetokenizer(table)


def table_style(decoder: Mapping[str, Any] | None) -> Style | None:
    """The style of a tokenizer.json "decoder" that TokenTable can take over ("Words": it has none), None for any other.

    A final Strip of leading spaces is left out on purpose: it belongs to the beginning of the prompt.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "bytes"
    if kinds == ["Words"]:
        return "words"
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    replace = steps[0]
    if replace.get("pattern") != {"String": "\u2581"} or replace.get("content") != " ":
        return None
    rest_is_strip = all(
        step.get("type") == "Strip" and step.get("content") == " " and not step.get("stop") for step in steps[3:]
    )
    return "runs" if rest_is_strip else None


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder.get("decoders", ())) if decoder.get("type") == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> str | bytes:
    try:
        data = bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # an added token written as plain text
        data = token.encode()
    try:
        return data.decode("utf-8") or b""
    except UnicodeDecodeError:
        return data


def _byte_fallback(token: str) -> str | bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ")
