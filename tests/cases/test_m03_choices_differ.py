"""M03: n choices differ, and a seed repeats the whole set."""

from __future__ import annotations

import pytest

from tests.asgi import post
from tests.serving import drawing

pytestmark = pytest.mark.anyio


async def test_choices_differ_and_a_seed_repeats_them() -> None:
    request = {"prompt": "hello", "n": 6, "temperature": 1.2, "max_tokens": 8}
    async with drawing() as app:
        free = (await post(app, "/v1/completions", request)).json()["choices"]
        seeded = [(await post(app, "/v1/completions", request | {"seed": 3})).json()["choices"] for _ in range(2)]
        alone = (await post(app, "/v1/completions", request | {"seed": 3, "n": 1})).json()["choices"]
    for choices in (free, seeded[0]):
        assert len({choice["text"] for choice in choices}) == 6
    assert seeded[0] == seeded[1]
    assert alone[0] == seeded[0][0]
