"""L01: every logprob on the wire is a finite number."""

from __future__ import annotations

import math

import pytest

from aserve.plan import StepPlan, StepResult, TokenLogprobs
from tests.asgi import post
from tests.serving import VOCAB_SIZE, EchoRunner, application, drawing

pytestmark = pytest.mark.anyio


class Impossible(EchoRunner):
    def _compute(self, plan: StepPlan) -> StepResult:
        result = super()._compute(plan)
        for draw, entry in result.logprobs.items():
            top = tuple((token_id, -math.inf) for token_id, _ in entry.top)
            result.logprobs[draw] = TokenLogprobs(entry.token_id, -math.inf, top)
        return result


@pytest.mark.parametrize("stream", [False, True])
async def test_minus_infinity_becomes_a_finite_floor(stream: bool) -> None:
    runner = Impossible(num_gpu_blocks=64, block_size=16, max_model_len=256, vocab_size=VOCAB_SIZE)
    fields = {"max_tokens": 2, "top_k": 1, "temperature": 1, "stream": stream}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    async with application(runner=runner) as app:
        replies = [
            await post(app, "/v1/completions", {"prompt": "ab", "logprobs": 1, **fields}),
            await post(app, "/v1/chat/completions", chat | fields),
        ]
    for reply in replies:
        assert reply.status == 200
        assert "-9999.0" in reply.body.decode()
        reply.events() if stream else reply.json()  # both under a parser that takes no infinity


async def test_echo_with_logprobs_and_top_k_is_strict_json() -> None:
    body = {"prompt": "hello", "echo": True, "logprobs": 1, "top_k": 1, "temperature": 1, "max_tokens": 3}
    async with drawing() as app:
        reply = await post(app, "/v1/completions", body)
    assert reply.status == 200
    assert len(reply.json()["choices"][0]["logprobs"]["tokens"]) == 8
