"""M11: top_k above the vocabulary is no limit, and batches may mix."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from tests.asgi import post
from tests.serving import drawing

pytestmark = pytest.mark.anyio


async def test_a_huge_top_k_and_a_mixed_batch_work() -> None:
    replies = []
    async with drawing() as app, anyio.create_task_group() as tasks:

        async def run(**fields: Any) -> None:
            replies.append(await post(app, "/v1/completions", {"prompt": "hello", "max_tokens": 8, **fields}))

        for top_k in (9_999_999, 2**62, 5):
            tasks.start_soon(partial(run, top_k=top_k))
        tasks.start_soon(partial(run, temperature=0))
        tasks.start_soon(partial(run, temperature=0, top_k=9_999_999))
    assert [reply.status for reply in replies] == [200] * 5
