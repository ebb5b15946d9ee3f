"""Beam search over an engine: the `width` most probable continuations of a prompt, ranked as transformers ranks them.

`BeamSearch` is the algorithm, without clock or engine; `beam_search` drives it. Every live beam is a request of one
token, so that beams run in the same batches as everything else, and the prefix cache holds what they share: the
prompt's KV is computed and stored once, a beam's own last block anew for each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Unpack, cast

from aserve.errors import InvalidRequestError, RequestFailedError
from aserve.plan import TokenLogprobs
from aserve.request import MAX_TOP_LOGPROBS, FinishReason, SamplingParams

if TYPE_CHECKING:
    from aserve.engine import Engine
    from aserve.intake import RequestOptions
    from aserve.prompts import Prompt
    from aserve.stream import Stream

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation. `score` is the sum of its tokens' logprobs over (number of tokens) ** length_penalty."""

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    text: str = ""


class _Live(NamedTuple):
    tokens: tuple[int, ...]
    logprob: float  # sum


class BeamSearch:
    """The beams of one prompt. Each `step` takes the best next tokens of every live beam.

    The same candidates, ranking and ending as transformers 5 `GenerationMixin._beam_search`: an ended beam counts only
    where it is among the `width` best of its step; lengths are of the output alone. `early_stopping` True ends with
    `width` ended beams, False once the best live one is worse than the worst of those at its present length, "never"
    once it could not become better at any length.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        end_token_ids: Iterable[int],
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self._ends = frozenset(end_token_ids)
        self.num_candidates = max(2, 1 + len(self._ends)) * width  # so that `width` of them go on
        if width < 1 or self.num_candidates > MAX_TOP_LOGPROBS:
            most = MAX_TOP_LOGPROBS // max(2, 1 + len(self._ends))
            raise InvalidRequestError(f"beam search takes a width of 1 to {most} here, got {width}", param="best_of")
        if max_tokens < 1:
            raise InvalidRequestError(f"beam search needs max_tokens above 0, got {max_tokens}", param="max_tokens")
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self.live = [_Live((), 0.0)]
        self._ended: list[Beam] = []  # best first

    @property
    def params(self) -> SamplingParams:
        """What a beam's next request asks for."""
        return SamplingParams(max_tokens=1, temperature=0.0, logprobs=self.num_candidates, ignore_eos=True)

    def step(self, best: Items[Items[tuple[int, float]]]) -> bool:
        """Extends the live beams by (token, logprob) pairs, best first. False where the search is over."""
        grown = [
            _Live((*beam.tokens, token), beam.logprob + logprob)
            for beam, pairs in zip(self.live, best, strict=True)
            for token, logprob in pairs[: self.num_candidates]
        ]
        grown.sort(key=lambda beam: -beam.logprob)
        del grown[self.num_candidates :]
        ended = [beam for beam in grown[: self._width] if self._ends_with(beam)]
        self.live = [beam for beam in grown if not self._ends_with(beam)][: self._width]
        self._ended += [
            Beam(beam.tokens, self._score(beam), "stop" if beam.tokens[-1] in self._ends else "length")
            for beam in ended
        ]
        self._ended.sort(key=lambda beam: -beam.score)
        del self._ended[self._width :]
        return bool(self.live) and not self._settled()

    def _ends_with(self, beam: _Live) -> bool:
        return beam.tokens[-1] in self._ends or len(beam.tokens) == self._max_tokens

    def _score(self, beam: _Live, length: int | None = None) -> float:
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

    def beams(self) -> list[Beam]:
        """Those that ended, best first."""
        return list(self._ended)


async def beam_search(
    engine: Engine,
    prompt: Prompt,
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    ignore_eos: bool = False,
    **options: Unpack[RequestOptions],
) -> list[Beam]:
    """The best continuations of `prompt`, `width` of them where there are as many.

    Raises what `Engine.submit` raises; cancelling the caller cancels every beam.
    """
    search = BeamSearch(
        width,
        max_tokens,
        () if ignore_eos else engine.end_token_ids,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    return await run_beams(engine, search, await engine.submit(prompt, search.params, **options), **options)


async def run_beams(engine: Engine, search: BeamSearch, first: Stream, **options: Unpack[RequestOptions]) -> list[Beam]:
    """Runs a search whose first request, with `search.params`, is submitted. A timeout is for the whole search."""
    clock = asyncio.get_running_loop().time
    timeout = options.get("timeout")
    deadline = None if timeout is None else clock() + timeout
    options["ttft_timeout"] = None  # the first request has answered it
    streams = [first]
    prompt = first.prompt_token_ids
    try:
        while search.step([await _best(stream) for stream in streams]):
            streams = []
            for beam in search.live:
                options["timeout"] = None if deadline is None else deadline - clock()
                streams.append(await engine.submit((*prompt, *beam.tokens), search.params, **options))
    finally:
        for stream in streams:
            await stream.aclose()
    return [_with_text(engine, beam) for beam in search.beams()]


async def _best(stream: Stream) -> list[tuple[int, float]]:
    """The best next tokens of a beam. Raises what its request failed with."""
    [done] = await stream.completions()
    if not done.logprobs:
        raise RequestFailedError(f"a beam ended early: {done.finish_reason}")
    return list(cast(TokenLogprobs, done.logprobs[0]).top)


def _with_text(engine: Engine, beam: Beam) -> Beam:
    if engine.tokenizer is None:
        return beam
    shown = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
    return Beam(beam.token_ids, beam.score, beam.finish_reason, engine.tokenizer.decode(shown))
