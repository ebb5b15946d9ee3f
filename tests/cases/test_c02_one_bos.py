"""C02: a template that writes BOS and a tokenizer that adds it give one BOS, not two."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from aserve import Engine, EngineConfig, SamplingParams, Tokenizer
from aserve.executors.thread import ThreadExecutor
from aserve.tokenizer_files import load
from tests.serving import BOS, VOCAB_SIZE, EchoRunner, write_tokenizer

pytestmark = pytest.mark.anyio


def _tokenizer() -> Tokenizer:
    with TemporaryDirectory() as name:
        write_tokenizer(Path(name), chat_template="{{ bos_token }}{{ messages[0].content }}", add_bos=True)
        return load(Path(name))


TOKENIZER = _tokenizer()


async def test_chat_and_plain_prompts_begin_with_one_bos() -> None:
    runner = EchoRunner(num_gpu_blocks=16, block_size=16, max_model_len=128, vocab_size=VOCAB_SIZE)
    params = SamplingParams(max_tokens=1)
    async with Engine(EngineConfig(model="fake"), executor=ThreadExecutor(runner), tokenizer=TOKENIZER) as engine:
        chat = await engine.submit_chat([{"role": "user", "content": "hi"}], params)
        plain = await engine.submit("hi", params)
        bare = await engine.submit("hi", params, add_special_tokens=False)
        prompts = [stream.prompt_token_ids for stream in (chat, plain, bare)]
        for stream in (chat, plain, bare):
            await stream.text()
    text = tuple(TOKENIZER.encode("hi", False))
    assert prompts == [(BOS, *text), (BOS, *text), text]
