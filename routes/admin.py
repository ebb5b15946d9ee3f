"""What operators and tools ask: health, readiness, version, load, metrics, token ids, cancelling a request.

Handlers only read the engine's public numbers; none waits for a step, so all answer while the engine is busy.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from aserve import Engine, NotFoundError
from routes.endpoint import Options
from routes.http import json_response, read_body
from routes.metrics import exposition
from routes.records import Live
from routes.schemas import DetokenizeBody, Prompt, TokenizeBody, conversation, empty_prompt, parse


class Admin:
    """The handlers."""

    def __init__(self, engine: Engine, live: Live, options: Options) -> None:
        self._engine = engine
        self._live = live
        self._options = options

    async def health(self, request: Request) -> Response:
        """200 while the engine can serve; 503 while it loads, drains, or once it is dead."""
        self._engine.check()
        return json_response({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """The server's version."""
        try:
            return json_response({"version": version("aserve")})
        except PackageNotFoundError:
            return json_response({"version": "unknown"})

    async def load(self, request: Request) -> Response:
        """How many generation requests are in flight, under vLLM's name, and how the engine holds them."""
        stats = self._engine.stats()
        return json_response(
            {"server_load": len(self._live), "running": stats.num_running, "waiting": stats.num_waiting}
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        body, content_type = exposition(self._engine)
        return Response(body, headers={"content-type": content_type})

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text, or of a conversation under the chat template."""
        raw = await read_body(request.scope, request.receive, self._options.max_body_bytes)
        body = parse(raw, TokenizeBody)
        self._options.check_model(body.model)
        tokens = await self._tokens(body)
        return json_response(
            {"count": len(tokens), "max_model_len": self._engine.info.max_model_len, "tokens": tokens}
        )

    async def _tokens(self, body: TokenizeBody) -> list[int]:
        ...

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        raw = await read_body(request.scope, request.receive, self._options.max_body_bytes)
        body = parse(raw, DetokenizeBody)
        self._options.check_model(body.model)
        ...

    async def cancel(self, request: Request) -> Response:
        """Cancels a request in flight by the id of its response. Its client gets an error; 404 if it is unknown."""
        name = request.path_params["id"]
        if not self._live.cancel(name):
            raise NotFoundError(f"no request {name!r} is in flight", param="id", code="request_not_found")
        return json_response({"id": name, "object": "request", "cancelled": True})
