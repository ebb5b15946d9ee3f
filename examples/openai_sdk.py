#!/usr/bin/env python3
"""The official OpenAI client against a running aserve: only the base URL changes.

pip install openai
python examples/openai_sdk.py [URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str) -> None:
    """One streamed chat turn, one completion that is not streamed."""
    client = OpenAI(base_url=url + "/v1", api_key="not needed on loopback")
    model = client.models.list().data[0].id
    turn = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three rivers in Europe."}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    for chunk in turn:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    completion = client.completions.create(model=model, prompt="Paris is the capital of", max_tokens=8, temperature=0)
    print(f"\n\nParis is the capital of{completion.choices[0].text}")
    print(completion.usage)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
