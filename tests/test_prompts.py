"""Prompts: what is refused before anything is encoded, and what an engine's callers may say beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from aserve.engine import Engine
from aserve.errors import ContextLengthError, InvalidRequestError
from aserve.executors.thread import ThreadExecutor
from aserve.prompts import OffLoop, PromptEncoder
from tests.engine_util import word_runner, word_tokenizer

pytestmark = pytest.mark.anyio


class Huge(Sequence[int]):
    """Token ids that nobody may look at."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(index)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError


async def test_too_many_ids_are_refused_by_their_number() -> None:
    encoder = PromptEncoder(None, 100, OffLoop())
    with pytest.raises(ContextLengthError, match="10000000 tokens, the context takes at most 100"):
        await encoder.encode(Huge(), True)


@pytest.mark.parametrize("prompt", [[1, 2.0], [1, True], ["a"]])
async def test_ids_are_integers(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="integers"):
        await PromptEncoder(None, 100, OffLoop()).encode(prompt, True)


async def test_an_option_that_does_not_exist_is_no_option() -> None:
    options: Any = {"max_tokens": 5}
    async with Engine(executor=ThreadExecutor(word_runner()), tokenizer=word_tokenizer()) as engine:
        with pytest.raises(TypeError, match="max_tokens"):
            engine.generate("a", **options)
        with pytest.raises(TypeError, match="max_tokens"):
            engine.chat([{"role": "user", "content": "a"}], **options)
