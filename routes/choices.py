"""Choices that are not simply drawn: the n best of more (best_of), and beams (use_beam_search).

schemas.py checks the fields; endpoint.py asks here what to submit in place of the client's parameters, and for the
completions. Neither is streamed: which choices there are is known at the end only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from aserve import Beam, BeamSearch, Completion, Engine, InvalidRequestError, SamplingParams, Stream, run_beams

Completions = list[list[Completion]]  # per prompt, per choice


class Body(Protocol):
    """The fields this reads."""

    n: int | None
    best_of: int | None
    use_beam_search: bool | None
    length_penalty: float | None
    early_stopping: bool | str | None
    ignore_eos: bool | None

    def submit_arguments(self) -> dict[str, Any]: ...


# What would change the beams, if beam search took it into account.
_NOT_WITH_BEAMS = (
    "logprobs",
    "prompt_logprobs",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def check(body: Any) -> None:
    """Raises InvalidRequestError, naming the field, for values that do not go together."""
    n, best_of = body.n or 1, body.best_of
    if best_of is not None and not n <= best_of <= 128:
        raise InvalidRequestError(f"best_of must be at least n ({n}) and at most 128, got {best_of}", param="best_of")
    chosen = "use_beam_search" if body.use_beam_search else "best_of" if best_of is not None and best_of > n else None
    if chosen is not None and body.stream:
        raise InvalidRequestError(f"{chosen} cannot be streamed: the choices are known at the end", param=chosen)
    if not body.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(body, name) not in (None, False, 1.0):
                raise InvalidRequestError(f"{name} is for use_beam_search only", param=name)
        return
    if isinstance(body.early_stopping, str) and body.early_stopping != "never":
        raise InvalidRequestError('early_stopping must be true, false or "never"', param="early_stopping")
    if body.length_penalty is not None and not -10 <= body.length_penalty <= 10:
        raise InvalidRequestError("length_penalty must be -10 to 10", param="length_penalty")
    for name in _NOT_WITH_BEAMS:
        if getattr(body, name, None):
            raise InvalidRequestError(f"{name} cannot be combined with use_beam_search", param=name)


def drawn(engine: Engine, body: Body, params: SamplingParams) -> SamplingParams:
    """What the engine shall draw for a request with these parameters."""
    if body.use_beam_search:
        return _search(engine, body, params).params
    if body.best_of is not None and body.best_of > params.n:
        return replace(params, n=body.best_of, logprobs=params.logprobs or 0)
    return params


async def completions(
    engine: Engine, body: Body, params: SamplingParams, streams: Sequence[Stream]
) -> tuple[Completions, int]:
    """The choices of each stream that was submitted with `drawn` parameters, and how many tokens they took in all."""
    if body.use_beam_search:
        options: Any = body.submit_arguments()
        found = [await run_beams(engine, _search(engine, body, params), stream, **options) for stream in streams]
        beams = [group[: params.n] for group in found]
        num_tokens = sum(len(beam.token_ids) for group in beams for beam in group)
        return [[_completion(i, beam) for i, beam in enumerate(group)] for group in beams], num_tokens
    groups = [await stream.completions() for stream in streams]  # they run at once, whatever the order of reading
    num_tokens = sum(stream.usage.completion_tokens for stream in streams)
    return [_best(group, params.n) for group in groups], num_tokens


def _search(engine: Engine, body: Body, params: SamplingParams) -> BeamSearch:
    if params.max_tokens is None:
        raise InvalidRequestError("use_beam_search needs max_tokens", param="max_tokens")
    early: Any = body.early_stopping or False
    return BeamSearch(
        max(body.best_of or 1, params.n),
        params.max_tokens,
        () if body.ignore_eos else engine.end_token_ids,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=early,
    )


def _completion(index: int, beam: Beam) -> Completion:
    return Completion(index, beam.text, beam.token_ids, beam.finish_reason)


def _best(group: list[Completion], n: int) -> list[Completion]:
    """The n with the highest mean logprob, best first; all of them, as they are, where there are no more."""
    if len(group) <= n:
        return group

    def mean(done: Completion) -> float:
        entries: Any = done.logprobs or ()
        total: float = sum(entry.logprob for entry in entries)
        return total / max(1, len(entries))

    ranked = sorted(group, key=lambda done: (-mean(done), done.index))
    return [replace(done, index=index) for index, done in enumerate(ranked[:n])]
