"""L08: alternatives come from the raw logits, whatever top_p is (our choice; see docs/api.md)."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import drawing

pytestmark = pytest.mark.anyio


async def test_top_p_changes_neither_the_count_nor_the_values() -> None:
    request = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3, "max_tokens": 1}
    async with drawing() as app:
        replies = [await post(app, "/v1/chat/completions", request | {"top_p": p}) for p in (1.0, 0.5, 0.01)]
    tops = [reply.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] for reply in replies]
    assert [len(top) for top in tops] == [3, 3, 3]
    assert tops[0] == tops[1] == tops[2]
    assert all(-100 < entry["logprob"] < 0 for entry in tops[0])
