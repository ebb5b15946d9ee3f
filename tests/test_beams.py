"""The algorithm of beam search without a model. What transformers makes of the same is in cases/test_m15."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aserve.beams import BeamSearch, LiveBeam
from aserve.errors import InvalidRequestError
from aserve.plan import TokenLogprobs

END = 9
Pairs = tuple[tuple[int, float], ...]


def tokens(beams: list[LiveBeam]) -> list[tuple[int, ...]]:
    return [beam.tokens for beam in beams]


def test_the_best_candidates_of_all_beams_go_on_and_know_their_parents() -> None:
    search = BeamSearch(2, 10, ())
    assert search.step([((1, -1.0), (2, -2.0), (3, -3.0))])
    assert tokens(search.live) == [(1,), (2,)]
    assert search.step([((4, -4.0), (5, -5.0)), ((6, -0.5), (7, -1.0))])
    assert tokens(search.live) == [(2, 6), (2, 7)]
    assert [beam.parent for beam in search.live] == [1, 1]
    assert [beam.logprob for beam in search.live] == [-2.5, -3.0]


def test_an_end_counts_only_among_the_best_of_its_step() -> None:
    search = BeamSearch(2, 10, (END,))
    search.step([((1, -1.0), (2, -2.0), (END, -2.5), (3, -3.0))])
    assert search.beams() == [] and tokens(search.live) == [(1,), (2,)]
    search.step([((END, -0.1), (3, -1.0)), ((4, -1.0), (5, -1.5))])
    assert [beam.token_ids for beam in search.beams()] == [(1, END)]
    assert search.beams()[0].score == pytest.approx(-1.1 / 2)


def test_no_beam_ends_before_min_tokens() -> None:
    search = BeamSearch(1, 10, (END,), min_tokens=2)
    plenty: Pairs = ((END, -0.1), (1, -1.0), (2, -2.0))
    assert search.num_asked == 3  # one more than the candidates of a step, for the end that is left out
    assert search.step([plenty]) and search.step([plenty])
    assert tokens(search.live) == [(1, 1)]
    assert not search.step([plenty])
    assert [beam.token_ids for beam in search.beams()] == [(1, 1, END)]


def test_max_tokens_ends_every_beam() -> None:
    search = BeamSearch(2, 2, ())
    assert search.step([((1, -1.0), (2, -2.0))])
    assert not search.step([((3, -1.0), (4, -1.5)), ((5, -3.0), (6, -3.0))])
    assert [(beam.token_ids, beam.finish_reason) for beam in search.beams()] == [((1, 3), "length"), ((1, 4), "length")]


class Letters:
    """Counts its tokens, and stops at the token 7 once three are there."""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def fork(self) -> Letters:
        return Letters(self.seen)

    def push(self, token_id: int) -> bool:
        self.seen += 1
        return token_id == 7 and self.seen >= 3


def test_a_stop_string_ends_a_beam_as_an_end_does() -> None:
    search = BeamSearch(2, 10, (), watch=Letters())
    search.step([((7, -0.5), (1, -1.0))])
    search.step([((7, -0.5), (1, -1.0)), ((2, -5.0), (3, -5.0))])
    assert tokens(search.live) == [(7, 7), (7, 1)]
    search.step([((7, -0.5), (2, -3.0)), ((7, -0.6), (3, -4.0))])
    assert [(beam.token_ids, beam.finish_reason) for beam in search.beams()] == [
        ((7, 7, 7), "stop"),
        ((7, 1, 7), "stop"),
    ]


def test_fewer_beams_live_where_stop_strings_end_most_candidates() -> None:
    search = BeamSearch(2, 10, (), early_stopping="never", watch=Letters(2))
    assert search.step([((1, -0.1), (7, -0.2), (2, -9.0), (3, -9.5))])
    assert tokens(search.live) == [(1,), (2,)]
    assert search.step([((7, -0.5), (4, -1.0)), ((7, -9.0),)])
    assert tokens(search.live) == [(1, 4)]
    assert search.step([((5, -1.0), (6, -2.0))])
    assert tokens(search.live) == [(1, 4, 5), (1, 4, 6)]


def test_logprobs_are_those_of_the_beams_own_tokens() -> None:
    search = BeamSearch(1, 2, (), num_logprobs=1)
    search.step([((1, -1.0), (2, -2.0))])
    search.step([((3, -0.5), (4, -2.0))])
    [beam] = search.beams()
    assert beam.logprobs == (TokenLogprobs(1, -1.0, ((1, -1.0),)), TokenLogprobs(3, -0.5, ((3, -0.5),)))


def test_a_search_that_is_cut_has_the_best_so_far() -> None:
    search = BeamSearch(2, 10, (END,), early_stopping="never", length_penalty=2.0)
    search.step([((1, -1.0), (END, -1.5), (2, -4.0))])
    search.cut("deadline")
    assert [(beam.token_ids, beam.finish_reason) for beam in search.beams()] == [((1,), "deadline"), ((END,), "stop")]
    fresh = BeamSearch(2, 10, (END,))
    fresh.cut("cancelled")
    assert fresh.beams() == []


@pytest.mark.parametrize(
    ("width", "max_tokens", "ends", "param"),
    [(0, 5, (), "best_of"), (46, 5, (1,), "best_of"), (20, 5, range(20), "best_of"), (2, 0, (), "max_tokens")],
)
def test_what_cannot_be_searched_is_refused(width: int, max_tokens: int, ends: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearch(width, max_tokens, ends)
    assert caught.value.param == param


def test_as_many_beams_as_are_allowed_go_through() -> None:
    search = BeamSearch(45, 3, (END,))
    pairs = tuple((token, -math.log(token + 1)) for token in range(search.num_asked))
    while search.step([pairs] * len(search.live)):
        assert len(search.live) == 45
    assert len(search.beams()) == 45
