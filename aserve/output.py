"""One choice's way from scheduler events to deltas: text, stop strings, offsets.

Made by engine.py per sequence, called by pipeline.py once per token. Pure: it reads no clock and wakes nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from aserve.detokenizer import Detokenizer
from aserve.plan import TokenLogprobs
from aserve.ranking import Ranking
from aserve.request import Delta, FinishReason, Request, Sequence
from aserve.stop_strings import StopFinder
from aserve.stream import Mailbox, join


class Output:
    """What one sequence has shown so far. `detokenizer` None gives token ids without text."""

    __slots__ = (
        "_detokenizer",
        "_finder",
        "_num_unchecked",
        "box",
        "ended",
        "last_time",
        "num_tokens",
        "sequence",
    )

    def __init__(self, sequence: Sequence, box: Mailbox | Ranking, detokenizer: Detokenizer | None) -> None:
        params = sequence.request.params
        self.sequence = sequence
        self.box = box
        self.num_tokens = 0
        self.last_time = 0.0  # when its last token came
        self.ended = False  # its last delta is made
        self._detokenizer = detokenizer
        stops = params.stop if detokenizer is not None else ()
        self._finder = StopFinder(stops, include=params.include_stop_str_in_output) if stops else None
        self._num_unchecked = params.min_tokens  # a stop string may not use text of these tokens

    def advance(self, token_id: int, logprobs: TokenLogprobs | None) -> Delta:
        """The delta of a token after which the sequence goes on, unless its text completes a stop string."""
        self.num_tokens += 1
        text = self._detokenizer.push(token_id) if self._detokenizer is not None else ""
        finder = self._finder
        if finder is not None and self.num_tokens > self._num_unchecked:
            text = finder.push(text)
            if finder.matched is not None:
                return self._last(text, (token_id,), "stop", finder.matched, logprobs)
        entries = None if logprobs is None else (logprobs,)
        return Delta(self.sequence.index, text, (token_id,), None, None, self.num_tokens, entries)

    def finish(self, token_id: int | None, logprobs: TokenLogprobs | None, reason: FinishReason) -> Delta:
        """The last delta. A token that stopped the sequence shows no text, unless stops are to be included."""
        params = self.sequence.request.params
        text = ""
        tokens: tuple[int, ...] = ()
        hidden = self.sequence.stop_token is not None and not params.include_stop_str_in_output
        if token_id is not None:
            tokens = (token_id,)
            if not hidden:
                delta = self.advance(token_id, logprobs)
                if delta.finish_reason is not None:  # its text completes a stop string
                    return delta
                text = delta.text
            else:
                self.num_tokens += 1
        text += self._flush()
        if self._finder is not None and self._finder.matched is not None:
            return self._last(text, tokens, "stop", self._finder.matched, logprobs)
        stop_token = self.sequence.stop_token
        stop_reason = stop_token if stop_token in params.stop_token_ids else None
        return self._last(text, tokens, reason, stop_reason, logprobs)

    def _flush(self) -> str:
        """What was incomplete or held back; an incomplete character, too, may complete a stop string."""
        text = self._detokenizer.flush() if self._detokenizer is not None else ""
        if self._finder is None:
            return text
        if self.num_tokens > self._num_unchecked:
            text = self._finder.push(text)
        return text if self._finder.matched is not None else text + self._finder.flush()

    def _last(
        self,
        text: str,
        tokens: tuple[int, ...],
        reason: FinishReason,
        stop_reason: int | str | None,
        logprobs: TokenLogprobs | None,
    ) -> Delta:
        self.ended = True
        entries = None if logprobs is None else (logprobs,)
        return Delta(self.sequence.index, text, tokens, reason, stop_reason, self.num_tokens, entries)


class BeamOutput(Output):
    """One place among the best beams: nothing before the search is over, then a beam's text at once."""

    __slots__ = ()

    def finish(self, token_id: int | None, logprobs: TokenLogprobs | None, reason: FinishReason) -> Delta:
        request, index = self.sequence.request, self.sequence.index
        beams = request.beams.beams() if request.beams is not None and index < request.params.n else []
        if index >= len(beams):
            return self._last("", (), reason, None, None)
        beam = beams[index]
        *tokens, last = zip(beam.token_ids, beam.logprobs or [None] * len(beam.token_ids), strict=True)
        deltas = [self.advance(token, entry) for token, entry in tokens]
        return join([*deltas, super().finish(*last, reason)])[0]


def outputs_of(request: Request, box: Mailbox, detokenizer: Callable[[], Detokenizer | None]) -> list[Output]:
    """One output per sequence. Where fewer are returned than are computed, they meet in a Ranking first."""
    kind = Output if request.beams is None else BeamOutput
    ranked = request.beams is not None or request.params.num_sequences > request.params.n
    sink = Ranking(box, request.params) if ranked else box
    return [kind(sequence, sink, detokenizer()) for sequence in request.sequences]
