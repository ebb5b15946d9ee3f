"""GET /v1/models and /v1/models/{id}: the names this server answers to, all of them one model."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from aserve import Engine
from routes.endpoint import Options
from routes.http import json_response


class Models:
    """The two handlers."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self._engine = engine
        self._options = options
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        """GET /v1/models."""
        self._engine.check()
        data = [self._card(name) for name in self._options.names(self._engine)]
        return json_response({"object": "list", "data": data})

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/models/{id}; an id may hold slashes."""
        self._engine.check()
        return json_response(self._card(self._options.check_model(self._engine, request.path_params["id"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "aserve",
            "root": self._engine.name,
            "max_model_len": self._engine.info.max_model_len,
        }
