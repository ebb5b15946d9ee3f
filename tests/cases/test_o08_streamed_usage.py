"""O08: streamed counts equal those of the whole answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.asgi import post
from tests.serving import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3, "temperature": 1, "seed": 1}, {"stop": ["lo"]}, {"n": 3, "stop": ["a"], "temperature": 1, "seed": 2}],
)
async def test_counts_agree(path: str, fields: dict[str, Any]) -> None:
    body: dict[str, Any] = {"max_tokens": 25, "temperature": 0, "prompt": "hello<eos>"}
    if path == "/v1/chat/completions":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "hello<eos>"}]
    async with application(enable_prefix_caching=False) as app:
        whole = (await post(app, path, body | fields)).json()
        stream = await post(app, path, body | fields | {"stream": True, "stream_options": {"include_usage": True}})
    assert stream.events()[-2]["usage"] == whole["usage"]
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
