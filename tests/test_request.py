from __future__ import annotations

import math
from typing import Any

import pytest

from aserve.errors import InvalidRequestError
from aserve.request import MAX_STOP_CHARS, TRANSITIONS, Phase, PhaseError, SamplingParams
from tests.fakes import make_request


def test_every_edge_of_the_table_is_allowed_and_no_other() -> None:
    for source in Phase:
        for target in Phase:
            sequence = make_request([5]).sequences[0]
            sequence.phase = source
            if target in TRANSITIONS[source]:
                sequence.move(target)
                assert sequence.phase is target
            else:
                with pytest.raises(PhaseError):
                    sequence.move(target)
                assert sequence.phase is source


def test_finished_is_terminal() -> None:
    assert TRANSITIONS[Phase.FINISHED] == frozenset()
    assert all(Phase.FINISHED in TRANSITIONS[phase] for phase in Phase if phase is not Phase.FINISHED)


def test_a_request_has_finished_with_its_last_choice() -> None:
    request = make_request([5], SamplingParams(n=2, max_tokens=1))
    request.sequences[0].move(Phase.FINISHED)
    assert not request.finished
    request.sequences[1].move(Phase.FINISHED)
    assert request.finished


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("max_tokens", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**64),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ("",)),
        ("stop", ("x" * (MAX_STOP_CHARS + 1),)),
        ("stop", ("a",) * 17),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("allowed_token_ids", ()),
        ("temperature", True),
        ("temperature", "1"),
        ("n", 1.0),
        ("max_tokens", 2.5),
        ("top_k", 5.0),
        ("stop_token_ids", ("a",)),
        ("allowed_token_ids", (1.0,)),
        ("logit_bias", {"3": 1.0}),
        ("bad_words", (" ",)),
        ("bad_words", ("a",) * 257),
        ("bad_words", ("a" * 257,)),
    ],
)
def test_a_value_out_of_range_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(min_tokens=3, max_tokens=2)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_one_text_is_a_list_of_one(field: str) -> None:
    params: Any = {field: "end"}
    assert getattr(SamplingParams(**params), field) == ("end",)


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_may_be_off(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == top_k
