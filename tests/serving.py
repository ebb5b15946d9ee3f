"""Engines for HTTP tests: a byte-level tokenizer, and a fake model that repeats its prompt.

`EchoRunner` is tests.fakes.FakeRunner (so paging mistakes still show) whose greedy output is the prompt's own tokens
again and again: a test chooses the reply by choosing the prompt, an end token in it included.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from aserve import Engine, EngineConfig, Tokenizer
from aserve.executors.thread import ThreadExecutor
from aserve.plan import SlotUpdate
from aserve.tokenizer import load
from tests.fakes import FakeRunner

BOS, EOS, END = 1, 2, 3  # END is a second end id, of the generation config
SPECIALS = ["<pad>", "<bos>", "<eos>", "<end>"]
# Tokens of several bytes: a word, text on both sides of a space, and 2 of the 3 bytes of U+4E2D (E4 B8 AD).
MERGES = [("t", "h"), ("th", "e"), ("o", "n"), ("on", "e"), ("e", "\u0120"), ("\u00e4", "\u00b8")]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'refuse' %}"
    "{{ raise_exception('this template takes no such system message') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(directory: Path, *, chat_template: str | None = None) -> None:
    """A tokenizer.json and tokenizer_config.json with a token for every byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIALS, *letters, *("".join(pair) for pair in MERGES)]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES)
    tokenizer = RawTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    options: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
    if chat_template is not None:
        options["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(options))


def _load(*, chat: bool) -> Tokenizer:
    with TemporaryDirectory() as name:
        write_tokenizer(Path(name), chat_template=TEMPLATE if chat else None)
        return load(Path(name), generation_config={"eos_token_id": [EOS, END]})


TOKENIZER = _load(chat=True)  # made at import: reading files inside a test would block its loop
NO_TEMPLATE = _load(chat=False)
VOCAB_SIZE = TOKENIZER.vocab_size


class EchoRunner(FakeRunner):
    """Greedy: the prompt again and again. Otherwise a hash of context, seed and choice, over the letters a-z."""

    def _draw(self, context: list[int], update: SlotUpdate) -> int:
        params = update.params
        num_output = len(context) - update.num_prompt_tokens
        token = context[num_output % update.num_prompt_tokens]
        if not params.greedy:
            token = LETTERS[super()._draw(context, update) % len(LETTERS)]
        if params.logit_bias:  # a bias of 100 decides, as it would over any logits
            token = max(params.logit_bias, key=lambda token_id: params.logit_bias[token_id])
        allowed = params.allowed_token_ids
        if allowed is not None and token not in allowed:
            token = allowed[0]
        masked = update.end_token_ids if num_output < params.min_tokens else ()
        return LETTERS[0] if token in masked else token


LETTERS = tuple(TOKENIZER.encode("abcdefghijklmnopqrstuvwxyz", False))


@asynccontextmanager
async def serving(
    *,
    chat: bool = True,
    runner: FakeRunner | None = None,
    num_gpu_blocks: int = 4096,
    max_model_len: int = 2048,
    **options: Any,
) -> AsyncIterator[Engine]:
    """A started engine over the fake model; at the end every block must be free again."""
    runner = runner or EchoRunner(
        num_gpu_blocks=num_gpu_blocks, block_size=16, max_model_len=max_model_len, vocab_size=VOCAB_SIZE
    )
    config = EngineConfig(model="fake", **{"block_size": runner.info.block_size, **options})
    async with Engine(config, executor=ThreadExecutor(runner), tokenizer=TOKENIZER if chat else NO_TEMPLATE) as engine:
        yield engine
