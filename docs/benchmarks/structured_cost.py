"""What a JSON schema costs: time to first token with and without, and what one structured request costs the others.

usage: python docs/benchmarks/structured_cost.py [--model PATH] [--rounds N] [--streams N] [--tokens N] [--threads N]

One engine. First, requests one at a time, plain and structured in turn, so that whatever else the machine does falls
on both: cold (a grammar that the engine has not seen) and warm, for a schema as people write them and for a large one.
Then `streams` plain streams together with one more, which is plain or structured in turn: the time between tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from statistics import median
from typing import Any

from aserve import Engine, SamplingParams, StructuredOutput

PROMPT = "Write down a person as a JSON document. "
_fresh = itertools.count()


def small() -> dict[str, Any]:
    """An object of eight fields, one of them nested."""
    address = {
        "type": "object",
        "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
        "required": ["street", "zip"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "format": "email"},
            "born": {"type": "string", "format": "date"},
            "role": {"enum": ["admin", "user", "guest"]},
            "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 5},
            "address": {"$ref": "#/$defs/address"},
            "boss": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["name", "age", "role", "address"],
        "additionalProperties": False,
        "$defs": {"address": address},
    }


def large() -> dict[str, Any]:
    """Forty definitions like it that refer to each other: some 30 kB."""
    definitions = {}
    for i in range(40):
        part = small()
        part.pop("$defs")
        part["properties"]["next"] = {"anyOf": [{"$ref": f"#/$defs/part{(i + 1) % 40}"}, {"type": "null"}]}
        definitions[f"part{i}"] = part
    address = small()["$defs"]["address"]
    return {"$ref": "#/$defs/part0", "$defs": {"address": address, **definitions}}


def unseen(schema: dict[str, Any]) -> dict[str, Any]:
    """The same with a field that no other has, so that nothing kept from before serves it."""
    definitions = {**schema.get("$defs", {}), f"unused{next(_fresh)}": {"type": "string"}}
    return {**schema, "$defs": definitions}


def params(schema: dict[str, Any] | None, tokens: int) -> SamplingParams:
    structured = None if schema is None else StructuredOutput("json_schema", schema)
    # Nothing ends it early, so that both kinds of request are as long.
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=schema is None, structured=structured)


async def first_token(engine: Engine, schema: dict[str, Any] | None) -> float:
    """Milliseconds from the call to the first token."""
    began = time.perf_counter()
    async with engine.generate(f"{PROMPT}{next(_fresh)}", params(schema, 2)) as stream:
        async for _ in stream:
            break
    return (time.perf_counter() - began) * 1e3


async def gaps(engine: Engine, schema: dict[str, Any] | None, streams: int, tokens: int) -> list[float]:
    """Milliseconds between the tokens of `streams` plain streams, while one more runs that has `schema`."""
    found: list[float] = []

    async def run(position: int) -> None:
        mine = schema if position == streams else None
        last = None
        async with engine.generate(f"{position} {PROMPT}", params(mine, tokens)) as stream:
            async for delta in stream:
                now = time.perf_counter()
                if last is not None and position < streams:
                    found.append((now - last) * 1e3 / max(1, len(delta.token_ids)))
                last = now

    await asyncio.gather(*(run(position) for position in range(streams + 1)))
    return found


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def measure(args: argparse.Namespace) -> None:
    async with Engine(model=args.model, num_threads=args.threads) as engine:
        await first_token(engine, None)
        await first_token(engine, small())  # the tokenizer's view, once in an engine's life
        for name, make in (("small", small), ("large", large)):
            size = len(json.dumps(make()))
            await first_token(engine, make())
            times: dict[str, list[float]] = {"plain": [], "cold": [], "warm": []}
            for _ in range(args.rounds):
                times["plain"].append(await first_token(engine, None))
                times["cold"].append(await first_token(engine, unseen(make())))
                times["warm"].append(await first_token(engine, make()))
            plain, cold, warm = (median(times[kind]) for kind in ("plain", "cold", "warm"))
            print(
                f"time to first token, {name} schema ({size} bytes), medians of {args.rounds}: "
                f"plain {plain:.1f} ms, warm {warm - plain:+.1f} ms, cold {cold - plain:+.1f} ms",
                flush=True,
            )
        found: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * args.rounds // 4):
            structured = bool(turn % 2)
            found[structured] += await gaps(engine, small() if structured else None, args.streams, args.tokens)
        for share in (0.5, 0.99):
            plain, beside = (quantile(found[kind], share) for kind in (False, True))
            print(
                f"between tokens of {args.streams} plain streams, quantile {share}: {plain:.1f} ms beside a plain one, "
                f"{beside:.1f} ms beside a structured one ({beside / plain - 1:+.1%})"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, help="default: the cores there are")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
