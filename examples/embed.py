#!/usr/bin/env python3
"""The engine inside your own Starlette program: the OpenAI routes under /llm, your own streaming route beside them.

    python examples/embed.py
    curl -N http://127.0.0.1:8080/story/the-sea
    curl http://127.0.0.1:8080/llm/v1/completions -H 'content-type: application/json' \
        -d '{"prompt": "The sea", "max_tokens": 16}'
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route

from aserve import Engine, SamplingParams
from routes import create_app

engine = Engine()


async def story(request: Request) -> StreamingResponse:
    """A route of your own: plain text, streamed as the model writes it; a reader who leaves cancels it."""
    prompt = f"A short story about {request.path_params['topic'].replace('-', ' ')}.\n\n"
    stream = await engine.submit(prompt, SamplingParams(max_tokens=64))  # a refusal raises here, before any byte

    async def text() -> AsyncIterator[str]:
        async with stream:
            async for delta in stream:
                yield delta.text

    return StreamingResponse(text(), media_type="text/plain; charset=utf-8")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Your program owns the engine: it starts and stops with it, on your loop, without signal handlers."""
    async with engine:
        yield


app = Starlette(routes=[Route("/story/{topic}", story), Mount("/llm", create_app(engine))], lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8080)
