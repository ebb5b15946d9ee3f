"""The thoughts of a model that thinks aloud, split from its answer: <think>...</think> at the beginning of a text.

turn.py feeds one `ReasoningParser` per choice. Pure. White space next to the tags belongs to neither side; a tag
anywhere but at the beginning is ordinary text.
"""

from __future__ import annotations

from enum import Enum, auto

from routes.tools import held_back

OPEN, CLOSE = "<think>", "</think>"


class _State(Enum):
    BEGINNING = auto()  # the opening tag may come
    THINKING = auto()
    ANSWERING = auto()


class ReasoningParser:
    """One choice's text. `opened`: the thoughts have begun before it, in the prompt."""

    def __init__(self, *, opened: bool = False) -> None:
        self._opened = opened
        self._state = _State.BEGINNING
        self._text = ""  # undecided
        self._trim = False  # leading white space of what comes is next to a tag

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Reasoning and answer that are certain after this text; `last` where it is the end."""
        self._text += text
        reasoning = ""
        if self._state is _State.BEGINNING:
            self._begin(last)
        if self._state is _State.THINKING:
            reasoning = self._think(last)
        return reasoning, self._answer() if self._state is _State.ANSWERING else ""

    def _begin(self, last: bool) -> None:
        text = self._text.lstrip()
        if text.startswith(OPEN):
            self._text, self._state, self._trim = text.removeprefix(OPEN), _State.THINKING, True
        elif last or not OPEN.startswith(text):
            self._state = _State.THINKING if self._opened else _State.ANSWERING
            self._trim = self._opened

    def _think(self, last: bool) -> str:
        text = self._trimmed()
        found = text.find(CLOSE)
        if found >= 0:
            self._text, self._state, self._trim = text[found + len(CLOSE) :], _State.ANSWERING, True
            return text[:found].rstrip()
        certain = len(text) if last else len(text) - held_back(text, CLOSE)
        self._text = text[certain:]
        return text[:certain]

    def _answer(self) -> str:
        text, self._text = self._trimmed(), ""
        return text

    def _trimmed(self) -> str:
        if not self._trim:
            return self._text
        text = self._text.lstrip()
        self._trim = not text
        return text


def opens_reasoning(prompt_end: str) -> bool:
    """True where a prompt that ends so leaves the model inside its thoughts."""
    return prompt_end.rstrip().endswith(OPEN)


REASONING_PARSERS = ("deepseek_r1", "qwen3", "think")  # one format; deepseek_r1 thinks even where no tag opens it
