"""A request and the sequences it owns: their words, and the one table of phase changes.

Stdlib only. Built by intake.py from a user's call, driven by scheduler.py, never touched by the model thread.
A `Sequence` is one choice of a `Request` (n choices share the prompt's blocks).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from aserve.constraint import Constraint, StructuredOutput
from aserve.errors import AserveError, InvalidRequestError

if TYPE_CHECKING:
    from aserve.beams import BeamSearch

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
Change = Literal["preempted", "resumed"]  # memory ran short, and is there again
EarlyStopping = bool | Literal["never"]
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256


class Phase(enum.Enum):
    """Where a sequence is. See TRANSITIONS."""

    WAITING = "waiting"  # has no slot; tokens are known, KV is not, unless it was paused
    RUNNING = "running"  # has a slot and blocks; may be planned into a step
    SWAPPED = "swapped"  # its blocks are in the host pool
    PAUSED = "paused"  # its reader is behind; has no slot, and blocks, in either pool, until memory is short
    FINISHED = "finished"  # owns nothing; terminal


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.SWAPPED, Phase.WAITING, Phase.PAUSED, Phase.FINISHED}),
    Phase.SWAPPED: frozenset({Phase.RUNNING, Phase.WAITING, Phase.PAUSED, Phase.FINISHED}),
    Phase.PAUSED: frozenset({Phase.WAITING, Phase.SWAPPED, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class PhaseError(RuntimeError):
    """A phase change that TRANSITIONS does not allow: a bug in aserve, never a user's mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens and when to stop; names and meanings are the OpenAI API's and vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 is off. `seed` None draws 64 fresh random bits per request.
    `max_tokens` None is as many as context and KV pool allow. `logprobs` k returns each chosen token's logprob
    and the k best (0: the chosen one alone), from the raw logits.

    `best_of` draws so many choices and returns the `n` of the highest mean logprob. With `use_beam_search` it is the
    number of beams, of which the `n` best are returned: by the sum of their logprobs over length ** `length_penalty`,
    ended as `early_stopping` says (see beams.py). Beams take neither temperature nor penalties, bias, masks or forms.

    Raises InvalidRequestError, naming the field, for a value outside its range (NaN included).
    """

    n: int = 1
    best_of: int | None = None  # n where it is None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()  # token sequences that may not come, as the tokenizer writes these texts
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None  # the form the output must have

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        _check_range("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            _check_range("best_of", self.best_of, self.n, MAX_CHOICES)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})", param="min_tokens"
            )
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("top_k", self.top_k, -1, 2**63 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 0, MAX_TOP_LOGPROBS)
        _check_stop(self.stop)
        for token_id, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            if set(map(type, getattr(self, name) or ())) - {int}:  # bool, too, is no token id
                raise InvalidRequestError(f"{name} must name tokens by their ids, integers", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must name at least one token", param="allowed_token_ids")
        if self.structured is not None:
            _check_structured(self)
        if self.bad_words:
            _check_bad_words(self)
        _check_beams(self)

    @property
    def num_sequences(self) -> int:
        """Choices that are computed; `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        """True where the draw takes the largest logit."""
        return self.temperature == 0.0

    @property
    def needs_token_counts(self) -> bool:
        """True where a draw depends on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_range(
    name: str, value: float, low: float, high: float, *, open_low: bool = False, param: str | None = None
) -> None:
    """Raises InvalidRequestError for a value that is out of bounds, or no integer where `low` is one."""
    whole = isinstance(low, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "an integer" if whole else "a number"
        raise InvalidRequestError(f"{name} must be {kind}, got {type(value).__name__}", param=param or name)
    inside = (low < value if open_low else low <= value) and value <= high  # NaN compares false
    if not inside or (isinstance(value, float) and not math.isfinite(value)):
        bound = "more than" if open_low else "at least"
        raise InvalidRequestError(f"{name} must be {bound} {low} and at most {high}, got {value}", param=param or name)


def _check_stop(stop: Items[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError("stop must be a non-empty string or a list of them", param="stop")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"a stop string has {len(text)} characters, at most {MAX_STOP_CHARS}", param="stop"
            )


def _check_structured(params: SamplingParams) -> None:
    """Refuses what could leave a draw with no token at all."""
    if not isinstance(params.structured, StructuredOutput):
        raise InvalidRequestError("structured must be a StructuredOutput", param="structured")
    for name, given in (("min_tokens", params.min_tokens), ("allowed_token_ids", params.allowed_token_ids)):
        if given:
            raise InvalidRequestError(f"{name} cannot be combined with {params.structured.name}", param=name)


def _check_bad_words(params: SamplingParams) -> None:
    """Refuses what is no list of words, and what could leave a draw with no token at all."""
    words = params.bad_words
    if len(words) > MAX_BAD_WORDS or not all(isinstance(word, str) and word.strip() for word in words):
        raise InvalidRequestError(f"bad_words must be at most {MAX_BAD_WORDS} texts, none empty", param="bad_words")
    longest = max(map(len, words))
    if longest > MAX_BAD_WORD_CHARS:
        raise InvalidRequestError(
            f"a bad word has {longest} characters, at most {MAX_BAD_WORD_CHARS}", param="bad_words"
        )
    for name in ("allowed_token_ids", "structured"):
        if getattr(params, name) is not None:
            raise InvalidRequestError(f"bad_words cannot be combined with {name}", param="bad_words")


def _check_beams(params: SamplingParams) -> None:
    """Refuses what beam search does not take, and without it what is for beam search alone."""
    if not params.use_beam_search:
        if params.length_penalty != 1.0 or params.early_stopping:
            name = "early_stopping" if params.early_stopping else "length_penalty"
            raise InvalidRequestError(f"{name} is for use_beam_search only", param=name)
        return
    _check_range("length_penalty", params.length_penalty, -10.0, 10.0)
    if params.early_stopping not in (True, False, "never"):
        raise InvalidRequestError('early_stopping must be true, false or "never"', param="early_stopping")
    if params.max_tokens == 0:
        raise InvalidRequestError("use_beam_search needs max_tokens above 0", param="max_tokens")
    plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "allowed_token_ids": None}
    for name in (*plain, "logit_bias", "bad_words", "structured"):
        value = getattr(params, name)
        if value if name not in plain else value != plain[name]:
            name = params.structured.name if params.structured is not None and name == "structured" else name
            raise InvalidRequestError(f"{name} cannot be combined with use_beam_search", param=name)


class Usage(NamedTuple):
    """Token counts of a request. `completion_tokens` sums its choices; dropped tokens never count."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache


class Timeline(NamedTuple):
    """When things happened to a request, in seconds of its event loop's clock; None where they have not yet."""

    arrival: float
    first_scheduled: float | None  # its first step
    first_token: float | None
    ended: float | None
    changes: tuple[tuple[Change, float], ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request: its output, and how far its KV is.

    Invariant: num_computed <= len(prompt) + len(output) + num_inflight. Positions below num_computed have KV that
    is written or planned to be; the token at position len(prompt) + len(output) + i is drawn by a step in flight.
    """

    request: Request
    index: int
    output: list[int] = field(default_factory=list)  # committed tokens only
    phase: Phase = Phase.WAITING
    slot: int | None = None
    num_computed: int = 0
    num_inflight: int = 0  # draws planned and not yet committed
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the end or stop token that ended it
    constraint: Constraint | None = None  # has accepted exactly `output`

    def move(self, phase: Phase) -> None:
        """Changes phase. Raises PhaseError where TRANSITIONS has no such edge."""
        if phase not in TRANSITIONS[self.phase]:
            raise PhaseError(f"sequence {self.request.id}.{self.index}: {self.phase.value} -> {phase.value}")
        self.phase = phase

    @property
    def num_tokens(self) -> int:
        """Prompt and committed output tokens."""
        return len(self.request.prompt) + len(self.output)


@dataclass(eq=False, slots=True)
class Request:
    """What a client asked for, admitted. `id` is unique in the engine; `key` (128 random bits, hex) is its name on
    the wire; a client's own id is `label`, never an identity. Times are seconds of the engine's clock."""

    id: int
    key: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int  # params.seed, or 64 fresh random bits
    max_tokens: int  # resolved by admission: how many output tokens each choice may have
    arrival: float
    end_token_ids: tuple[int, ...] = ()  # the model's; empty under ignore_eos
    deadline: float | None = None  # whole request
    first_token_deadline: float | None = None
    priority: int = 0  # lower runs first, as in vLLM
    tenant: str = ""
    label: str | None = None
    cache_salt: str | None = None  # extra prefix-cache key
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)  # plan.TokenLogprobs from the 2nd token, where asked
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    cancel_reason: FinishReason | None = None  # set by cancel(); the scheduler reaps at the next boundary
    error: AserveError | None = None  # with finish reason "error"
    first_scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None
    changes: list[tuple[Change, float]] = field(default_factory=list)
    num_preemptions: int = 0
    detached: bool = False  # its reader is away for a while: the first to be preempted
    beams: BeamSearch | None = None  # the state of its search; its sequences are the live beams, then the best

    @property
    def num_top(self) -> int | None:
        """How many best tokens' logprobs come with each draw; None where not even its own does."""
        if self.beams is not None:
            return self.beams.num_asked
        ranked = self.params.num_sequences > self.params.n
        return 0 if ranked and self.params.logprobs is None else self.params.logprobs

    @property
    def finished(self) -> bool:
        """True once every choice has ended."""
        return all(sequence.phase is Phase.FINISHED for sequence in self.sequences)


@dataclass(slots=True)  # not frozen: one is made per token, and freezing triples that cost
class Delta:
    """What a stream yields: new text of one choice. The last delta of a choice has a finish_reason.

    `stop_reason` is the stop string or stop token id that ended it, None for an end-of-sequence token.
    `offset` counts the choice's tokens up to and including this delta.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    offset: int = 0
    logprobs: tuple[object, ...] | None = None  # plan.TokenLogprobs per token id, where asked


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice: the whole text, its tokens, and why it ended."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[object, ...] | None = None
