"""The many names of one thing: which field of a body asks for structured output, and for what.

schemas.py calls it for the generation endpoints. OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_*` fields, and a `tool_choice` that leaves no choice all become one StructuredOutput; two that both ask for
something are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aserve import InvalidRequestError, StructuredOutput
from routes.turn import ToolUse

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


def structured_output(
    body: Body, calls: StructuredOutput | None = None, *, format_field: str = "response_format"
) -> StructuredOutput | None:
    """What the body asks for beside its tools' `calls`, None where that is plain text. Raises InvalidRequestError,
    naming the field; `format_field` is what the client calls response_format."""
    found = [] if calls is None else [calls]
    found += [
        _make(kind, getattr(body, name), name) for name, kind in _GUIDED.items() if getattr(body, name) is not None
    ]
    if body.structured_outputs is not None:
        found.append(_from_structured_outputs(body.structured_outputs))
    if body.response_format is not None:
        formatted = _from_response_format(body.response_format, format_field)
        found += [formatted] if formatted is not None else []
    if len(found) > 1:
        raise InvalidRequestError(f"{found[0].name} and {found[1].name} exclude each other", param=found[1].name)
    return found[0] if found else None


def tool_calls(tools: Sequence[Mapping[str, Any]], use: ToolUse) -> StructuredOutput | None:
    """What makes a model call where tool_choice says it must, None where it need not: the arguments of the one tool
    that is named, or a list of calls. turn.py reads both back."""
    if use.choice not in ("required", "named"):
        return None
    parameters = {}
    for tool in tools:
        function = tool["function"]
        if function["name"] in use.names:
            parameters[function["name"]] = function.get("parameters") or {"type": "object"}
    if use.choice == "named":
        return _make("json_schema", parameters[use.names[0]], "tool_choice")
    try:
        definitions = {f"tool{i}": _moved(schema, f"#/$defs/tool{i}") for i, schema in enumerate(parameters.values())}
    except RecursionError:
        raise InvalidRequestError("the tools' parameters are nested too deeply", param="tools") from None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, name in enumerate(parameters)
    ]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": definitions}
    if not use.parallel:
        schema["maxItems"] = 1
    return _make("json_schema", schema, "tool_choice")


def _moved(schema: Any, place: str) -> Any:
    """The schema with its local references as they are once it stands at `place` of another."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for name, value in schema.items()
    }


def _from_response_format(value: Any, field: str) -> StructuredOutput | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _make("json_object", None, field)
    if kind != "json_schema":
        raise InvalidRequestError(f"{field}.type must be text, json_object or json_schema", param=field)
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise InvalidRequestError(f"{field} of type json_schema must have a schema", param=field)
    return _make("json_schema", schema, field)


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
