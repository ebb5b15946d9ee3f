"""Users who read server-sent events, for locust: each stream reports its TTFT, its tokens and its token intervals.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --headless --scenario burst --run-time 60

The rows "TTFT" and "ITL" are what a reader feels, in milliseconds; the row "POST" ends with the response's headers, and
"tokens" has the output tokens of each stream as its size. One line before the tables sums up. Black box over HTTP.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from locust import FastHttpUser, LoadTestShape, constant, events, task
from prompts import prompts
from scenarios import SCENARIOS, Stage, stage

PROMPTS = prompts(64)
DEFAULT_SECONDS = 60.0


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """The load test's own options, shown by locust --help."""
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="steady", help="how many users, when")
    parser.add_argument("--max-tokens", type=int, default=48, help="output tokens of a stream")


@events.quitting.add_listener
def print_tokens(environment: Any, **_: Any) -> None:
    """The line a run is remembered by."""
    total = dict.fromkeys(("tokens", "TTFT", "ITL"), 0)
    for (_, kind), entry in environment.stats.entries.items():
        if kind in total:
            total[kind] += entry.total_content_length if kind == "tokens" else entry.num_requests
    whole = environment.stats.total
    seconds = max((whole.last_request_timestamp or 0.0) - whole.start_time, 1.0)
    pieces = total["TTFT"] + total["ITL"]
    print(
        f"{pieces} pieces of text in {seconds:.0f} s, {pieces / seconds:.1f} a second;"
        f" {total['tokens']} tokens in streams that ended",
        file=sys.stderr,
    )


class Shape(LoadTestShape):
    """Follows the chosen scenario for the run time, then stops the run."""

    def tick(self) -> tuple[int, float] | None:
        """Users wanted and their spawn rate; None ends the run."""
        options = self.runner.environment.parsed_options
        now: Stage | None = stage(options.scenario, self.get_run_time() / (options.run_time or DEFAULT_SECONDS))
        return None if now is None else (now.users, now.spawn_rate)


class StreamUser(FastHttpUser):
    """Streams one completion after another. Under --scenario disconnect, goes away in the middle of half of them."""

    host = "http://127.0.0.1:8000"
    wait_time = constant(0)
    connection_timeout = 5.0
    network_timeout = 60.0

    @task(3)
    def completion(self) -> None:
        """A text completion, as a program asks for it."""
        self._stream("/v1/completions", {"prompt": random.choice(PROMPTS)})

    @task(1)
    def chat(self) -> None:
        """A chat turn, as a person asks for it."""
        message = {"role": "user", "content": random.choice(PROMPTS)}
        self._stream("/v1/chat/completions", {"messages": [message]})

    def _stream(self, path: str, body: dict[str, Any]) -> None:
        options = self.environment.parsed_options
        leaves = options.scenario == "disconnect" and random.random() < 0.5
        cut_after = random.randint(1, options.max_tokens) if leaves else None
        body |= {"max_tokens": options.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        with self.client.post(path, json=body, stream=True, catch_response=True, name=path) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}: {response.text[:200]}")
                return
            error = self._read(path, _data(response), start, cut_after)
            response.stream.release()
            if error:
                response.failure(error)

    def _read(self, path: str, lines: Iterator[str], start: float, cut_after: int | None) -> str | None:
        """Reads a stream and fires its metrics; says what was wrong with it."""
        last: float | None = None
        num_events = tokens = 0
        for data in lines:
            if data == "[DONE]":
                self._fire("tokens", path, 0.0, tokens)
                return None
            event = json.loads(data)
            if "error" in event:
                return f"error event: {event['error'].get('message')}"
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event["choices"]):
                now = time.perf_counter()
                self._fire("TTFT" if last is None else "ITL", path, (now - (start if last is None else last)) * 1e3)
                last, num_events = now, num_events + 1
            if cut_after is not None and num_events >= cut_after:
                self._fire("tokens", path, 0.0, num_events)
                return None  # unread: the caller drops the connection, and the server sees its client go away
        return "the stream ended without [DONE]"

    def _fire(self, kind: str, name: str, milliseconds: float, size: int = 0) -> None:
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=milliseconds, response_length=size, exception=None, context={}
        )


def _data(response: Any) -> Iterator[str]:
    """The data of each event, as it comes: read by line, because a read of a size waits until it has that much."""
    while line := response.stream.readline(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()
