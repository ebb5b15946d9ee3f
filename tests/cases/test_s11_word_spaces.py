"""S11: word spaces survive decoding token by token, under a SentencePiece vocabulary."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RawTokenizer

from aserve import Engine, EngineConfig, Tokenizer
from aserve.executors.thread import ThreadExecutor
from aserve.tokenizer_files import load
from routes.app import create_app
from tests.asgi import post
from tests.serving import EchoRunner, joined

pytestmark = pytest.mark.anyio
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581abcdefghijklmnopqrstuvwxyz,."]


def _llama_style() -> Tokenizer:
    """Llama 2's tokenizer in small: spaces as U+2581, byte fallback, a decoder that strips one leading space."""
    raw = RawTokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [], byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:3]])
    with TemporaryDirectory() as name:
        raw.save(str(Path(name) / "tokenizer.json"))
        return load(Path(name), generation_config={"eos_token_id": 2})


TOKENIZER = _llama_style()


@pytest.mark.parametrize("text", ["a word, and a word.", "caf\u00e9 \u4e2d\u6587 \U0001f600 end"])
async def test_joined_deltas_keep_every_space(text: str) -> None:
    runner = EchoRunner(num_gpu_blocks=64, block_size=16, max_model_len=512, vocab_size=len(WORDS))
    executor = ThreadExecutor(runner)
    length = len(TOKENIZER.encode(text))
    async with Engine(EngineConfig(model="fake"), executor=executor, tokenizer=TOKENIZER) as engine:
        app = create_app(engine)
        request = {"prompt": text, "max_tokens": 2 * length, "temperature": 0}
        whole = (await post(app, "/v1/completions", request)).json()["choices"][0]["text"]
        stream = await post(app, "/v1/completions", request | {"stream": True})
    assert joined(stream) == whole == f" {text} {text}"
