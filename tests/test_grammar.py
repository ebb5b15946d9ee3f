"""Grammars over a byte-level tokenizer: what each kind allows, where it ends, and what is refused."""

from __future__ import annotations

import json
import pickle
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from aserve.constraint import Mask, StructuredOutput
from aserve.errors import InvalidRequestError, RequestFailedError
from aserve.grammar import MAX_CHARS, Grammars, Matcher
from aserve.tokenizer_files import from_backend
from tests.serving import BOS, END, EOS, TOKENIZER

ENDS = {EOS, END}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(TOKENIZER)
    yield grammars
    grammars.close()


def allowed(mask: Mask) -> set[int]:
    bits = mask.read()
    return {token for token in range(len(bits) * 8) if bits[token // 8] >> (token % 8) & 1}


def feed(matcher: Matcher, text: str) -> bool:
    """Draws the text byte by byte. True where it is complete and nothing may follow."""
    done = False
    for token in (TOKENIZER.encode(char, False) for char in text):
        for part in token:
            assert part in allowed(matcher.mask())
            done = matcher.accept(part)
    return done


def follows(matcher: Matcher, char: str) -> bool:
    return TOKENIZER.encode(char, False)[0] in allowed(matcher.mask())


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("json_object", None, '{"a": [1, {"b": null}]}'),
        ("json_schema", PERSON, '{"name":"Åsa \\"x\\"","age":-3}'),
        ("json_schema", json.dumps(PERSON), '{\n  "name": "A",\n  "age": 10}'),
        ("json_schema", True, "[]"),
        ("regex", "[ab]{2}c", "abc"),
        ("choice", ("yes", "no"), "no"),
        ("choice", ('q"\\\n', "\u00fc\u4e2d"), 'q"\\\n'),
        ("choice", ('q"\\\n', "\u00fc\u4e2d"), "\u00fc\u4e2d"),
        ("grammar", 'start: "a" x\nx: "b" | "c"', "ac"),
    ],
)
def test_an_output_ends_with_the_token_that_completes_it(grammars: Grammars, kind: Any, value: Any, text: str) -> None:
    matcher = grammars.compile(StructuredOutput(kind, value))
    assert allowed(matcher.mask()).isdisjoint(ENDS)
    *most, last = text
    assert not feed(matcher, "".join(most))
    assert feed(matcher, last)


def test_the_end_is_allowed_only_where_the_document_may_end(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("json_schema", {"type": "integer"}))
    assert allowed(matcher.mask()).isdisjoint(ENDS)
    assert not feed(matcher, "12")  # it might go on
    assert allowed(matcher.mask()) > ENDS
    assert matcher.accept(END)


def test_special_tokens_stay_out_of_strings(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("json_schema", {"type": "string"}))
    feed(matcher, '"<eos> \u201c')
    inside = allowed(matcher.mask())
    assert inside.isdisjoint({0, BOS, EOS, END})
    assert len(inside) > 100


def test_whitespace_is_bounded_inside_and_none_follows(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("json_object"))
    feed(matcher, "{")
    count = 0
    while follows(matcher, "\n"):
        feed(matcher, "\n")
        count += 1
    assert count == 32
    assert feed(matcher, "}")


def test_a_fork_goes_its_own_way(grammars: Grammars) -> None:
    first = grammars.compile(StructuredOutput("regex", "a(b|c)"))
    second = first.fork()
    feed(first, "a")
    other = first.fork()
    assert feed(first, "b")
    assert feed(other, "c")
    assert feed(second, "a") is False


def test_a_token_that_the_mask_did_not_allow_is_an_error(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("regex", "a+"))
    with pytest.raises(RequestFailedError):
        matcher.accept(TOKENIZER.encode("b", False)[0])
    matcher.mask().read()  # the model thread may still ask
    with pytest.raises(RequestFailedError):
        matcher.accept(TOKENIZER.encode("a", False)[0])


def test_one_mask_per_token_that_survives_a_process(grammars: Grammars) -> None:
    matcher = grammars.compile(StructuredOutput("regex", "[a-f]+x"))
    feed(matcher, "a")
    mask = matcher.mask()
    assert matcher.mask() is mask
    copy: Mask = pickle.loads(pickle.dumps(mask))
    assert allowed(copy) == allowed(mask)
    feed(matcher, "b")
    assert matcher.mask() is not mask


def test_the_same_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.compile(StructuredOutput("regex", "quux+"))
    monkeypatch.setattr(grammars, "_compile", None)
    assert not feed(grammars.compile(StructuredOutput("regex", "quux+", name="guided_regex")), "quux")


