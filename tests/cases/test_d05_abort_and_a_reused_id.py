"""D05: an abort ends the one request that it was meant for, whatever id a client gives the next."""

from __future__ import annotations

import pytest

from aserve import SamplingParams
from tests.serving import idle, serving

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=1000, temperature=0.0)
SHORT = SamplingParams(max_tokens=6, temperature=0.0)


async def test_a_late_abort_never_reaches_the_next_request_of_that_name() -> None:
    async with serving() as engine:
        for _ in range(50):
            first = await engine.submit("abc", LONG, label="x")
            await first.ready()
            await first.aclose()
            second = await engine.submit("xyz", SHORT, label="x")
            await first.aclose()  # late, and again
            assert second.key != first.key
            assert await second.text() == "xyzxyz"
        await idle(engine)
        assert engine.metrics.outcomes["cancelled"] == 50
        assert engine.metrics.outcomes["length"] == 50
