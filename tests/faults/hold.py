"""A client process to be killed: python -m tests.faults.hold URL N opens N streams and reads them until it dies.

Says "ready" once every stream has its head, and one has a token.
"""

from __future__ import annotations

import asyncio
import sys

from tests.faults.wire import Wire

BODY = {"prompt": "abc", "max_tokens": 4000, "temperature": 0, "stream": True, "ignore_eos": True}


async def main(url: str, count: int) -> None:
    token = asyncio.Event()
    heads = [asyncio.Event() for _ in range(count)]

    async def read(head: asyncio.Event) -> None:
        wire = await Wire.open(url)
        await wire.send("POST", "/v1/completions", BODY)
        await wire.head()
        head.set()
        async for _ in wire.events():
            token.set()

    async with asyncio.TaskGroup() as tasks:
        for head in heads:
            tasks.create_task(read(head))
        for event in (*heads, token):
            await event.wait()
        print("ready", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
