"""Checks a JSON schema before it is compiled, and rewrites what has an equal form that llguidance knows.

Called by grammar.py. It bounds what a compiler would take for ever over, and refuses what that would read otherwise
than the standard does. Pure: a function of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64
MARGIN = 1e-9  # between an exclusive bound and the nearest number that is written
MAX_OPTIONAL = 256  # properties of one object that may be left out: each adds to the work of every token
MAX_PROPERTIES = 2048  # in all; compiling grows with their square
MAX_STRING_RULES = 8  # patterns and formats that may meet on one string: intersecting them doubles with each
_STRING_RULES = ("pattern", "format")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$defs", "definitions", "$schema", "$id"})

# RFC 3339 without leap seconds and the year 0, which hardly any reader takes; llguidance knows no leap years.
_DATE = (
    r"(?:(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

Schema = dict[str, Any]


def prepare(schema: Any) -> Schema:
    """The schema to compile. Raises ValueError with the reason for a refusal."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError("it must be an object or a boolean")
    _check_depth(schema)
    num_properties = 0
    for node in _walk(schema):
        _check(node, schema)
        properties, required = node.get("properties"), node.get("required")
        if isinstance(properties, dict):
            num_properties += len(properties)
            num_optional = len(properties) - (len(required) if isinstance(required, list) else 0)
            if num_optional > MAX_OPTIONAL or num_properties > MAX_PROPERTIES:
                raise ValueError(
                    f"it has too many properties: at most {MAX_PROPERTIES} are allowed, {MAX_OPTIONAL} of one object "
                    "optional"
                )
    prepared: Schema = _rewrite(schema, schema)
    return prepared


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(part, depth + 1)


def _walk(schema: Any) -> Iterator[Schema]:
    """Every subschema, wherever it is; constants are no schemas."""
    if not isinstance(schema, dict):
        return
    yield schema
    for part in _parts(schema):
        yield from _walk(part)


def _parts(schema: Schema) -> Iterator[Any]:
    for name, value in schema.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            yield from value.values()
        elif name not in ("enum", "const", "default", "examples"):
            yield from value if isinstance(value, list) else (value,)


def _check(node: Schema, root: Schema) -> None:
    if "x-guidance" in node:
        raise ValueError("x-guidance is not supported")
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(node.get(name), bool):
            raise ValueError(f"{name} must be a number")
    if _combines(node):
        count = _num_string_rules(node, root, set())
        if count > MAX_STRING_RULES:
            raise ValueError(f"it combines {count} patterns and formats in one place, at most {MAX_STRING_RULES}")


def _combines(node: Schema) -> bool:
    """True where several schemas apply to one value."""
    has_own = any(
        name not in _ANNOTATIONS and name not in ("allOf", "anyOf", "oneOf", "$ref", "type", "additionalProperties")
        for name in node
    )
    members = node.get("allOf")
    num = len(members) if isinstance(members, list) else 0
    return num + sum(name in node for name in ("anyOf", "oneOf", "$ref")) + has_own > 1


def _num_string_rules(node: Any, root: Schema, seen: set[str]) -> int:
    """Patterns and formats under the node, references followed once."""
    if not isinstance(node, dict):
        return 0
    count = sum(name in node for name in _STRING_RULES)
    reference = node.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        count += _num_string_rules(resolve(reference, root), root, seen)
    for name, value in node.items():
        if name not in ("$defs", "definitions"):
            count += sum(_num_string_rules(part, root, seen) for part in _parts({name: value}))
    return count


def resolve(reference: str, root: Schema) -> Any:
    """What a local reference points at; None where that is nothing, or elsewhere."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or step not in target:
            return None
        target = target[step]
    return target


def _rewrite(schema: Any, root: Schema) -> Any:
    """oneOf becomes anyOf where a tag keeps its members apart; rules that ask for nothing are dropped."""
    if isinstance(schema, list):
        return [_rewrite(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new: Schema = {}
    for name, value in schema.items():
        if name in _SCHEMA_MAPS and isinstance(value, dict):
            new[name] = {key: _rewrite(part, root) for key, part in value.items()}
        elif name in ("enum", "const", "default", "examples"):
            new[name] = value
        elif not (name == "uniqueItems" and value is False):
            new[name] = _rewrite(value, root)
    if new.get("type") != "integer":
        _close_bounds(new)
    if new.get("format") in _PATTERNS:
        _spell_out(new, _PATTERNS[new.pop("format")])
    members = new.get("oneOf")
    if isinstance(members, list) and "anyOf" not in new and _are_tagged(members, root):
        new["anyOf"] = new.pop("oneOf")
    return new


def _close_bounds(schema: Schema) -> None:
    """Exclusive bounds of real numbers become inclusive ones a little further in: the compiler lets the bound itself
    through where it is a whole number (llguidance 1.9)."""
    for exclusive, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound = schema.get(exclusive)
        if isinstance(bound, (int, float)):
            inside = bound + sign * max(MARGIN, abs(bound) * 1e-12)
            other = schema.get(inclusive)
            del schema[exclusive]
            schema[inclusive] = (max if sign > 0 else min)(inside, other) if isinstance(other, (int, float)) else inside


def _spell_out(schema: Schema, pattern: str) -> None:
    if "pattern" in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
    else:
        schema["pattern"] = pattern


def _are_tagged(members: list[Any], root: Schema) -> bool:
    """True where all members are objects and one required property has no value in common between any two."""
    tags = [_tags(member, root) for member in members]
    shared = set.intersection(*(set(each) for each in tags)) if tags else set()
    for name in shared:
        values = [value for each in tags for value in each[name]]
        if len(values) == len(set(values)):
            return True
    return False


def _tags(member: Any, root: Schema) -> Mapping[str, list[str]]:
    """Required properties of an object schema that take strings of a list."""
    if isinstance(member, dict) and isinstance(member.get("$ref"), str):
        member = resolve(member["$ref"], root)
    if not isinstance(member, dict) or member.get("type") != "object":
        return {}
    required, properties = member.get("required"), member.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return {}
    tags = {}
    for name in required:
        rule = properties.get(name) if isinstance(name, str) else None
        if isinstance(rule, dict):
            values = [rule["const"]] if "const" in rule else rule.get("enum")
            if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
                tags[name] = values
    return tags
