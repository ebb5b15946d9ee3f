"""What an operator watches: GET /dashboard, a page without outside assets, and the numbers it draws as they change.

app.py mounts both. The page holds no secret and asks for the key itself; the numbers are behind it. This is the only
file that imports sse-starlette: its comforts are worth their cost here, and not on the path of tokens (sse.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

import anyio
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from aserve import Engine, EngineStats, __version__

PING_SECONDS = 15
_PAGE = (files(__name__) / "index.html").read_text(encoding="utf-8")


class Dashboard:
    """The handlers. `interval` is seconds between two events of the numbers."""

    def __init__(self, engine: Engine, *, interval: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._interval = interval
        self._clock = clock

    async def page(self, request: Request) -> Response:
        """The page."""
        return HTMLResponse(_PAGE, headers={"cache-control": "no-cache"})

    async def stream(self, request: Request) -> Response:
        """The numbers, as server-sent events of one JSON object each."""
        self._engine.check()
        headers = {"cache-control": "no-cache"}
        return EventSourceResponse(self._numbers(), ping=PING_SECONDS, sep="\n", headers=headers)

    async def _numbers(self) -> AsyncIterator[dict[str, str]]:
        """Ends when the engine drains, so that a watcher does not hold up the shutdown."""
        before, began = self._engine.stats(), self._clock()
        number = 0
        while not self._engine.draining:
            number += 1
            now, clock = self._engine.stats(), self._clock()
            seconds = max(clock - began, 1e-6)
            yield {
                "id": str(number),
                "data": json.dumps(
                    self._snapshot(now)
                    | {
                        "tokens_per_second": round((now.num_output_tokens - before.num_output_tokens) / seconds, 1),
                        "steps_per_second": round((now.num_steps - before.num_steps) / seconds, 1),
                    }
                ),
            }
            before, began = now, clock
            await anyio.sleep(self._interval)

    def _snapshot(self, stats: EngineStats) -> dict[str, Any]:
        metrics = self._engine.metrics
        return {
            "model": self._engine.name,
            "version": __version__,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "swapped": stats.num_swapped,
            "blocks_used": stats.num_blocks_used,
            "blocks": stats.num_blocks,
            "preemptions": stats.num_preemptions,
            "prefix_hit_tokens": stats.num_prefix_hit_tokens,
            "output_tokens": stats.num_output_tokens,
            "last_step_ms": round(stats.last_step_seconds * 1000, 2),
            "refused": metrics.num_refused,
            "outcomes": dict(metrics.outcomes),
        }
