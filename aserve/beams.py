"""Beam search as an algorithm: the `width` most probable continuations of a prompt, ranked as transformers ranks them.

A `BeamSearch` is the state of one request's search. beam_groups.py gives it the best next tokens of every live beam and
forks the sequences as it says; output.py shows the beams at the end. No clock, no memory, no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from aserve.errors import InvalidRequestError
from aserve.plan import TokenLogprobs
from aserve.request import EarlyStopping, FinishReason, Request

MAX_RANKED = 4096  # candidates ranked in one step: about two milliseconds


class Watch(Protocol):
    """Reads the text of one beam as it grows, for stop strings."""

    def fork(self) -> Watch:
        """Another beam's, at the same place."""
        ...

    def push(self, token_id: int) -> bool:
        """Takes a token. True where its text completes a stop string: nothing may follow."""
        ...


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation. `score` is the sum of its tokens' logprobs over (number of tokens) ** length_penalty."""

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None  # per token id, where asked


class LiveBeam(NamedTuple):
    """A beam that may go on. `parent` is its place among the live beams of the step before."""

    tokens: tuple[int, ...]
    logprob: float  # sum
    parent: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    watch: Watch | None = None


class BeamSearch:
    """The beams of one prompt. Each `step` takes the best next tokens of every live beam, best first.

    The same candidates, ranking and ending as transformers 5 `GenerationMixin._beam_search`: an ended beam counts only
    where it is among the `width` best of its step; lengths are of the output alone. `early_stopping` True ends with
    `width` ended beams, False once the best live one is worse than the worst of those at its present length, "never"
    once it could not become better at any length. No beam ends by a token of `end_token_ids` before `min_tokens`.

    Invariant: between steps 1 to `width` beams are live, best first.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        end_token_ids: Iterable[int],
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        min_tokens: int = 0,
        num_logprobs: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._ends = frozenset(end_token_ids)
        self._num_candidates = max(2, 1 + len(self._ends)) * width  # so that `width` of them go on
        if width < 1 or width * self._num_candidates > MAX_RANKED:
            most = int((MAX_RANKED // max(2, 1 + len(self._ends))) ** 0.5)
            raise InvalidRequestError(f"beam search takes a width of 1 to {most} here, got {width}", param="best_of")
        if max_tokens < 1:
            raise InvalidRequestError(f"beam search needs max_tokens above 0, got {max_tokens}", param="max_tokens")
        self.num_asked = self._num_candidates + (len(self._ends) if min_tokens else 0)  # next tokens of each live beam
        self._width = width
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_logprobs = num_logprobs
        self.live = [LiveBeam((), 0.0, watch=watch)]
        self._ended: list[Beam] = []  # best first

    @classmethod
    def of(cls, request: Request, watch: Watch | None = None) -> Self:
        """The search that a request asks for. Raises InvalidRequestError where it is too wide."""
        params = request.params
        return cls(
            params.num_sequences,
            request.max_tokens,
            (*request.end_token_ids, *params.stop_token_ids),
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            min_tokens=params.min_tokens,
            num_logprobs=params.logprobs,
            watch=watch,
        )

    def step(self, best: Items[Items[tuple[int, float]]]) -> bool:
        """Extends the live beams by (token, logprob) pairs. False where the search is over."""
        ranked = [
            (beam.logprob + logprob, parent, rank)
            for parent, (beam, pairs) in enumerate(zip(self.live, best, strict=True))
            for rank, (token, logprob) in enumerate(pairs)
            if token not in self._ends or len(beam.tokens) >= self._min_tokens
        ]
        ranked.sort(key=lambda candidate: -candidate[0])
        live: list[LiveBeam] = []
        for place, (logprob, parent, rank) in enumerate(ranked[: self._num_candidates]):
            beam = self._grow(parent, best[parent], rank, logprob)
            reason = self._reason(beam)
            if reason is None:
                live.append(beam)
            elif place < self._width:
                self._ended.append(self._finished(beam, reason))
        self.live = live[: self._width]
        self._rank_ended()
        return bool(self.live) and not self._settled()

    def _grow(self, parent: int, pairs: Items[tuple[int, float]], rank: int, logprob: float) -> LiveBeam:
        beam, (token, own) = self.live[parent], pairs[rank]
        logprobs = beam.logprobs
        if self._num_logprobs is not None:
            logprobs = (*logprobs, TokenLogprobs(token, own, tuple(pairs[: self._num_logprobs])))
        return LiveBeam((*beam.tokens, token), logprob, parent, logprobs, beam.watch and beam.watch.fork())

    def _reason(self, beam: LiveBeam) -> FinishReason | None:
        """Why the beam ends with its last token, if it does."""
        token = beam.tokens[-1]
        if token in self._ends or (beam.watch is not None and beam.watch.push(token)):
            return "stop"
        return "length" if len(beam.tokens) == self._max_tokens else None

    def _finished(self, beam: LiveBeam, reason: FinishReason) -> Beam:
        logprobs = None if self._num_logprobs is None else beam.logprobs
        return Beam(beam.tokens, self._score(beam), reason, logprobs=logprobs)

    def _rank_ended(self) -> None:
        self._ended.sort(key=lambda beam: -beam.score)
        del self._ended[self._width :]

    def _score(self, beam: LiveBeam, length: int | None = None) -> float:
        scale: float = (length or len(beam.tokens)) ** self._length_penalty
        return beam.logprob / scale

    def _settled(self) -> bool:
        """True where no live beam can, or shall, take the place of an ended one."""
        if len(self._ended) < self._width:
            return False
        if self._early_stopping is True:
            return True
        hopeful = self._early_stopping == "never" and self._length_penalty > 0
        best = self._score(self.live[0], self._max_tokens if hopeful else None)
        return best <= self._ended[-1].score

    def cut(self, reason: FinishReason) -> None:
        """Ends the search where it is: live beams count as they are."""
        self._ended += [self._finished(beam, reason) for beam in self.live if beam.tokens]
        self.live = []
        self._rank_ended()

    def beams(self) -> list[Beam]:
        """Those that ended, best first."""
        return list(self._ended)

    def ends_with(self, token_id: int) -> bool:
        """True for a token that ends a beam."""
        return token_id in self._ends
