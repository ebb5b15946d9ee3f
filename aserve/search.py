"""Beam search as one call: `beam_search(engine, prompt, width=4)`.

It submits one request with `use_beam_search` and reads it to the end; whoever wants a stream, or n of the beams alone,
gives those parameters to the engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from aserve.beams import Beam
from aserve.request import EarlyStopping, SamplingParams

if TYPE_CHECKING:
    from aserve.engine import Engine
    from aserve.intake import RequestOptions
    from aserve.prompts import Prompt


async def beam_search(
    engine: Engine,
    prompt: Prompt,
    *,
    width: int,
    max_tokens: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    ignore_eos: bool = False,
    logprobs: int | None = None,
    **options: Unpack[RequestOptions],
) -> list[Beam]:
    """The best continuations of `prompt`, `width` of them.

    Raises what `Engine.submit` raises; cancelling the caller cancels the search.
    """
    params = SamplingParams(
        n=width,
        use_beam_search=True,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    async with engine.generate(prompt, params, **options) as stream:
        texts = [done.text for done in await stream.completions()]
        return [replace(beam, text=text) for beam, text in zip(stream.beams, texts, strict=True)]
