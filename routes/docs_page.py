"""GET /docs: the OpenAPI document as a page to read, made on the server, without scripts or outside assets."""

from __future__ import annotations

from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from aserve import __version__
from routes.openapi import document

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1.5rem; }
h2 { font-size: 1rem; border-top: 1px solid #8884; padding-top: 1rem; margin-bottom: .2rem; }
code { font-size: .95em; }
td, th { text-align: left; vertical-align: top; padding: .1rem 1rem .1rem 0; font-weight: 400; }
"""


class DocsPage:
    """The handler. The page is made once."""

    def __init__(self) -> None:
        self._page = page(document())

    async def get(self, request: Request) -> Response:
        """The page."""
        return HTMLResponse(self._page)


def page(spec: dict[str, Any]) -> str:
    """The whole page."""
    schemas = spec["components"]["schemas"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>aserve API</title><style>{_STYLE}</style>",
        f"<h1>aserve {escape(__version__)}</h1><p>The same as JSON: <a href=openapi.json>openapi.json</a>. ",
        "What each field does is in docs/api.md of the project.</p>",
    ]
    for path, item in spec["paths"].items():
        for method, operation in item.items():
            if method == "parameters":
                continue
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_table(schemas[name]))
    return "".join(parts)


def _table(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(_type(field))}<td>{'required' if name in required else ''}"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _type(field: dict[str, Any]) -> str:
    """A schema in a word or two; null, which every optional field may be, left out."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(arm) for arm in field["anyOf"] if arm.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
