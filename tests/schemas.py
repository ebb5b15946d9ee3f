"""Random JSON schemas of the kinds people send: what pydantic and zod write, and what is written by hand."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

PATTERNS = (
    r"^[A-Z]{2}-[0-9]{3,6}$",
    r"^(red|green|blue)$",
    r"^[a-z]+@[a-z]+\.com$",
    r"^\d{3}-\d{4}$",
    r"[0-9]x",
    r"^v\d+(\.\d+){2}$",
)
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration")
NAMES = ("id", "name", "tags", "kind", "price", "n\u00e4me", "first name", "a", "is_open", "items", "x-y", "$value")


class SchemaMaker:
    """One schema from one seed; its definitions are collected on the way."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def make(self) -> Schema:
        """A whole document: usually an object, at times a bare value."""
        schema = self._object(3) if self._random.random() < 0.8 else self._any(2)
        if self._definitions:
            schema["$defs"] = self._definitions
        if self._random.random() < 0.3:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return schema

    def _any(self, depth: int) -> Schema:
        kinds = [self._string, self._integer, self._number, self._enum, self._constant, self._flag]
        if depth:
            nested = [self._object, self._array, self._any_of, self._tagged, self._all_of, self._reference, self._map]
            if self._random.random() < 0.6:
                return self._random.choice(nested)(depth - 1)
        schema = self._random.choice(kinds)()
        if self._random.random() < 0.2:
            schema |= {"title": "A Title", "description": 'what it "is"', "examples": [1, {"type": "string"}]}
        return schema

    def _string(self) -> Schema:
        chance = self._random.random()
        if chance < 0.3:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        if chance < 0.6:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        if chance < 0.7:
            return {"type": "string"}
        low = self._random.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 8)}

    def _integer(self) -> Schema:
        schema: Schema = {"type": "integer"}
        low = self._random.randint(-200, 200)
        if self._random.random() < 0.7:
            schema[self._random.choice(("minimum", "exclusiveMinimum"))] = low
        if self._random.random() < 0.7:
            schema[self._random.choice(("maximum", "exclusiveMaximum"))] = low + self._random.randint(10, 1000)
        if self._random.random() < 0.2:
            schema["multipleOf"] = self._random.choice((2, 5, 10))
        return schema

    def _number(self) -> Schema:
        schema: Schema = {"type": "number"}
        low = self._random.choice((-1.5, 0, 0.25, 10, 99.9))
        if self._random.random() < 0.7:
            schema[self._random.choice(("minimum", "exclusiveMinimum"))] = low
        if self._random.random() < 0.7:
            schema[self._random.choice(("maximum", "exclusiveMaximum"))] = low + self._random.choice((0.5, 1, 1000))
        return schema

    def _enum(self) -> Schema:
        return {"enum": self._random.sample(["red", "green", 1, 2.5, None, True, 'a "b"', {"a": [1]}], 3)}

    def _constant(self) -> Schema:
        return {"const": self._random.choice(("v1", 7, None, ["x", 1], "\u00fc\n"))}

    def _flag(self) -> Schema:
        return {"type": self._random.choice(("boolean", "null"))}

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        if self._random.random() < 0.9:
            schema["required"] = names if self._random.random() < 0.6 else names[:1]
        if self._random.random() < 0.7:
            schema["additionalProperties"] = False
        return schema

    def _map(self, depth: int) -> Schema:
        if self._random.random() < 0.5:
            return {"type": "object", "additionalProperties": self._any(depth)}
        return {"type": "object", "patternProperties": {"^k[0-9]$": self._any(depth)}, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        if self._random.random() < 0.25:
            return {"type": "array", "prefixItems": [self._any(depth), self._any(depth)], "items": False, "minItems": 2}
        low = self._random.randint(0, 2)
        schema: Schema = {"type": "array", "items": self._any(depth), "minItems": low}
        if self._random.random() < 0.7:
            schema["maxItems"] = low + self._random.randint(0, 3)
        return schema

    def _any_of(self, depth: int) -> Schema:
        if self._random.random() < 0.3:
            return self._string() | {"type": ["string", "null"]}
        return {"anyOf": [self._any(depth), {"type": "null"}, self._any(depth)][: self._random.randint(2, 3)]}

    def _tagged(self, depth: int) -> Schema:
        """A union told apart by a tag, as pydantic writes it."""
        members = []
        for tag in ("cat", "dog"):
            member = self._object(depth)
            member["properties"]["type"] = {"const": tag, "type": "string"}
            member["required"] = ["type", *member.get("required", ())]
            members.append(member)
        return {"oneOf": members, "discriminator": {"propertyName": "type"}}

    def _all_of(self, depth: int) -> Schema:
        return {"allOf": [self._reference(depth)], "description": "one of ours"}

    def _reference(self, depth: int) -> Schema:
        name = f"Model{len(self._definitions)}"
        self._definitions[name] = {}  # its own members may not take the name
        if self._random.random() < 0.3:  # a tree
            child = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
            self._definitions[name] = {
                "type": "object",
                "properties": {"value": self._integer(), "next": child},
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        else:
            self._definitions[name] = self._object(depth)
        return {"$ref": f"#/$defs/{name}"}
