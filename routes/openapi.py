"""GET /openapi.json: the routes and the bodies they take, from the same structs that parse them. Built once."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aserve import __version__
from routes.http import json_response
from routes.response_body import ResponseBody
from routes.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/completions": (CompletionBody, "Continue text or token ids"),
    "/v1/chat/completions": (ChatBody, "The assistant's next turn"),
    "/v1/responses": (ResponseBody, "A response, kept for later turns"),
    "/tokenize": (TokenizeBody, "Text or messages to token ids"),
    "/detokenize": (DetokenizeBody, "Token ids to text"),
}
_STREAMED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/streams/{id}"})
_OTHERS = {
    ("/v1/requests/{id}", "delete"): "Cancel a request in flight",
    ("/v1/responses/{id}", "delete"): "Forget a stored response",
    ("/v1/responses/{id}/cancel", "post"): "Cancel a response that runs",
}
_READS = {
    "/v1/responses/{id}": "A stored response",
    "/v1/models": "The served names",
    "/v1/models/{id}": "One served name",
    "/health": "Whether the engine can serve",
    "/ready": "Whether the engine can serve, and has generated a token",
    "/v1/streams/{id}": "A resumable stream, after Last-Event-ID",
    "/version": "The server's version",
    "/load": "Requests in flight",
    "/metrics": "Prometheus text",
    "/v1/stats/stream": "The engine's numbers, each second",
    "/dashboard": "A page that draws them",
    "/docs": "This document as a page",
}
_KINDS = {
    "/metrics": "text/plain",
    "/dashboard": "text/html",
    "/docs": "text/html",
    "/v1/stats/stream": "text/event-stream",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    references, components = msgspec.json.schema_components(
        [kind for kind, _ in _BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for (path, (_, summary)), schema in zip(_BODIES.items(), references, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _responses(path)}}
    for path, summary in _READS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(path)}}
    for (path, method), summary in _OTHERS.items():
        paths.setdefault(path, {})[method] = {"summary": summary, "responses": _responses(path)}
    for path, item in paths.items():
        if "{id}" in path:
            item["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "aserve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _responses(path: str) -> dict[str, Any]:
    content: dict[str, Any] = {_KINDS.get(path, "application/json"): {}}
    if path in _STREAMED:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "The answer", "content": content},
        "default": {"description": "An error", "content": error},
    }


class OpenAPI:
    """The handler."""

    def __init__(self) -> None:
        self._document = document()

    async def get(self, request: Request) -> Response:
        """The document, with the server's root path."""
        servers = [{"url": request.scope.get("root_path") or "/"}]
        return json_response({**self._document, "servers": servers})
