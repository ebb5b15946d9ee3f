#!/usr/bin/env python3
"""Streams three prompts at once in one program, no server: `async for` over typed deltas, and a deadline by asyncio.

python examples/client.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from aserve import Engine, SamplingParams

PROMPTS = ("The lighthouse keeper", "In the year 1850", "To bake bread, you")


async def tell(engine: Engine, prompt: str) -> str:
    """One stream to its end. Leaving `async with`, however it is left, cancels what has not been generated."""
    text = prompt
    async with engine.generate(prompt, SamplingParams(max_tokens=32, temperature=0)) as stream:
        async for delta in stream:
            text += delta.text
    return text


async def main(model: str | None) -> None:
    """The three prompts share every step of the model; the fourth is given up half way."""
    async with Engine(model=model) as engine:
        for text in await asyncio.gather(*(tell(engine, prompt) for prompt in PROMPTS)):
            print(text, end="\n\n")
        try:
            async with asyncio.timeout(0.5):
                await engine.generate_text("Once upon a time", SamplingParams(max_tokens=1000, ignore_eos=True))
        except TimeoutError:
            print("The long story was cancelled after half a second; its memory is free again.")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
