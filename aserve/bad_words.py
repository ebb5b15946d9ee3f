"""Keeps an output free of words: a Constraint that masks the token with which one of them would be complete.

intake.py makes one per choice. A word is the token sequences that the tokenizer gives for it, alone and after a space;
a model may still spell it with other tokens. Most draws share one mask, made once per request.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from aserve.constraint import Constraint
from aserve.tokenizer import Tokenizer

Banned = Items[tuple[int, ...]]


def free_of(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int, count: int) -> list[Constraint | None]:
    """One constraint per choice. Encodes each word twice, and blocks as long."""
    first = BadWords(banned_sequences(words, tokenizer), vocab_size)
    return [first, *(first.fork() for _ in range(count - 1))]


def banned_sequences(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token sequences of the words, each with and without a space before it."""
    forms = [form for word in words for form in (word.lstrip(), f" {word.lstrip()}")]
    sequences = [tuple(tokenizer.encode(form, False)) for form in forms]
    return list(dict.fromkeys(sequence for sequence in sequences if sequence))


class TokenMask:
    """constraint.Mask over bytes that are there already."""

    __slots__ = ("_bits",)

    def __init__(self, bits: bytes) -> None:
        self._bits = bits

    def read(self) -> bytes:
        """The bits."""
        return self._bits


class BadWords:
    """One choice's constraint. Its masks allow every token of `vocab_size` that completes no banned sequence."""

    ready = True

    def __init__(self, banned: Banned, vocab_size: int) -> None:
        everything = bytearray(b"\xff" * -(-vocab_size // 8))
        for sequence in banned:
            if len(sequence) == 1:
                _clear(everything, sequence[0])
        self._common = bytes(everything)
        self._longer = [sequence for sequence in banned if len(sequence) > 1]
        self._reach = max((len(sequence) - 1 for sequence in self._longer), default=0)
        self._tail: tuple[int, ...] = ()  # the last tokens that a banned sequence may begin with
        self._mask = TokenMask(self._common)

    def fork(self) -> BadWords:
        """Another choice's, at the same place."""
        other = BadWords.__new__(BadWords)
        other._common, other._longer, other._reach = self._common, self._longer, self._reach
        other._tail, other._mask = self._tail, self._mask
        return other

    def mask(self) -> TokenMask:
        """The mask of the next draw."""
        return self._mask

    def accept(self, token_id: int) -> bool:
        """Takes a token; an output is never complete by this."""
        if not self._reach:
            return False
        self._tail = (*self._tail, token_id)[-self._reach :]
        last = [sequence[-1] for sequence in self._longer if self._ends_with(sequence[:-1])]
        if not last:
            self._mask = TokenMask(self._common)
            return False
        bits = bytearray(self._common)
        for banned in last:
            _clear(bits, banned)
        self._mask = TokenMask(bytes(bits))
        return False

    def _ends_with(self, start: tuple[int, ...]) -> bool:
        return self._tail[-len(start) :] == start


def _clear(bits: bytearray, token_id: int) -> None:
    bits[token_id // 8] &= ~(1 << token_id % 8) & 0xFF
