"""What operators and tools ask: health, readiness, version, load, metrics, token ids, cancelling a request.

Handlers only read the engine's public numbers; none waits for a step, so all answer while the engine is busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from aserve import Engine, EngineDeadError, InvalidRequestError, NotFoundError, OverloadedError, Tokenizer, __version__
from routes.endpoint import Options
from routes.http import json_response, read_body, warning_headers
from routes.messages import conversation
from routes.metrics import exposition
from routes.records import Live
from routes.schemas import DetokenizeBody, TokenizeBody, parse, unknown_fields

T = TypeVar("T")
_WARM_UP_SECONDS = 5.0
_MAX_TOKENIZE_BYTES = 1 << 20  # about a second of one core
_INLINE_TOKENS = 4096  # decoded on the loop; more go to a thread


class Admin:
    """The handlers."""

    def __init__(
        self, engine: Engine, live: Live, options: Options, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._live = live
        self._options = options
        self._clock = clock
        self._num_steps = -1  # as last seen by a probe
        self._progress = 0.0  # when a probe last saw it change, or nothing to do

    async def health(self, request: Request) -> Response:
        """200 while the engine serves and its steps end; 503 while it loads or drains, hangs, and once it is dead."""
        self._engine.check()
        stats, now = self._engine.stats(), self._clock()
        busy = stats.num_running + stats.num_swapped + stats.num_waiting
        if not busy or stats.num_steps != self._num_steps:
            self._num_steps, self._progress = stats.num_steps, now
        elif now - self._progress > self._options.stall_timeout:
            raise EngineDeadError(f"no step has ended for {now - self._progress:.0f} seconds")
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """`health`, and a token has been generated: where none has yet, one is."""
        self._engine.check()
        try:
            with anyio.fail_after(_WARM_UP_SECONDS):
                await self._engine.warm_up()
        except TimeoutError:
            raise OverloadedError("no token was generated yet") from None
        return await self.health(request)

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        """How many generation requests are in flight, under vLLM's name, and how the engine holds them."""
        self._engine.check()
        stats = self._engine.stats()
        return json_response(
            {"server_load": len(self._live), "running": stats.num_running, "waiting": stats.num_waiting}
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        self._engine.check()
        body, content_type = exposition(self._engine)
        return Response(body, headers={"content-type": content_type})

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text, or of a conversation under the chat template."""
        raw = await read_body(request.scope, request.receive, self._options.max_body_bytes)
        body = parse(raw, TokenizeBody)
        self._options.check_model(self._engine, body.model)
        tokenizer = self._tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")

        def encode() -> list[int]:
            if body.prompt is not None:
                return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
            continued, opening = body.continue_final_message is True, body.add_generation_prompt
            text = tokenizer.render_chat(
                conversation(body.messages),
                tools=body.tools,
                add_generation_prompt=not continued if opening is None else opening,
                continue_final_message=continued,
                variables=body.chat_template_kwargs,
            )
            return tokenizer.encode(text, body.add_special_tokens is True)

        if len(raw) > _MAX_TOKENIZE_BYTES:
            raise InvalidRequestError(f"the text is too long: at most {_MAX_TOKENIZE_BYTES} bytes", param="prompt")
        tokens = await _off_loop(encode, long=tokenizer.is_long(len(raw)))
        limit = self._engine.info.max_model_len
        headers = warning_headers(unknown_fields(raw, TokenizeBody))
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens}, headers=headers)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones included."""
        raw = await read_body(request.scope, request.receive, self._options.max_body_bytes)
        body = parse(raw, DetokenizeBody)
        self._options.check_model(self._engine, body.model)
        tokenizer = self._tokenizer()
        limit = self._engine.info.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < limit:
                raise InvalidRequestError(f"token id {token_id} is not in 0..{limit - 1}", param="tokens")
        long = len(body.tokens) > _INLINE_TOKENS
        text = await _off_loop(lambda: tokenizer.decode(body.tokens, False), long=long)
        return json_response({"prompt": text}, headers=warning_headers(unknown_fields(raw, DetokenizeBody)))

    def _tokenizer(self) -> Tokenizer:
        self._engine.check()
        if self._engine.tokenizer is None:
            raise InvalidRequestError("this server has no tokenizer: it takes token ids and gives token ids")
        return self._engine.tokenizer

    async def cancel(self, request: Request) -> Response:
        """Cancels a request in flight by the id of its response. Its client gets an error; 404 if it is unknown."""
        name = request.path_params["id"]
        if not self._live.cancel(name):
            raise NotFoundError(f"no request {name!r} is in flight", param="id", code="request_not_found")
        return json_response({"id": name, "object": "request", "cancelled": True})


async def _off_loop(call: Callable[[], T], *, long: bool) -> T:
    return await anyio.to_thread.run_sync(call) if long else call()
