"""The many names of one thing: which field of a body asks for structured output, and for what.

schemas.py calls it for both generation endpoints. OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_*` fields all become one StructuredOutput; two that both ask for something are refused.
"""

from __future__ import annotations

from typing import Any, Protocol

from aserve import InvalidRequestError, StructuredOutput

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


class Body(Protocol):
    """The fields this reads; null is absent."""

    response_format: Any
    structured_outputs: Any
    guided_json: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any


def structured_output(body: Body) -> StructuredOutput | None:
    """What the body asks for, None where that is plain text. Raises InvalidRequestError, naming the field."""
    found = [
        _make(kind, getattr(body, name), name) for name, kind in _GUIDED.items() if getattr(body, name) is not None
    ]
    if body.structured_outputs is not None:
        found.append(_from_structured_outputs(body.structured_outputs))
    if body.response_format is not None:
        formatted = _from_response_format(body.response_format)
        found += [formatted] if formatted is not None else []
    if len(found) > 1:
        raise InvalidRequestError(f"{found[0].name} and {found[1].name} exclude each other", param=found[1].name)
    return found[0] if found else None


def _from_response_format(value: Any) -> StructuredOutput | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _make("json_object", None, "response_format")
    if kind != "json_schema":
        raise InvalidRequestError(
            "response_format.type must be text, json_object or json_schema", param="response_format"
        )
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise InvalidRequestError("response_format.json_schema must have a schema", param="response_format")
    return _make("json_schema", schema, "response_format")


def _from_structured_outputs(value: Any) -> StructuredOutput:
    given = {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else {}
    if given.get("json_object") is True and len(given) == 1:
        return _make("json_object", None, "structured_outputs")
    if len(given) != 1 or not given.keys() <= _STRUCTURED.keys():
        raise InvalidRequestError(
            f"structured_outputs must have one of {', '.join(_STRUCTURED)} and json_object", param="structured_outputs"
        )
    ((name, part),) = given.items()
    return _make(_STRUCTURED[name], part, "structured_outputs")


def _make(kind: Any, value: Any, name: str) -> StructuredOutput:
    return StructuredOutput(kind, value, name=name)
