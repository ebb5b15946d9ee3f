"""Joined pieces equal the whole decode, for every vocabulary style and every cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as WordTokenizer

from aserve.detokenizer import (
    Detokenizer,
    TokenTable,
    WindowDetokenizer,
    from_table,
    table_style,
)
from aserve.models.files import resolve
from aserve.tokenizer_files import _part, from_backend, load

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café — 你好，世界 🎉👩‍👩‍👧",
    "def f(x):\n    return x ** 2\n",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|end|>", "<|a b|>"])
    tokenizer.add_tokens(["é plain"])
    return tokenizer


def sentencepiece(*, strip: bool) -> Tokenizer:
    words = ["▁the", "▁", "a", "b", "▁▁", "é", "你", "\n", "", "<0x", "world"]
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: 258 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"▁a": 0, "b": 1, "▁": 2, "c▁d": 3, "▁▁": 4}, []))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TABLES = {"bytes": byte_level(), "runs": sentencepiece(strip=False)}


def detokenizer(tokenizer: Tokenizer, *, skip: bool = True) -> Detokenizer:
    style = table_style(_part(tokenizer.decoder))
    assert style is not None
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return from_table(TokenTable(style, tokenizer.id_to_token, special if skip else ()))


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def whole_at_last(parts: list[str], text: str) -> bool:
    return len(parts) > 1 and not any(parts[:-1]) and parts[-1] == text


@pytest.mark.parametrize("style", TABLES)
@settings(deadline=None)
@given(data=st.data())
def test_joined_pieces_equal_the_whole_decode(style: str, data: st.DataObject) -> None:
    tokenizer = TABLES[style]
    # ids past the vocabulary too: a model's head may be padded
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(pieces(detokenizer(tokenizer, skip=skip), ids)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("style", TABLES)
@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_text_survives_a_round_trip_and_no_character_is_split(style: str, text: str) -> None:
    tokenizer = TABLES[style]
    ids = tokenizer.encode(text).ids if style == "bytes" else [2 + byte for byte in text.encode()]
    parts = pieces(detokenizer(tokenizer), ids)
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


def test_a_word_space_at_the_beginning_of_the_output_stays() -> None:
    tokenizer = sentencepiece(strip=True)
    the = tokenizer.token_to_id("▁the")
    assert tokenizer.decode([the, the]) == "the the"
    assert "".join(pieces(detokenizer(tokenizer), [the, the])) == " the the"


def test_bytes_left_at_the_end_become_replacement_characters() -> None:
    level, runs = TABLES["bytes"], TABLES["runs"]
    half = level.encode("🦀").ids[:-1]
    assert "".join(pieces(detokenizer(level), half)) == "\ufffd" == level.decode(half)
    half = [2 + byte for byte in "🦀".encode()[:-1]]
    assert pieces(detokenizer(runs), half) == ["", "", "", "\ufffd" * 3]


def test_an_incomplete_character_holds_back_nothing_before_it() -> None:
    level = TABLES["bytes"]
    first = level.encode("ok").ids
    decoder = detokenizer(level)
    assert "".join(map(decoder.push, first)) == "ok"
    assert whole_at_last([decoder.push(token) for token in level.encode("🦀").ids], "🦀")


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 4), max_size=30), cut=st.integers(0, 30))
def test_the_windowed_decoder_gives_the_text_after_the_prompt(ids: list[int], cut: int) -> None:
    tokenizer = metaspace()
    assert table_style(_part(tokenizer.decoder)) is None
    prompt, output = ids[:cut], ids[cut:]
    decoder = WindowDetokenizer(tokenizer.decode, prompt)
    whole, before = tokenizer.decode(ids), tokenizer.decode(prompt)
    joined = "".join(pieces(decoder, output))
    assert joined == whole[len(before) :]


def test_the_windowed_decoder_waits_for_whole_characters_but_not_for_ever() -> None:
    level = TABLES["bytes"]
    decoder = WindowDetokenizer(level.decode)
    assert whole_at_last([decoder.push(token) for token in level.encode("🦀").ids], "🦀")
    byte = level.token_to_id("\u0122")  # 0x80, never the beginning of a character
    shown = [decoder.push(byte) for _ in range(100)]
    assert "".join(shown).startswith("\ufffd" * 80)


def test_only_decoders_that_the_table_reproduces_are_taken_over() -> None:
    assert table_style(None) is None
    assert table_style({"type": "ByteLevel"}) == "bytes"
    assert table_style({"type": "WordPiece"}) is None
    steps = [
        {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    assert table_style({"type": "Sequence", "decoders": steps}) is None  # another space sign
    steps[0] = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    assert table_style({"type": "Sequence", "decoders": steps}) == "runs"
    steps.append({"type": "Strip", "content": " ", "start": 0, "stop": 1})
    assert table_style({"type": "Sequence", "decoders": steps}) is None  # cannot know the end in advance


def test_a_regex_replace_is_left_to_the_tokenizer() -> None:
    decoder = decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.ByteFallback(), decoders.Fuse()])
    assert table_style(_part(decoder)) is None


def test_the_demo_models_vocabulary_decodes_the_same_in_pieces() -> None:
    files = resolve(None)
    assert files.tokenizer is not None
    tokenizer = load(files.tokenizer)
    byte_tokens = [tokenizer.encode(f"<0x{byte:02X}>", False)[0] for byte in range(256)]
    rng = random.Random(0)
    for _ in range(500):
        ids: list[int] = []
        for _ in range(rng.randrange(1, 20)):
            text = rng.choice(CORPUS)
            start = rng.randrange(len(text))
            ids += tokenizer.encode(text[start:], False)
            ids += [byte_tokens[byte] for byte in rng.choice("é你🎉𒀀").encode()[: rng.randrange(5)]]
            ids.append(rng.randrange(tokenizer.vocab_size))
        for skip in (True, False):
            decoder = tokenizer.detokenizer((), skip)
            assert "".join([*map(decoder.push, ids), decoder.flush()]) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("style", ["bytes", "runs", "window"])
def test_a_fork_goes_its_own_way(style: str) -> None:
    tokenizer = TABLES["runs" if style == "runs" else "bytes"]
    whole, other = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a 你 b", "a 你你 a"))
    common = next(i for i, (x, y) in enumerate(zip(whole, other, strict=False)) if x != y)
    for cut in range(common + 1):
        first = WindowDetokenizer(tokenizer.decode) if style == "window" else detokenizer(tokenizer)
        start = "".join(first.push(token) for token in whole[:cut])
        second = first.fork()
        for each, ids in ((first, whole), (second, other)):
            text = start + "".join(each.push(token) for token in ids[cut:]) + each.flush()
            assert text == tokenizer.decode(ids)


def test_words_without_a_decoder_are_joined_as_the_tokenizer_joins_them() -> None:
    words = WordTokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "c": 3}, unk_token="a"))
    words.add_special_tokens(["<s>"])
    tokenizer = from_backend(words)
    for prompt in ([0, 1], [2], []):
        for output in ([3, 2, 0, 7, 1], [2, 1]):
            decoder = tokenizer.detokenizer(prompt)
            text = "".join([decoder.push(token) for token in output]) + decoder.flush()
            before, whole = (tokenizer.decode(ids) for ids in (prompt, prompt + output))
            assert text == whole[len(before) :]
    assert tokenizer.vocabulary() is None