def test_who_waits_for_a_slow_mask_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aserve.grammar.SLOW_SECONDS", -1.0)  # every mask is slow
    told, held = threading.Event(), threading.Event()
    grammars = Grammars(TOKENIZER, told.set)
    matcher = grammars.compile(StructuredOutput("regex", "[a-f]+x"))
    feed(matcher, "a")
    matcher.mask().read()
    make = Matcher.make_mask

    def wait_and_make(self: Matcher) -> bytes:
        assert held.wait(10)
        return make(self)

    monkeypatch.setattr(Matcher, "make_mask", wait_and_make)
    feed_token = TOKENIZER.encode("b", False)[0]
    matcher.accept(feed_token)
    assert not matcher.ready
    assert not told.is_set()
    held.set()
    assert told.wait(10)
    assert matcher.ready
    grammars.close()


def nested(depth: int) -> dict[str, Any]:
    return {"oneOf": [nested(depth - 1), nested(depth - 1)]} if depth else {"type": "string"}


def deep(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": deep(depth - 1)} if depth else {"type": "string"}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", {"properties": {"a": "string"}}),
        ("json_schema", {"type": "strnig"}),
        ("json_schema", {"type": "string", "format": "no-such-format"}),
        ("json_schema", {"not": {"type": "string"}}),
        ("json_schema", {"if": {}, "then": {}}),
        ("json_schema", {"type": "array", "uniqueItems": True}),
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}),
        ("json_schema", {"type": "string", "pattern": "(["}),
        ("json_schema", {"$ref": "#/$defs/missing"}),
        ("json_schema", {"$ref": "http://example.com/x"}),
        ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}),
        ("json_schema", {"enum": []}),
        ("json_schema", {"type": "string", "x-guidance": {"lenient": True}, "not": {}}),
        ("json_schema", {"type": "number", "exclusiveMinimum": True}),
        ("json_schema", False),
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", {"const": float("nan")}),
        ("json_schema", {"description": "x" * MAX_CHARS}),
        ("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}}),
        ("json_schema", {"type": "array", "prefixItems": [PERSON] * 1200}),
        ("json_schema", {"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(16)]}),
        ("json_schema", nested(8)),
        ("json_schema", nested(12)),
        ("json_schema", deep(70)),
        ("json_schema", "[" * 100_000),
        ("regex", "([a-z]"),
        ("regex", "*a"),
        ("regex", "(?<=a)b"),
        ("regex", r"(a)\1"),
        ("grammar", "start: x"),
        ("grammar", "start: ("),
        ("grammar", "start: x\nx: x"),
        ("grammar", "start: /a/ " + "& /b/" * 9),
        ("grammar", "start: %json {}"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(grammars: Grammars, kind: Any, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        grammars.compile(StructuredOutput(kind, value, name="guided_json"))
    assert caught.value.param == "guided_json"
    assert caught.value.message.startswith("guided_json: the ")
    assert len(caught.value.message) < 700


def test_a_model_without_an_end_token_is_refused() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.BPE({char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(InvalidRequestError, match="no end token"):
        Grammars(from_backend(backend)).build()


def test_a_date_is_a_day_of_the_calendar(grammars: Grammars) -> None:
    def fits(text: str) -> bool:
        matcher = grammars.compile(StructuredOutput("json_schema", {"type": "string", "format": "date"}))
        try:
            return feed(matcher, f'"{text}"')
        except AssertionError:
            return False

    for text in ("2024-02-29", "2000-02-29", "1999-12-31", "0001-01-01"):
        assert fits(text)
    for text in ("2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "0000-01-01"):
        assert not fits(text)


@pytest.mark.parametrize(
    ("bounds", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0"),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1"),
        ({"exclusiveMinimum": 1, "minimum": 0, "maximum": 2}, "1"),
    ],
)
def test_an_exclusive_bound_is_no_value(grammars: Grammars, bounds: dict[str, Any], outside: str) -> None:
    rng = random.Random(1)
    for _ in range(40):
        matcher = grammars.compile(StructuredOutput("json_schema", {"type": "number", **bounds}))
        text, done = "", False
        while not done and len(text) < 12:
            token = rng.choice(sorted(allowed(matcher.mask())))
            done = matcher.accept(token)
            if token in ENDS:
                assert float(text) != float(outside)
            text += TOKENIZER.decode([token])


def test_members_of_oneof_that_a_tag_keeps_apart_are_taken(grammars: Grammars) -> None:
    def member(tag: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"t": {"const": tag}, "x": {"type": "integer"}}, "required": ["t"]}

    tagged = {"oneOf": [member("a"), {"$ref": "#/$defs/b"}], "$defs": {"b": member("b")}}
    assert feed(grammars.compile(StructuredOutput("json_schema", tagged)), '{"t":"b"}')
    with pytest.raises(InvalidRequestError):
        grammars.compile(StructuredOutput("json_schema", {"oneOf": [member("a"), member("a")]}))
