"""M13: token ids outside the vocabulary are refused before the engine."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.asgi import post
from tests.serving import drawing

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"99999999999999999999": 1}),
        ("stop_token_ids", [99999999]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**70]),
        ("allowed_token_ids", [99999999]),
    ],
)
async def test_a_bad_id_is_400_and_the_neighbour_is_unchanged(field: str, value: Any) -> None:
    neighbour = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    async with drawing() as app:
        before = (await post(app, "/v1/completions", neighbour)).json()["choices"]
        during: list[Any] = []
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                during.append((await post(app, "/v1/completions", neighbour)).json()["choices"])

            tasks.start_soon(run)
            bad = await post(app, "/v1/completions", {"prompt": "a", "min_tokens": 3, field: value})
        assert bad.status == 400
        assert bad.json()["error"]["param"] == field
        assert during == [before]
