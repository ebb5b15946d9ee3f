"""C06: chat without a template is 400 that says how to give one; completions work."""

from __future__ import annotations

from pathlib import Path

import pytest

from aserve.tokenizer_files import load
from tests.asgi import post
from tests.serving import application, write_tokenizer

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
async def test_the_error_says_how_to_give_a_template(stream: bool) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with application(chat=False) as app:
        reply = await post(app, "/v1/chat/completions", {"messages": messages, "stream": stream})
        assert reply.status == 400
        assert "--chat-template" in reply.json()["error"]["message"]
        assert (await post(app, "/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200


def test_a_template_in_a_side_file_is_found(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load(tmp_path).render_chat([{"role": "user", "content": "hi"}]) == "hi!"
