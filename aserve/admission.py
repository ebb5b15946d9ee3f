"""What may enter: refuses, before any output, a request that can never be served or would wait too long.

engine.py calls admit() once per request, before Scheduler.add(). Pure functions of the request and the Limits; they
change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aserve.config import EngineConfig
from aserve.errors import ContextLengthError, InvalidRequestError, OverloadedError, TooManyRequestsError
from aserve.plan import WorkerInfo
from aserve.request import MAX_CHOICES, SamplingParams

MAX_RETRY_AFTER = 60.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers a request is held against; tokens, blocks and sequences."""

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    max_num_seqs: int
    max_n: int = MAX_CHOICES
    max_queue: int = 10_000
    max_queue_per_tenant: int | None = None

    @classmethod
    def create(cls, config: EngineConfig, info: WorkerInfo) -> Limits:
        """The limits of an engine whose worker has started."""
        return cls(
            max_model_len=info.max_model_len,
            num_blocks=info.num_gpu_blocks,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            max_num_seqs=min(info.max_num_seqs, info.max_num_batched_tokens),  # every running sequence fits a step
            max_n=config.max_n,
            max_queue=config.max_queue,
            max_queue_per_tenant=config.max_queue_per_tenant,
        )

    @property
    def pool_tokens(self) -> int:
        """Positions the device pool holds."""
        return self.num_blocks * self.block_size


class Load(NamedTuple):
    """What a request meets: how many wait, how many of its tenant, and the seconds it waits at least."""

    num_waiting: int = 0
    num_of_tenant: int = 0
    least_wait: float = 0.0


def admit(
    prompt: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    load: Load = Load(),  # noqa: B008 - immutable
    *,
    patience: float | None = None,
) -> int:
    """The request's max_tokens, resolved: at most what context and pool allow where the caller gave none.

    `patience` is the seconds that are left to its first token. Raises InvalidRequestError (400) naming the field,
    ContextLengthError (400) naming both lengths, OverloadedError (503) where the queue is full or too long for its
    patience, or TooManyRequestsError (429) where its tenant has as many waiting as it may.
    """
    if not prompt:
        raise InvalidRequestError("the prompt is empty: it needs at least one token", param="prompt")
    _check_vocabulary(prompt, params, limits.vocab_size)
    _check_width(params, limits)
    max_tokens = _resolve_max_tokens(len(prompt), params, limits)
    _check_queue(limits, load, patience)
    return max_tokens


def _check_queue(limits: Limits, load: Load, patience: float | None) -> None:
    retry_after = min(MAX_RETRY_AFTER, max(1.0, load.least_wait))
    if load.num_waiting >= limits.max_queue:
        raise OverloadedError(
            f"{load.num_waiting} requests are waiting (--max-queue {limits.max_queue}); try again later",
            retry_after=retry_after,
        )
    most = limits.max_queue_per_tenant
    if most is not None and load.num_of_tenant >= most:
        raise TooManyRequestsError(
            f"{load.num_of_tenant} requests of this key or user are waiting (--max-queue-per-tenant {most}); "
            "try again later",
            retry_after=retry_after,
        )
    if patience is not None and load.least_wait > max(0.0, patience):
        raise OverloadedError(
            f"the first token would come in {load.least_wait:.1f} s at the earliest, after the ttft_timeout",
            retry_after=retry_after,
        )


def _check_vocabulary(prompt: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    fields: tuple[tuple[str, Iterable[int]], ...] = (
        ("prompt", prompt),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    )
    for name, token_ids in fields:
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequestError(
                f"{name} has token id {wrong}, outside the vocabulary of {vocab_size} tokens", param=name
            )


def _check_width(params: SamplingParams, limits: Limits) -> None:
    most = min(limits.max_n, limits.max_num_seqs)
    name = "n" if params.best_of is None else "best_of"
    if params.num_sequences > most:
        raise InvalidRequestError(
            f"{name} is {params.num_sequences}, this server runs at most {most} choices of a request", param=name
        )


def _resolve_max_tokens(num_prompt: int, params: SamplingParams, limits: Limits) -> int:
    asked = params.max_tokens
    context, room = limits.max_model_len, _pool_room(num_prompt, params.num_sequences, limits)
    least = 1 if asked is None else asked
    if num_prompt + least > context:
        output = "" if asked is None else f" and max_tokens is {asked}"
        wanted = f"{num_prompt + least} tokens" + (" at least" if asked is None else "")
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens{output}: {wanted}, but the context is {context} tokens",
            param="prompt" if asked is None or num_prompt >= context else "max_tokens",
            num_prompt=num_prompt,
            num_output=asked,
            limit=context,
        )
    if least > room:
        width = params.num_sequences
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and n x max_tokens is {width} x {least}: they do not fit the KV "
            f"pool of {limits.pool_tokens} tokens",
            param="prompt" if room <= 0 else "max_tokens",
            num_prompt=num_prompt,
            num_output=asked,
            limit=limits.pool_tokens,
        )
    if asked is not None:
        return asked
    max_tokens = min(context - num_prompt, room)
    if params.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, but after {num_prompt} prompt tokens at most {max_tokens} fit",
            param="min_tokens",
        )
    return max_tokens


def _pool_room(num_prompt: int, n: int, limits: Limits) -> int:
    """Output tokens that each of n choices may have so that all of them fit the pool at once; below 0 where the
    prompt alone does not fit. Full prompt blocks are shared, the rest is each choice's own."""
    num_shared = num_prompt // limits.block_size
    return (num_shared + (limits.num_blocks - num_shared) // n) * limits.block_size - num_prompt
