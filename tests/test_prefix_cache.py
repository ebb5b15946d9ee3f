from __future__ import annotations

from aserve.prefix_cache import HashChain, root_hash, slice_tokens

ROOT = root_hash()


def test_a_name_depends_on_every_token_before_it() -> None:
    first = HashChain(ROOT, 2).extend((1, 2, 3, 4), (), 2)
    other = HashChain(ROOT, 2).extend((9, 2, 3, 4), (), 2)
    assert first[0] != other[0] and first[1] != other[1]


def test_equal_prefixes_have_equal_names_however_they_are_split() -> None:
    whole = HashChain(ROOT, 2).extend((1, 2, 3, 4, 5, 6), (), 3)
    chain = HashChain(ROOT, 2)
    chain.extend((1, 2, 3), (4, 5, 6), 1)
    assert chain.extend((1, 2, 3), (4, 5, 6), 3) == whole


def test_names_are_128_bits() -> None:
    assert len(ROOT) == 16
    assert [len(name) for name in HashChain(ROOT, 1).extend((1, 2), (), 2)] == [16, 16]


def test_extra_keys_of_different_kinds_never_meet() -> None:
    roots = {root_hash(), root_hash(salt="x"), root_hash(adapter="x"), root_hash(salt="x", adapter="x")}
    roots |= {root_hash(salt=""), root_hash(salt="adapter:1:x"), root_hash(salt="1:xadapter")}
    assert len(roots) == 7


def test_a_lone_surrogate_is_a_valid_salt() -> None:
    assert root_hash(salt="\ud800") != root_hash(salt="?")


def test_adopted_names_are_those_it_would_have_computed() -> None:
    leader = HashChain(ROOT, 2)
    leader.extend((1, 2, 3, 4), (5, 6), 3)
    chain = HashChain(ROOT, 2)
    chain.adopt(leader, 2)
    assert chain.extend((1, 2, 3, 4), (7, 8), 3) == HashChain(ROOT, 2).extend((1, 2, 3, 4, 7, 8), (), 3)


def test_tokens_are_sliced_across_prompt_and_output() -> None:
    prompt, output = (0, 1, 2), [3, 4, 5]
    for start in range(7):
        for end in range(start, 7):
            assert slice_tokens(prompt, output, start, end) == tuple(range(6))[start:end]
