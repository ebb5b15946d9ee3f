from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aserve.admission import Limits, Load, admit
from aserve.config import EngineConfig
from aserve.errors import ContextLengthError, InvalidRequestError, OverloadedError, TooManyRequestsError
from aserve.plan import WorkerInfo
from aserve.request import SamplingParams

LIMITS = Limits(max_model_len=64, num_blocks=32, block_size=4, vocab_size=100, max_num_seqs=8, max_queue=5)
SMALL_POOL = Limits(max_model_len=64, num_blocks=8, block_size=4, vocab_size=100, max_num_seqs=8)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(range(10, 10 + length))


def test_max_tokens_defaults_to_what_the_context_leaves() -> None:
    assert admit(prompt(10), SamplingParams(), LIMITS) == 54


def test_max_tokens_defaults_to_what_the_pool_leaves() -> None:
    assert admit(prompt(10), SamplingParams(), SMALL_POOL) == 22
    # two shared prompt blocks, three blocks for each of two choices
    assert admit(prompt(10), SamplingParams(n=2), SMALL_POOL) == 10


def test_asked_max_tokens_stay() -> None:
    assert admit(prompt(10), SamplingParams(max_tokens=7), LIMITS) == 7
    assert admit(prompt(10), SamplingParams(max_tokens=0), LIMITS) == 0


@pytest.mark.parametrize("length", [65, 64])
def test_a_prompt_that_leaves_no_room_names_both_lengths(length: int) -> None:
    with pytest.raises(ContextLengthError, match=f"{length} tokens.*context is 64") as caught:
        admit(prompt(length), SamplingParams(), LIMITS)
    assert caught.value.param == "prompt" and caught.value.num_prompt == length and caught.value.limit == 64


def test_a_full_context_is_allowed_to_the_last_token() -> None:
    assert admit(prompt(63), SamplingParams(), LIMITS) == 1
    assert admit(prompt(64), SamplingParams(max_tokens=0), LIMITS) == 0
    assert admit(prompt(60), SamplingParams(max_tokens=4), LIMITS) == 4


def test_prompt_and_max_tokens_beyond_the_context_name_both() -> None:
    with pytest.raises(ContextLengthError, match="60 tokens and max_tokens is 5") as caught:
        admit(prompt(60), SamplingParams(max_tokens=5), LIMITS)
    assert caught.value.param == "max_tokens" and caught.value.num_output == 5


def test_what_can_never_fit_the_pool_is_refused() -> None:
    assert admit(prompt(30), SamplingParams(max_tokens=2), SMALL_POOL) == 2
    with pytest.raises(ContextLengthError, match="pool of 32 tokens") as caught:
        admit(prompt(30), SamplingParams(max_tokens=3), SMALL_POOL)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextLengthError, match="pool of 32 tokens") as caught:
        admit(prompt(40), SamplingParams(), SMALL_POOL)
    assert caught.value.param == "prompt"


def test_choices_share_the_full_blocks_of_the_prompt() -> None:
    params = SamplingParams(n=3, max_tokens=8)
    assert admit(prompt(8), params, SMALL_POOL) == 8  # 2 shared + 3 x 2 blocks
    with pytest.raises(ContextLengthError):
        admit(prompt(9), params, SMALL_POOL)  # 2 shared + 3 x 3 blocks


def test_n_above_what_can_run_names_n() -> None:
    assert admit(prompt(4), SamplingParams(n=8, max_tokens=1), LIMITS) == 1
    with pytest.raises(InvalidRequestError, match="n is 9") as caught:
        admit(prompt(4), SamplingParams(n=9, max_tokens=1), LIMITS)
    assert caught.value.param == "n" and caught.value.status == 400


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        admit((), SamplingParams(), LIMITS)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token_id", [-1, 100, 2**63])
@pytest.mark.parametrize("name", ["prompt", "logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_token_ids_outside_the_vocabulary_name_their_field(name: str, token_id: int) -> None:
    tokens: tuple[int, ...] = (5, 99)
    fields: dict[str, Any] = {}
    if name == "prompt":
        tokens = (5, token_id, 7)
    else:
        fields[name] = {token_id: 1.0} if name == "logit_bias" else (0, token_id)
    with pytest.raises(InvalidRequestError, match=str(token_id)) as caught:
        admit(tokens, SamplingParams(**fields), LIMITS)
    assert caught.value.param == name


def test_min_tokens_beyond_the_room_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 54") as caught:
        admit(prompt(10), SamplingParams(min_tokens=55), LIMITS)
    assert caught.value.param == "min_tokens"


def test_a_full_queue_asks_to_retry() -> None:
    assert admit(prompt(4), SamplingParams(), LIMITS, Load(num_waiting=4))
    with pytest.raises(OverloadedError) as caught:
        admit(prompt(4), SamplingParams(), LIMITS, Load(num_waiting=5, least_wait=7.0))
    assert caught.value.retry_after == 7.0 and caught.value.status == 503


def test_a_request_that_is_wrong_is_told_so_even_when_the_queue_is_full() -> None:
    with pytest.raises(InvalidRequestError):
        admit((), SamplingParams(), LIMITS, Load(num_waiting=100))


def test_limits_come_from_options_and_worker() -> None:
    info = WorkerInfo(
        num_gpu_blocks=32,
        num_cpu_blocks=0,
        block_size=4,
        max_model_len=64,
        vocab_size=100,
        depth=1,
        device="cpu",
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=6,
    )
    limits = Limits.create(EngineConfig(max_n=4, max_queue=5), info)
    assert (limits.max_num_seqs, limits.max_n, limits.max_queue, limits.pool_tokens) == (6, 4, 5, 128)


def test_a_tenant_with_as_many_waiting_as_it_may_is_refused_alone() -> None:
    limits = replace(LIMITS, max_queue_per_tenant=2)
    assert admit(prompt(4), SamplingParams(), limits, Load(num_waiting=4, num_of_tenant=1))
    with pytest.raises(TooManyRequestsError, match="--max-queue-per-tenant 2") as caught:
        admit(prompt(4), SamplingParams(), limits, Load(num_waiting=2, num_of_tenant=2, least_wait=9.0))
    assert caught.value.status == 429 and caught.value.retry_after == 9.0


def test_a_queue_that_outlasts_a_requests_patience_refuses_it() -> None:
    load = Load(num_waiting=3, least_wait=4.0)
    assert admit(prompt(4), SamplingParams(), LIMITS, load, patience=4.0)
    assert admit(prompt(4), SamplingParams(), LIMITS, load)
    with pytest.raises(OverloadedError, match="ttft_timeout") as caught:
        admit(prompt(4), SamplingParams(), LIMITS, load, patience=3.9)
    assert caught.value.retry_after == 4.0


def test_nobody_is_sent_away_for_longer_than_a_minute() -> None:
    with pytest.raises(OverloadedError) as caught:
        admit(prompt(4), SamplingParams(), LIMITS, Load(num_waiting=5, least_wait=1e6))
    assert caught.value.retry_after == 60.0
