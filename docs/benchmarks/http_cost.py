"""CPU microseconds per streamed event, from the engine's mailbox to the socket.

usage: python docs/benchmarks/http_cost.py [--streams N] [--tokens N] [--batch N]

A stand-in engine pushes one delta per stream and step into real `Stream`s, as the pipeline does; the application,
uvicorn, uvloop and httptools are the real ones; the clients are another process that only reads. What is measured is
the server process's CPU time, so it holds on a busy machine too. `floor` is an ASGI application that sends a constant
event from one wake-up per step: what the server and the kernel cost without ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import selectors
import socket
import time
from typing import Any

import uvicorn

from aserve import Delta, SamplingParams, Stream, WorkerInfo
from aserve.request import Request
from aserve.stream import Mailbox
from routes.app import create_app


class PushedEngine:
    """The parts of an Engine that the routes use; `push` is one step of the model for every open stream."""

    name = "pushed"
    draining = False
    started = True
    tokenizer = None
    info = WorkerInfo(1, 0, 16, 4096, 1000, 1, "none", "none")

    def __init__(self) -> None:
        self.boxes: list[Mailbox] = []
        self.opened = asyncio.Semaphore(0)

    def check(self) -> None:
        return

    def default_sampling(self) -> dict[str, Any]:
        return {}

    async def submit(self, prompt: str, params: SamplingParams, **options: Any) -> Stream:
        box = Mailbox(asyncio.get_running_loop(), lambda request: None)
        box.request = Request(len(self.boxes), "0" * 32, (1,), params, 0, 1, 0.0)
        self.boxes.append(box)
        self.opened.release()
        return Stream(box, key=os.urandom(16).hex(), n=1)

    def push(self, text: str, last: bool) -> None:
        for box in self.boxes:
            box.push(Delta(0, text, (5,), "length" if last else None))


class Floor:
    """Sends the same bytes for every step; steps are one Future that all streams await."""

    def __init__(self, event: bytes, tokens: int) -> None:
        self.event = event
        self.tokens = tokens
        self.opened = asyncio.Semaphore(0)
        self.step: asyncio.Future[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        self.opened.release()
        message = {"type": "http.response.body", "body": self.event, "more_body": True}
        for _ in range(self.tokens):
            if self.step is None:
                self.step = asyncio.get_running_loop().create_future()
            await self.step
            await send(message)
        await send({"type": "http.response.body", "body": b""})

    def push(self, text: str, last: bool) -> None:
        step, self.step = self.step, None
        if step is not None:
            step.set_result(None)


def read_all(port: int, streams: int) -> None:
    """The clients: opens `streams` requests and reads each to its end."""
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with selectors.DefaultSelector() as selector:
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(head.encode() + body)
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]


async def measure(app: Any, source: Any, streams: int, tokens: int, batch: int) -> float:
    """Microseconds of this process's CPU per event."""
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as listener:
        config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        clients = multiprocessing.get_context("spawn").Process(
            target=read_all, args=(listener.getsockname()[1], streams), daemon=True
        )
        clients.start()
        for _ in range(streams):
            await source.opened.acquire()
        await asyncio.sleep(0.1)
        began = time.process_time()
        for step in range(1, tokens + 1):
            for _ in range(batch - 1):
                source.push(" token", False)
            source.push(" token", step == tokens)
            await asyncio.sleep(0.002)
        spent = time.process_time() - began
        await asyncio.to_thread(clients.join)
        server.should_exit = True
        await serving
    return spent / (streams * tokens) * 1e6


async def idle(tokens: int) -> float:
    """CPU seconds of the steps' own timer, which no server pays."""
    began = time.process_time()
    for _ in range(tokens):
        await asyncio.sleep(0.002)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--batch", type=int, default=1, help="deltas per stream that are there at once")
    args = parser.parse_args()
    event = b'id: 00000000000000000000000000000000:100\ndata: {"choices":[{"text":" token"}]}\n\n'
    engine = PushedEngine()
    floor = Floor(event + b" " * 150, args.tokens)
    app: Any = create_app(engine)  # type: ignore[arg-type]
    with asyncio.Runner(loop_factory=uvicorn.Config(app, loop="uvloop").get_loop_factory()) as runner:
        timer = runner.run(idle(args.tokens)) / (args.streams * args.tokens) * 1e6
        ours = runner.run(measure(app, engine, args.streams, args.tokens, args.batch)) - timer
        least = runner.run(measure(floor, floor, args.streams, args.tokens, args.batch)) - timer
    print(f"us of CPU per event at {args.streams} streams: aserve {ours:.1f}, floor {least:.1f}")


if __name__ == "__main__":
    main()
