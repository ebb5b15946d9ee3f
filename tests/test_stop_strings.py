"""Stop strings: any cut into pieces ends at the same place, and nothing that one may still claim is shown."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.stop_strings import StopFinder, StopWatch


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reads `text` a character at a time: the first completed stop string cuts; of those, the longest."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_cut_into_pieces_stops_at_the_same_place(text: str, stops: list[str], include: bool, seed: int) -> None:
    expected, stop = reference(text, stops, include)
    finder = StopFinder(tuple(stops), include=include)
    rng = random.Random(seed)
    shown, rest = "", text
    while rest and finder.matched is None:
        size = rng.randint(0, 4)
        shown, rest = shown + finder.push(rest[:size]), rest[size:]
        # nothing that a stop string may still claim is out
        assert expected.startswith(shown)
    if finder.matched is None:
        shown += finder.flush()
    assert (shown, finder.matched) == (expected, stop)


def test_a_stop_inside_two_tokens_is_cut_exactly() -> None:
    finder = StopFinder(("END",))
    assert finder.push("text E") == "text "
    assert finder.push("ND more") == ""
    assert finder.matched == "END"


def test_a_held_back_tail_comes_out_when_it_is_ruled_out() -> None:
    finder = StopFinder(("\n\nUser:",))
    assert finder.push("hi\n") == "hi"
    assert finder.push("\nUse") == ""
    assert finder.push("d") == "\n\nUsed"
    assert finder.flush() == ""


class Spelling:
    """A detokenizer whose tokens are characters."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""

    def fork(self) -> Spelling:
        return self


def test_a_watch_finds_what_a_finder_finds_and_its_forks_do_not_meet() -> None:
    ids = [ord(char) for char in "the lazy dog"]
    watch = StopWatch(Spelling(), StopFinder(("zy d",)))
    assert not any(watch.push(token) for token in ids[:8])
    fork, late = watch.fork(), StopWatch(Spelling(), StopFinder(("zy d",)), num_unchecked=len(ids))
    assert [watch.push(token) for token in ids[8:10]] == [False, True]
    assert not fork.push(ord("x"))
    assert not any(late.push(token) for token in ids)
