"""V05: an explicit null is the same as leaving the field out."""

from __future__ import annotations

from typing import Any

import pytest

from routes.schemas import ChatBody, CompletionBody
from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
async def test_every_optional_field_may_be_null(kind: Any) -> None:
    path = "/v1/completions" if kind is CompletionBody else "/v1/chat/completions"
    needed = {"prompt": "hello", "messages": [{"role": "user", "content": "a"}]}
    nulls = dict.fromkeys(name for name in kind.__struct_fields__ if name not in needed)
    async with application(max_model_len=64) as app:
        reply = await post(app, path, {**needed, **nulls})
    assert reply.status == 200
