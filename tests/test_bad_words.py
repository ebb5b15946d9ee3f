"""bad_words: the masks that keep an output free of token sequences, alone and over HTTP."""

from __future__ import annotations

import pytest

from aserve.bad_words import BadWords, banned_sequences
from tests.asgi import post
from tests.serving import NO_TEMPLATE, drawing

pytestmark = pytest.mark.anyio


def allowed(constraint: BadWords, token_id: int) -> bool:
    return bool(constraint.mask().read()[token_id // 8] >> token_id % 8 & 1)


def test_the_last_token_of_a_sequence_is_masked_where_the_others_went_before() -> None:
    constraint = BadWords([(7,), (1, 2, 3), (2, 4)], 20)
    steps = []
    for token in (1, 2, 9, 2, 2, 4):
        assert constraint.accept(token) is False
        steps.append((allowed(constraint, 3), allowed(constraint, 4)))
        assert not allowed(constraint, 7)
        assert allowed(constraint, 19)
    assert steps == [(True, True), (False, False), (True, True), (True, False), (True, False), (True, True)]


def test_a_fork_goes_its_own_way() -> None:
    first = BadWords([(1, 2)], 8)
    second = first.fork()
    first.accept(1)
    assert not allowed(first, 2)
    assert allowed(second, 2)


def test_a_word_is_banned_alone_and_after_a_space() -> None:
    found = banned_sequences(["the", " one"], NO_TEMPLATE)
    texts = [NO_TEMPLATE.decode(sequence) for sequence in found]
    assert texts == ["the", " the", "one", " one"]


async def test_words_do_not_come_over_http() -> None:
    request = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "n": 2}
    async with drawing() as app:
        free = (await post(app, "/v1/completions", request | {"logprobs": 0})).json()["choices"][0]
        tokens = [token for token in free["logprobs"]["tokens"] if token.isascii() and token.strip()]
        single, pair = tokens[0], "".join(tokens[1:3])
        bad = await post(app, "/v1/completions", request | {"bad_words": [single, pair]})
        none = await post(app, "/v1/completions", request | {"bad_words": []})
        refused = await post(app, "/v1/completions", request | {"bad_words": [""]})
        both = await post(app, "/v1/completions", request | {"bad_words": ["a"], "allowed_token_ids": [5]})
    for choice in bad.json()["choices"]:
        assert single not in choice["text"]
        assert pair not in choice["text"]
    assert none.json()["choices"][0]["text"] == free["text"]
    assert refused.status == both.status == 400
    assert refused.json()["error"]["param"] == both.json()["error"]["param"] == "bad_words"


async def test_the_draw_that_reaches_the_limit_is_masked_too() -> None:
    request = {"prompt": "hello", "temperature": 0, "guided_regex": "a+", "max_tokens": 5}
    async with drawing() as app:
        choice = (await post(app, "/v1/completions", request)).json()["choices"][0]
    assert choice["text"] == "aaaaa"[: len(choice["text"])]
    assert len(choice["text"]) == 5 or choice["finish_reason"] == "stop"
