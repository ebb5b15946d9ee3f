"""Stop strings in a text that comes in pieces: none leaks, whole or in part.

output.py has a StopFinder per choice that has stop strings, a beam a StopWatch. Pure.
"""

from __future__ import annotations

from aserve.detokenizer import Detokenizer


class StopFinder:
    """Holds back the longest tail that may become a stop string, and cuts at the first one that completes.

    Where several complete at once the one that began first wins, so the result does not depend on how the text was
    cut into pieces. `matched` is the stop string found; nothing may be pushed after it.
    """

    __slots__ = ("_first", "_held", "_include", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._first = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that no stop string can claim any more."""
        if not self._held and self._first.isdisjoint(text):  # nearly always
            return text
        text = self._held + text
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, self.matched = found
            self._held = ""
            return text[: end if self._include else start]
        hold = min(_first_partial(text, stop) for stop in self._stops)
        self._held = text[hold:]
        return text[:hold]

    def flush(self) -> str:
        """What was held back, at an end that is no stop string."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> StopFinder:
        """Another output's, at the same place."""
        other = StopFinder.__new__(StopFinder)
        other._stops, other._first, other._include = self._stops, self._first, self._include
        other._held, other.matched = self._held, self.matched
        return other


class StopWatch:
    """Says with which token an output's text completes a stop string; beams.Watch. It shows no text.

    The first `num_unchecked` tokens complete none.
    """

    __slots__ = ("_detokenizer", "_finder", "_num_unchecked")

    def __init__(self, detokenizer: Detokenizer, finder: StopFinder, num_unchecked: int = 0) -> None:
        self._detokenizer = detokenizer
        self._finder = finder
        self._num_unchecked = num_unchecked

    def fork(self) -> StopWatch:
        """Another output's, at the same place."""
        return StopWatch(self._detokenizer.fork(), self._finder.fork(), self._num_unchecked)

    def push(self, token_id: int) -> bool:
        """Takes a token. True where a stop string is complete: nothing may be pushed after it."""
        text = self._detokenizer.push(token_id)
        self._num_unchecked -= 1
        if self._num_unchecked < 0:
            self._finder.push(text)
        return self._finder.matched is not None


def _first_partial(text: str, stop: str) -> int:
    """Where the longest tail of `text` that begins `stop` starts; len(text) if none does."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)
