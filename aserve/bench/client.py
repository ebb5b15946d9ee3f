"""Streams the chat workload from a server's /v1/completions and times every event, in several client processes.

Called by `aserve bench serve`. The client is a bare HTTP/1.1 reader over asyncio protocols, one connection a request: a
library's client takes more of the processor than the server under test. Times are the client's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, cast
from urllib.parse import urlsplit

from aserve.bench import percentiles, workload

_SETTLE = 2.0  # seconds for every process to start before the first request
_TAIL = 4096  # bytes kept of a response's end, where its usage is


@dataclass(slots=True)
class Times:
    """One request as its client saw it; seconds of a clock that all processes share."""

    began: float
    wanted: int  # tokens asked for
    events: list[float] = field(default_factory=list)  # arrival of each read that brought events
    received: int | None = None  # completion_tokens of the usage event
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What one client process is told."""

    host: str
    port: int
    path: str
    model: str
    api_key: str | None
    vocab_size: int
    num_prompts: int
    rate: float | None
    concurrency: int
    index: int
    num_processes: int
    start: float


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Drives the load and sums it up."""
    url = urlsplit(args.url)
    if url.scheme != "http" or url.hostname is None:
        raise SystemExit("aserve bench serve: --url must be http://HOST[:PORT]")
    start = time.perf_counter() + _SETTLE
    loads = [
        Load(
            host=url.hostname,
            port=url.port or 80,
            path=url.path.rstrip("/") + "/v1/completions",
            model=args.model,
            api_key=args.api_key,
            vocab_size=args.vocab_size,
            num_prompts=args.num_prompts,
            rate=args.rate,
            concurrency=args.concurrency,
            index=index,
            num_processes=args.num_processes,
            start=start,
        )
        for index in range(args.num_processes)
    ]
    with ProcessPoolExecutor(args.num_processes, mp_context=get_context("spawn")) as pool:
        times = [one for part in pool.map(_client, loads) for one in part]
    return summary(times, rate=args.rate, concurrency=None if args.rate else args.concurrency)


def summary(times: list[Times], **load: Any) -> dict[str, Any]:
    """Rates, and percentiles in milliseconds: time to first token, between reads, and per output token."""
    good = [one for one in times if one.error is None and one.events]
    bad = [one.error or "no event" for one in times if one.error is not None or not one.events]
    gaps = [b - a for one in good for a, b in zip(one.events, one.events[1:], strict=False)]
    seconds = max((one.events[-1] for one in good), default=0.0) - min((one.began for one in good), default=0.0)
    per_token = [(one.events[-1] - one.events[0]) / (one.wanted - 1) for one in good if one.wanted > 1]
    return {
        "benchmark": "serve",
        **load,
        "requests": len(good),
        "errors": len(bad),
        "first_error": bad[:1],
        "wrong_length": sum(one.received != one.wanted for one in good),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 2) if good else 0.0,
        "output_tokens_per_s": round(sum(one.wanted for one in good) / seconds, 1) if good else 0.0,
        "ttft_ms": percentiles([one.events[0] - one.began for one in good], 1e3, 2),
        "itl_ms": percentiles(gaps, 1e3, 2),
        "tpot_ms": percentiles(per_token, 1e3, 2),
    }


def _client(load: Load) -> list[Times]:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_drive(load))
    return uvloop.run(_drive(load))


async def _drive(load: Load) -> list[Times]:
    items = workload.chat(load.num_prompts, load.vocab_size)[load.index :: load.num_processes]
    bodies = [_request(load, item) for item in items]
    await asyncio.sleep(load.start - time.perf_counter())
    times: list[Times] = []

    async def one(item: workload.Item, body: bytes) -> None:
        seen = Times(time.perf_counter(), item.output_len)
        times.append(seen)
        await _stream(load, body, seen)

    if load.rate is None:
        pairs = iter(list(zip(items, bodies, strict=True)))

        async def worker() -> None:
            for item, body in pairs:
                await one(item, body)

        workers = max(1, load.concurrency // load.num_processes)
        await asyncio.gather(*(worker() for _ in range(workers)))
    else:
        draw = random.Random(100 + load.index)  # nosec B311 # no secret
        async with asyncio.TaskGroup() as group:
            for item, body in zip(items, bodies, strict=True):
                group.create_task(one(item, body))
                await asyncio.sleep(draw.expovariate(load.rate / load.num_processes))
    return times


def _request(load: Load, item: workload.Item) -> bytes:
    body = json.dumps(
        {
            "model": load.model,
            "prompt": item.prompt,
            "max_tokens": item.output_len,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    authorization = f"authorization: Bearer {load.api_key}\r\n" if load.api_key else ""
    head = (
        f"POST {load.path} HTTP/1.1\r\nhost: {load.host}:{load.port}\r\ncontent-type: application/json\r\n"
        f"{authorization}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Reader(asyncio.Protocol):
    """Counts a response's events as they arrive; `done` is set when the connection ends."""

    def __init__(self, request: bytes, seen: Times, done: asyncio.Future[None]) -> None:
        self._request, self._seen, self._done = request, seen, done
        self._tail = b""
        self._status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if not self._status:
            self._status = data[9:12]
        if b"data: " in data:
            self._seen.events.append(time.perf_counter())
        self._tail = (self._tail + data)[-_TAIL:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._status != b"200":
            self._seen.error = self._tail.decode(errors="replace")[-300:] or repr(exc)
        at = self._tail.rfind(b'"completion_tokens":')
        if at >= 0:
            digits = self._tail[at + 20 :].lstrip().split(b",", 1)[0].split(b"}", 1)[0]
            self._seen.received = int(digits)
        if not self._done.done():
            self._done.set_result(None)


async def _stream(load: Load, request: bytes, seen: Times) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    try:
        await loop.create_connection(lambda: _Reader(request, seen, done), load.host, load.port)
    except OSError as error:
        seen.error = repr(error)
        return
    await done
