"""From a StructuredOutput to the Constraint of each choice: grammars, compiled and followed by llguidance.

Called by structured.py, on its threads: building the tokenizer's view takes about a second for a large vocabulary, and
compiling as long as the grammar is costly. The scheduler and the model thread see a `Matcher` and its masks through
the protocols of constraint.py. A grammar that cannot be honoured to the letter is refused, never approximated.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

from aserve import json_schema
from aserve.constraint import Mask, StructuredOutput
from aserve.errors import InvalidRequestError, RequestFailedError
from aserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_CHARS = 128 * 1024  # of a schema, an expression or a grammar
MAX_INTERSECTIONS = 8  # of a Lark grammar: the cost of each may double the whole
MAX_KEPT = 64  # compiled grammars
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each; more is an error of the request
SLOW_SECONDS = 0.002  # a matcher whose mask took longer is planned only once the next one is there
# Whitespace between the parts of a JSON document: enough to indent, not enough to go on for ever.
_JSON = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "coerce_one_of": False,
    "lenient": False,
}
_LITERALS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/')


class Grammars:
    """The grammars of one tokenizer. `on_ready` is called, on a thread of this class, when a slow mask is there."""

    def __init__(self, tokenizer: Tokenizer, on_ready: Callable[[], None] = lambda: None) -> None:
        self._tokenizer = tokenizer
        self._masks = MaskThread(on_ready)
        self._view: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def built(self) -> bool:
        """True once the tokenizer's view is there, so that compile() takes no longer than the grammar does."""
        return self._view is not None

    def build(self) -> None:
        """Makes the library's view of the tokenizer, once. It holds the GIL, about 4 us per word of the vocabulary.

        Raises InvalidRequestError for a tokenizer whose tokens have no known bytes, or that has no end token.
        """
        with self._lock:
            if self._view is None:
                self._view = _view_of(self._tokenizer)

    def compile(self, structured: StructuredOutput) -> Matcher:
        """A matcher at the beginning of an output. Raises InvalidRequestError naming the field."""
        self.build()
        text = _text_of(structured)
        key = (structured.kind, text)
        with self._lock:
            matcher = self._kept.get(key)
            if matcher is not None:
                self._kept.move_to_end(key)
                return matcher.fork()
        try:
            matcher = self._compile(_grammar_of(structured.kind, text))
        except (ValueError, RecursionError) as error:
            raise _refusal(structured, str(error)) from None
        with self._lock:
            self._kept[key] = matcher
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher.fork()

    def _compile(self, grammar: str) -> Matcher:
        """Compiles, and makes the first mask, which shows what costs too much to follow. Raises ValueError."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        state = LLMatcher(self._view, grammar, log_level=0, limits=limits)
        ignored = state.get_grammar_warnings()
        if ignored:
            raise ValueError(ignored[0])
        first = state.compute_bitmask() if not state.is_error() else b""
        if state.is_error():
            raise ValueError(state.get_error())
        if not any(first):
            raise ValueError("no output can satisfy it")
        return Matcher(state, self._masks, first)

    def close(self) -> None:
        """Ends the mask thread; masks that are read later are made by their readers."""
        self._masks.close()


class Matcher:
    """A constraint.Constraint: where one output stands in its grammar. Driven from one thread, masks made on others."""

    __slots__ = ("_mask", "_masks", "_slow", "_state")

    def __init__(self, state: llguidance.LLMatcher, masks: MaskThread, first: bytes) -> None:
        self._state = state
        self._masks = masks
        self._slow = False
        self._mask: LazyMask | None = LazyMask(self, first)

    def fork(self) -> Matcher:
        """Another output that has got as far as this one, whose mask must have been read."""
        return Matcher(self._state.deep_copy(), self._masks, self.mask().read())

    @property
    def ready(self) -> bool:
        """False while a mask is in the making that may take longer than a step should wait."""
        if not self._slow:
            return True
        mask = self.mask()
        mask.awaited = True  # before looking: whoever makes it looks in the other order
        return mask.done

    def mask(self) -> LazyMask:
        """The next draw's mask, in the making from now on."""
        if self._mask is None:
            self._mask = LazyMask(self)
            self._masks.start(self._mask)
        return self._mask

    def accept(self, token_id: int) -> bool:
        """Takes a drawn token. True at the end of the output. Raises RequestFailedError."""
        self._mask = None
        if not self._state.consume_token(token_id):
            reason = " ".join(self._state.get_error().split())[:300] or f"token {token_id} does not fit"
            raise RequestFailedError(f"the output left its grammar: {reason}")
        return bool(self._state.is_stopped())

    def make_mask(self) -> bytes:
        """Called once per token, by whoever comes first: the mask thread or the reader. Releases the GIL."""
        began = perf_counter()
        try:
            return bytes(self._state.compute_bitmask())
        except ValueError:  # the state is broken for good, and accept() will say so
            return b""
        finally:
            self._slow = perf_counter() - began > SLOW_SECONDS


