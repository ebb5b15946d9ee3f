"""From a call to an admitted request: what it may say, and what is checked before it enters.

engine.py makes one Intake when it starts. Encoding and compiling may take a while and happen off the event loop;
`admit` then decides at once, so that nothing can happen between its yes and the request's place in the scheduler.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, NamedTuple, TypedDict

from aserve.admission import Limits, Load, admit
from aserve.bad_words import free_of
from aserve.beams import BeamSearch
from aserve.constraint import Constraint
from aserve.detokenizer import Detokenizer
from aserve.errors import InvalidRequestError
from aserve.prompts import OffLoop, PromptEncoder
from aserve.request import Request, SamplingParams, Sequence
from aserve.stop_strings import StopFinder, StopWatch
from aserve.stream import SlowReader
from aserve.structured import StructuredOutputs
from aserve.tokenizer import Tokenizer


class RequestOptions(TypedDict, total=False):
    """What a request may say beside its prompt and sampling."""

    priority: int  # lower runs first
    tenant: str  # fairness is between tenants
    timeout: float | None  # seconds for the whole request
    ttft_timeout: float | None  # seconds to its first token
    label: str | None  # the client's own id; need not be unique
    cache_salt: str | None  # requests with different salts share no cached prefix
    slow_reader: SlowReader  # what happens once more than `max_unread` bytes wait to be read; default: coalesce
    max_unread: int


class ChatOptions(RequestOptions, total=False):
    """What a chat request may say beside its messages and sampling."""

    tools: Items[Mapping[str, Any]] | None
    chat_template: str | None  # in place of the model's
    add_generation_prompt: bool
    continue_final_message: bool  # the output goes on where the last message ends
    chat_template_kwargs: Mapping[str, Any] | None


class Call(NamedTuple):
    """A request that is encoded and whose grammar is compiled: what `admit` decides about."""

    key: str
    prompt: Items[int]
    params: SamplingParams
    constraints: list[Constraint | None]
    options: RequestOptions
    arrival: float


class Intake:
    """Admits the requests of one engine. `end_token_ids` end an output, unless its request says ignore_eos."""

    def __init__(
        self,
        limits: Limits,
        *,
        prompts: PromptEncoder,
        structured: StructuredOutputs,
        tokenizer: Tokenizer | None,
        off_loop: OffLoop,
        end_token_ids: tuple[int, ...],
    ) -> None:
        self.prompts = prompts
        self.structured = structured
        self._limits = limits
        self._tokenizer = tokenizer
        self._off_loop = off_loop
        self._end_token_ids = end_token_ids
        self._ids = itertools.count(1)

    async def constraints(self, params: SamplingParams) -> list[Constraint | None]:
        """What holds each choice to its form, None where it is free. Raises InvalidRequestError naming the field."""
        if params.bad_words:  # never together with a form
            return await self._free_of(params.bad_words, params.num_sequences)
        return await self.structured.constraints(params.structured, params.num_sequences)

    async def _free_of(self, words: Items[str], count: int) -> list[Constraint | None]:
        if self._tokenizer is None:
            raise InvalidRequestError("bad_words need a tokenizer", param="bad_words")
        call = partial(free_of, words, self._tokenizer, self._limits.vocab_size, count)
        return await self._off_loop(call) if self._tokenizer.is_long(2 * sum(map(len, words))) else call()

    def admit(self, call: Call, load: Load, now: float) -> Request:
        """The request, ready for the scheduler. Raises InvalidRequestError, ContextLengthError or OverloadedError."""
        params, options = call.params, call.options
        due = _deadline(call.arrival, options.get("ttft_timeout"), "ttft_timeout")
        request = Request(
            id=next(self._ids),
            key=call.key,
            prompt=tuple(call.prompt),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            max_tokens=admit(call.prompt, params, self._limits, load, patience=None if due is None else due - now),
            arrival=call.arrival,
            end_token_ids=() if params.ignore_eos and params.structured is None else self._end_token_ids,
            deadline=_deadline(call.arrival, options.get("timeout"), "timeout"),
            first_token_deadline=due,
            priority=options.get("priority", 0),
            tenant=options.get("tenant", ""),
            label=options.get("label"),
            cache_salt=options.get("cache_salt"),
        )
        request.sequences = [
            Sequence(request, index, constraint=constraint) for index, constraint in enumerate(call.constraints)
        ]
        if params.use_beam_search:
            request.beams = self._beams(request)
        return request

    def _beams(self, request: Request) -> BeamSearch:
        params, detokenizer = request.params, self.detokenizer(request)
        watch = None
        if params.stop and detokenizer is not None:
            watch = StopWatch(detokenizer, StopFinder(params.stop), params.min_tokens)
        return BeamSearch.of(request, watch)

    def detokenizer(self, request: Request) -> Detokenizer | None:
        """A fresh one for one of its outputs; None where the engine has no tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.detokenizer(request.prompt, request.params.skip_special_tokens)


def _deadline(arrival: float, timeout: float | None, name: str) -> float | None:
    if timeout is None:
        return None
    if math.isnan(timeout):
        raise InvalidRequestError(f"{name} must be a number of seconds", param=name)
    return arrival + timeout
