"""A small client of an aserve server (or any OpenAI-compatible one): typed deltas over server-sent events.

For programs elsewhere on the network; a program that holds an Engine needs no client. Imports httpx only when used.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from collections.abc import Sequence as Items
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aserve.errors import (
    AserveError,
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
)
from aserve.request import Delta

if TYPE_CHECKING:
    import httpx


class Client:
    """Requests to one server. `async with Client(url) as client: async for delta in client.complete(prompt): ...`

    Breaking out of the iteration and closing it (`contextlib.aclosing`) hangs up, which cancels the request.
    Refusals and failures are raised as aserve's own errors. `http` is a client of the caller's, left open.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._owned = http is None
        self._http = http or httpx.AsyncClient(
            base_url=url, headers=headers, timeout=httpx.Timeout(timeout, connect=10)
        )

    async def models(self) -> list[str]:
        """The names the server serves."""
        response = await self._http.get("/v1/models")
        if response.status_code != 200:
            raise _error(response.status_code, response.content)
        return [str(entry["id"]) for entry in response.json()["data"]]

    def complete(
        self, prompt: str | Items[int], *, model: str | None = None, **options: Any
    ) -> AsyncGenerator[Delta, None]:
        """Streams a completion. Options are the fields of POST /v1/completions."""
        return self._stream("/v1/completions", {"prompt": prompt}, model, options)

    def chat(
        self, messages: Items[Mapping[str, Any]], *, model: str | None = None, **options: Any
    ) -> AsyncGenerator[Delta, None]:
        """Streams the next message. Options are the fields of POST /v1/chat/completions."""
        return self._stream("/v1/chat/completions", {"messages": messages}, model, options)

    async def _stream(
        self, path: str, body: dict[str, Any], model: str | None, options: Mapping[str, Any]
    ) -> AsyncGenerator[Delta, None]:
        body = {**options, **body, "stream": True, "model": model or (await self.models())[0]}
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise _error(response.status_code, await response.aread())
            async for event in _events(response):
                if event == "[DONE]":
                    return
                chunk = json.loads(event)
                if "error" in chunk:
                    raise _error(500, event.encode())
                for choice in chunk["choices"]:
                    yield _delta(choice)
        raise RequestFailedError("the server closed the stream before its end")

    async def aclose(self) -> None:
        """Closes the connections."""
        if self._owned:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event. Lines end in LF, CR LF or CR, and in nothing else that str.splitlines knows."""
    buffer, data = "", []
    async for text in response.aiter_text():
        *lines, buffer = (buffer + text).replace("\r\n", "\n").split("\n")
        for line in lines:
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []


def _delta(choice: Mapping[str, Any]) -> Delta:
    text = choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")
    return Delta(
        int(choice["index"]),
        text or "",
        tuple(choice.get("token_ids") or ()),
        choice.get("finish_reason"),
        choice.get("stop_reason"),
    )


def _error(status: int, body: bytes) -> AserveError:
    try:
        details = json.loads(body)["error"]
        message, param = str(details["message"]), details.get("param")
    except (ValueError, KeyError, TypeError):
        message, param = f"HTTP {status}: {body[:500].decode('utf-8', 'replace')}", None
    match status:
        case 401:
            return AuthenticationError(message)
        case 404:
            return NotFoundError(message)
        case 503:
            return OverloadedError(message)
        case _ if 400 <= status < 500:
            return InvalidRequestError(message, param=param)
        case _:
            return RequestFailedError(message)
