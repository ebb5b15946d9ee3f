"""Applications and engines for HTTP tests: a byte-level tokenizer, and a fake model that repeats its prompt.

`EchoRunner` is tests.fakes.FakeRunner (so paging mistakes still show) whose greedy output is the prompt's own tokens
again and again: a test chooses the reply by choosing the prompt, an end token in it included. `drawing` is for what
only a real sampler can get wrong: a Llama of two small layers with random weights.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import anyio
from starlette.types import ASGIApp
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from aserve import Engine, EngineConfig, Tokenizer
from aserve.executors.thread import ThreadExecutor
from aserve.plan import SlotUpdate
from aserve.tokenizer_files import load
from routes.app import create_app
from tests.asgi import Reply
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


def write_tokenizer(directory: Path, *, chat_template: str | None = None, add_bos: bool = False) -> None:
    """A tokenizer.json and tokenizer_config.json with a token for every byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIALS, *letters, *("".join(pair) for pair in MERGES)]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES)
    tokenizer = RawTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    options: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}
    if chat_template is not None:
        options["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(options))


def _load(template: str | None) -> Tokenizer:
    with TemporaryDirectory() as name:
        write_tokenizer(Path(name), chat_template=template)
        return load(Path(name), generation_config={"eos_token_id": [EOS, END]})


TOKENIZER = _load(TEMPLATE)  # made at import: reading files inside a test would block its loop
NO_TEMPLATE = _load(None)
BARE = _load("{% for m in messages %}{{ m.content }}{% endfor %}")  # the echo of a conversation is its content
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
    tokenizer: Tokenizer | None = None,
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
    tokenizer = tokenizer or (TOKENIZER if chat else NO_TEMPLATE)
    async with Engine(config, executor=ThreadExecutor(runner), tokenizer=tokenizer) as engine:
        yield engine


@asynccontextmanager
async def application(
    *,
    api_keys: tuple[str, ...] = (),
    cors_origins: tuple[str, ...] = (),
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    **options: Any,
) -> AsyncIterator[ASGIApp]:
    """The app over `serving`; at the end nothing may be left in the pool."""
    async with serving(**options) as engine:
        yield create_app(
            engine,
            api_keys=api_keys,
            cors_origins=cors_origins,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
        await idle(engine)


async def idle(engine: Engine) -> None:
    """Waits for the blocks of cancelled requests to come back."""
    with anyio.fail_after(10):
        while engine.stats().num_blocks_used or engine.stats().num_waiting:
            await anyio.lowlevel.checkpoint()


def _write_llama() -> Path:
    directory = Path(mkdtemp())
    atexit.register(rmtree, directory)
    write_tokenizer(directory, chat_template=TEMPLATE)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, END],
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, END]}))
    return directory


LLAMA = _write_llama()


@asynccontextmanager
async def drawing(**options: Any) -> AsyncIterator[ASGIApp]:
    """The app over a real runner with a tiny random model, in float32."""
    config = EngineConfig(
        model=str(LLAMA), load_format="dummy", dtype="float32", device="cpu", num_threads=1, **options
    )
    async with Engine(config) as engine:
        yield create_app(engine, served_model_names=["fake"])
        await idle(engine)


def joined(reply: Reply, index: int = 0) -> str:
    """The text of one choice of a streamed reply, either endpoint's."""
    text = ""
    for event in reply.events():
        for choice in event["choices"] if event != "[DONE]" else ():
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def reasons(reply: Reply) -> list[tuple[int, str]]:
    """Every finish reason of a streamed reply, with its choice's index."""
    return [
        (choice["index"], choice["finish_reason"])
        for event in reply.events()
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
