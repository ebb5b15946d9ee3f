"""Which choices of a request are returned, where that is known only once all have ended: best_of and beams.

output.py puts one in the mailbox's place; pipeline.py gives it every delta. It keeps them until the request ends, and
leaves the n best in the mailbox then, best first. Never waits, and never wakes a reader before.
"""

from __future__ import annotations

from dataclasses import replace

from aserve.errors import AserveError
from aserve.plan import TokenLogprobs
from aserve.request import Change, Delta, SamplingParams
from aserve.stream import Mailbox, join


class Ranking:
    """The choices of one request. Beams come in order; of others those with the highest mean logprob go first."""

    __slots__ = ("_box", "_deltas", "_params")

    def __init__(self, box: Mailbox, params: SamplingParams) -> None:
        self._box = box
        self._params = params
        self._deltas: list[Delta] = []

    def push(self, delta: Delta) -> None:
        """Keeps a delta."""
        self._deltas.append(delta)

    def end(self, error: AserveError | None = None) -> None:
        """No delta will follow: the best go to the reader, unless the request failed."""
        if error is None and not self._box.ended:
            for index, delta in enumerate(self._ranked()[: self._params.n]):
                logprobs = None if self._params.logprobs is None else delta.logprobs
                self._box.push(replace(delta, index=index, logprobs=logprobs))
        self._deltas.clear()
        self._box.end(error)

    def tell(self, change: Change) -> None:
        """The request was preempted, or runs again."""
        self._box.tell(change)

    def _ranked(self) -> list[Delta]:
        choices = sorted(join(self._deltas), key=lambda delta: delta.index)
        if self._params.use_beam_search:
            return choices
        return sorted(choices, key=lambda delta: -_mean_logprob(delta))


def _mean_logprob(delta: Delta) -> float:
    values = [entry.logprob for entry in delta.logprobs or () if isinstance(entry, TokenLogprobs)]
    return sum(values) / max(1, len(values))
