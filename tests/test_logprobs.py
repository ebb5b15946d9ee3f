"""The wire shapes of logprobs where tokens are not told apart by their text."""

from __future__ import annotations

from aserve import TokenLogprobs
from routes.logprobs import completion_logprobs


class Words:
    """A decoder with a word and a byte token of the same text."""

    bos_token_id = None

    def token_bytes(self, token_id: int) -> bytes:
        return {5: b"A", 65: b"A", 7: b"B"}[token_id]


def test_each_alternative_is_named_though_texts_are_the_same() -> None:
    top = ((5, -0.5), (65, -1.0), (7, -2.0))
    for chosen, expected in (
        (5, {"A": -0.5, "token_id:65": -1.0, "B": -2.0}),
        (65, {"token_id:5": -0.5, "A": -1.0, "B": -2.0}),
    ):
        shape = completion_logprobs(Words(), [TokenLogprobs(chosen, dict(top)[chosen], top)], offset=0, num_top=3)
        assert shape["tokens"] == ["A"]
        assert shape["top_logprobs"] == [expected]
        assert shape["top_logprobs"][0]["A"] == shape["token_logprobs"][0]


def test_a_chosen_token_that_is_not_among_the_best_comes_last() -> None:
    top = ((5, -0.5), (7, -2.0))
    shape = completion_logprobs(Words(), [TokenLogprobs(65, -9.0, top)], offset=0, num_top=2)
    assert list(shape["top_logprobs"][0].items()) == [("token_id:5", -0.5), ("B", -2.0), ("A", -9.0)]
