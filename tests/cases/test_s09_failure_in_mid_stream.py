"""S09: a failure in mid-stream is an error event, and other streams go on."""

from __future__ import annotations

import anyio
import pytest

from aserve.plan import StepPlan
from tests.asgi import Reply, post
from tests.serving import VOCAB_SIZE, EchoRunner, application, joined, reasons

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_fails_says_so_and_its_neighbour_ends_well(stream: bool) -> None:
    runner = EchoRunner(num_gpu_blocks=64, block_size=16, max_model_len=256, vocab_size=VOCAB_SIZE)
    replies: dict[str, Reply] = {}

    def poison(plan: StepPlan) -> None:
        """From its fourth token on, the logits of the request that begins with x are not finite."""
        for slot, state in runner.slots.items():
            if state.position >= 6 and state.update.params.stop == ("poison",):
                runner.bad_slots.add(slot)

    runner.before_step = poison

    async def run(name: str, stop: list[str]) -> None:
        body = {"prompt": "abc", "max_tokens": 40, "temperature": 0, "stream": stream, "stop": stop}
        replies[name] = await post(app, "/v1/completions", body)

    async with application(runner=runner) as app, anyio.create_task_group() as tasks:
        tasks.start_soon(run, "bad", ["poison"])
        tasks.start_soon(run, "good", [])
    if stream:
        events = replies["bad"].events()
        assert "error" in events[-1]
        assert joined(Reply(replies["bad"].messages[:2])) != ""
        assert "[DONE]" not in events
        assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
        assert reasons(replies["good"]) == [(0, "length")]
        assert joined(replies["good"]) == ("abc" * 14)[:40]
    else:
        assert replies["bad"].status == 500
        assert replies["good"].status == 200