class LazyMask:
    """A constraint.Mask: made by the mask thread, or by its reader where that comes first."""

    __slots__ = ("_bits", "_lock", "_matcher", "awaited")

    def __init__(self, matcher: Matcher, bits: bytes | None = None) -> None:
        self.awaited = False  # somebody wants to know when it is there
        self._matcher = matcher
        self._bits = bits
        self._lock = threading.Lock()

    def read(self) -> bytes:
        """The bits. Waits for whoever is making them."""
        if self._bits is None:
            with self._lock:
                if self._bits is None:
                    self._bits = self._matcher.make_mask()
        return self._bits

    @property
    def done(self) -> bool:
        """True where read() does not wait."""
        return self._bits is not None

    def __reduce__(self) -> tuple[type[Mask], tuple[bytes]]:
        return KnownMask, (self.read(),)


class KnownMask(bytes):
    """A mask that has come from another process."""

    def read(self) -> bytes:
        """The bits."""
        return self


class MaskThread:
    """Makes masks in the order asked for, on a daemon thread that starts with the first."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        self._asked: SimpleQueue[LazyMask | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, mask: LazyMask) -> None:
        """Has the mask made soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aserve-masks", daemon=True)
            self._thread.start()
        self._asked.put(mask)

    def close(self) -> None:
        """Ends the thread once it has made what was asked for."""
        self._asked.put(None)

    def _run(self) -> None:
        while (mask := self._asked.get()) is not None:
            mask.read()
            if mask.awaited:
                with suppress(RuntimeError):  # the loop is closed
                    self._on_ready()


class _TokenizerView:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text, False)


def _view_of(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    import llguidance

    tokens = tokenizer.vocabulary()
    if tokens is None:
        raise InvalidRequestError("structured output is not possible: the model's tokens have no fixed bytes")
    if not tokenizer.eos_token_ids:
        raise InvalidRequestError("structured output is not possible: the model has no end token")
    wrapper = llguidance.TokenizerWrapper(_TokenizerView(tokenizer, tokens))
    return llguidance.LLTokenizer(wrapper, eos_token=list(tokenizer.eos_token_ids))


def _text_of(structured: StructuredOutput) -> str:
    """The value as one text. Raises InvalidRequestError where it is no JSON, or too large."""
    value: Any = structured.value
    text = value
    if not isinstance(value, str):
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(structured, f"not JSON: {error}") from None
    if len(text) > MAX_CHARS:
        raise _refusal(structured, f"it has {len(text)} characters, at most {MAX_CHARS} are allowed")
    return str(text)


def _grammar_of(kind: str, text: str) -> str:
    """llguidance's form of a grammar. Raises ValueError with the reason for a refusal."""
    from llguidance import LLMatcher

    grammar: str
    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(text)
    elif kind == "choice":
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in json.loads(text)))
    elif kind == "grammar":
        bare = _LITERALS.sub("", text)
        if "%json" in bare:
            raise ValueError("%json is not supported: send the schema alone")
        if bare.count("&") + bare.count("~") > MAX_INTERSECTIONS:
            raise ValueError(f"it has more than {MAX_INTERSECTIONS} intersections and complements")
        grammar = LLMatcher.grammar_from_lark(text)
    else:
        schema = {"type": "object"} if kind == "json_object" else json_schema.prepare(json.loads(text))
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
    return grammar


_NOUNS = {"regex": "regular expression", "choice": "list of choices", "grammar": "grammar"}


def _refusal(structured: StructuredOutput, reason: str) -> InvalidRequestError:
    noun = _NOUNS.get(structured.kind, "JSON schema")
    reason = " ".join(reason.split())[:500]
    return InvalidRequestError(f"{structured.name}: the {noun} cannot be used: {reason}", param=structured.name)
