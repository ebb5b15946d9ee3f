"""What an output must look like, and what holds a draw to it: the words between grammar.py, the scheduler and a runner.

Stdlib only. A user builds a `StructuredOutput`; grammar.py makes one `Constraint` per choice from it, which the
scheduler drives; a plan carries a `Mask` per constrained draw to the model thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from aserve.errors import InvalidRequestError

StructureKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
MAX_TEXTS = 1024


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form an output must have.

    `value` is a JSON schema (a mapping, a bool, or its text) for "json_schema", nothing for "json_object", a regular
    expression of the whole output for "regex", the texts to choose from for "choice", a Lark grammar for "grammar".
    `name` is what the caller calls it, for errors. Raises InvalidRequestError for a value of another type.
    """

    kind: StructureKind
    value: Mapping[str, Any] | str | bool | tuple[str, ...] | None = None
    name: str = field(default="structured", compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.value, list):
            object.__setattr__(self, "value", tuple(self.value))
        if self.kind not in get_args(StructureKind):
            raise InvalidRequestError(f"{self.name} has an unknown kind {self.kind!r}", param=self.name)
        wanted = self._wanted()
        if wanted is not None:
            raise InvalidRequestError(f"{self.name} must be {wanted}", param=self.name)

    def _wanted(self) -> str | None:
        """What the value should be, where it is something else."""
        value = self.value
        if self.kind == "json_schema":
            return None if isinstance(value, (Mapping, str, bool)) else "a JSON schema"
        if self.kind == "json_object":
            return None if value is None else "absent for json_object"
        if self.kind == "choice":
            texts = isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)
            fits = texts and 1 <= len(value) <= MAX_TEXTS  # type: ignore[arg-type]
            return None if fits else f"a list of 1 to {MAX_TEXTS} texts that are not empty"
        return None if isinstance(value, str) and value else "a text that is not empty"


class Mask(Protocol):
    """The tokens a draw may give. It may still be in the making when a plan carries it: a runner reads it after the
    model's forward pass is under way, so that both go on at once. Pickling it waits for it."""

    def read(self) -> bytes:
        """Bit i % 8 of byte i // 8 says whether token i may be drawn; tokens past the end may not. Never raises."""
        ...


class Constraint(Protocol):
    """Follows one choice's committed tokens. Owned by its Sequence; a preempted one keeps it as it is."""

    @property
    def ready(self) -> bool:
        """False where the next mask is known to take long: its row is left out of plans until it is there."""
        ...

    def mask(self) -> Mask:
        """The mask of the next draw; the same one until a token is accepted."""
        ...

    def accept(self, token_id: int) -> bool:
        """Takes a drawn token. True where the output is complete and nothing may follow.

        Raises RequestFailedError for a token that the mask did not allow, or where the grammar became too costly.
        """
        ...
