from __future__ import annotations

from aserve.deadlines import Deadlines
from aserve.errors import DeadlineError
from tests.fakes import make_request


def test_the_earliest_deadline_is_next() -> None:
    deadlines = Deadlines()
    assert deadlines.next() is None
    deadlines.add(make_request([5], deadline=9.0))
    deadlines.add(make_request([5], first_token_deadline=4.0))
    assert deadlines.next() == 4.0


def test_an_expired_request_comes_once_with_its_reason_and_error() -> None:
    deadlines = Deadlines()
    request = make_request([5], deadline=3.0, first_token_deadline=2.0, arrival=1.0)
    deadlines.add(request)
    assert list(deadlines.take_expired(1.9)) == []
    assert list(deadlines.take_expired(5.0)) == [request]
    assert list(deadlines.take_expired(5.0)) == []
    assert request.cancel_reason == "deadline"
    assert isinstance(request.error, DeadlineError) and "2.000 s" in request.error.message


def test_after_the_first_token_only_the_whole_deadline_counts() -> None:
    deadlines = Deadlines()
    request = make_request([5], deadline=9.0, first_token_deadline=2.0)
    deadlines.add(request)
    deadlines.reached_first_token(request)
    request.sequences[0].output.append(7)
    assert list(deadlines.take_expired(8.0)) == []
    assert list(deadlines.take_expired(9.0)) == [request]
    assert request.error is None  # its tokens were worth something


def test_an_ended_request_is_forgotten() -> None:
    deadlines = Deadlines()
    request = make_request([5], deadline=9.0, first_token_deadline=2.0)
    deadlines.add(request)
    deadlines.remove(request)
    assert deadlines.next() is None
