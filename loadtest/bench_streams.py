#!/usr/bin/env python3
"""Measures streamed completions of an OpenAI-compatible server over HTTP: tokens/s, TTFT, inter-token latency.

    python loadtest/bench_streams.py http://127.0.0.1:8000 --concurrency 1 8
    python loadtest/bench_streams.py http://127.0.0.1:8000 --concurrency 64 --requests 64 --disconnect 0.5 --check

Black box: it knows nothing of the server but its URL, so that a peer is measured by the same lines. Meanwhile a second
connection asks /health every 50 ms: its latency is how long the server's event loop keeps others waiting, and
where the server tells its event loop's lag at /metrics, the bound that 99.9% of a run's steps kept is printed. With
--check, every stream that was not cut must equal its prompt's text when it ran alone (greedy, so ask a float32
server); the exit status is 1 where one does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from prompts import prompts
from sse_client import Connection, HTTPStatusError

LAG = "aserve_event_loop_lag_seconds_bucket"
HEALTH_INTERVAL = 0.05  # seconds between two samples
STREAM_SECONDS = 120.0  # a stream that takes longer has failed


@dataclass
class Sample:
    """One stream: its text, when each event with text came, and what the server says it cost."""

    prompt: int
    start: float
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    cut: bool = False  # we went away on purpose
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, or the number of events where it gives none."""
        return int(self.usage["completion_tokens"]) if self.usage else len(self.arrivals)


@dataclass(frozen=True)
class Workload:
    """What is asked, and of whom."""

    url: str
    model: str
    prompts: list[str]
    max_tokens: int
    chat: bool = False
    ignore_eos: bool = False
    disconnect: float = 0.0
    health_path: str | None = None

    def body(self, prompt: str) -> dict[str, Any]:
        """The request for a prompt: greedy, streamed."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


async def stream(load: Workload, index: int, cut_after: int | None = None) -> Sample:
    """Runs one request to its end, or drops the connection after `cut_after` events with text."""
    path = "/v1/chat/completions" if load.chat else "/v1/completions"
    sample = Sample(index, time.perf_counter())
    try:
        async with asyncio.timeout(STREAM_SECONDS), Connection(load.url) as connection:
            async for event in connection.events(path, load.body(load.prompts[index])):
                if "error" in event:
                    sample.error = json.dumps(event["error"])
                    break
                sample.usage = event.get("usage") or sample.usage
                for choice in event.get("choices", ()):
                    text = choice["delta"].get("content") if load.chat else choice.get("text")
                    if text:
                        sample.text += text
                        sample.arrivals.append(time.perf_counter())
                if cut_after is not None and len(sample.arrivals) >= cut_after:
                    sample.cut = True
                    break
    except (HTTPStatusError, OSError, EOFError) as error:  # TimeoutError is an OSError
        sample.error = f"{type(error).__name__}: {error}"
    return sample


async def sample_health(load: Workload, latencies: list[float]) -> None:
    """Asks for health on one kept connection until cancelled; a failed answer counts as infinite."""
    if load.health_path is None:
        return
    async with Connection(load.url) as connection:
        while True:
            start = time.perf_counter()
            try:
                await connection.get(load.health_path)
                latencies.append(time.perf_counter() - start)
            except HTTPStatusError:
                latencies.append(float("inf"))
            await asyncio.sleep(HEALTH_INTERVAL)


async def lag_buckets(url: str) -> dict[float, float]:
    """Steps by the most that the event loop lagged behind them, in seconds, cumulative; empty where none is told."""
    try:
        async with Connection(url) as connection:
            lines = (await connection.get("/metrics")).decode().splitlines()
    except (HTTPStatusError, OSError, EOFError):
        return {}
    buckets = (line.rsplit(" ", 1) for line in lines if line.startswith(LAG))
    return {float(name.split('le="')[1].split('"')[0]): float(value) for name, value in buckets}


def lag_bound(before: dict[float, float], after: dict[float, float], fraction: float) -> float | None:
    """The bound in milliseconds that `fraction` of the steps between two readings kept; None where there are none."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts.get(float("inf"), 0.0)
    kept = [bound for bound, count in counts.items() if total and count >= fraction * total]
    return kept[0] * 1e3 if kept else None


async def run(
    load: Workload, concurrency: int, requests: int, seed: int = 0
) -> tuple[list[Sample], list[float], float]:
    """`requests` streams, `concurrency` at a time: the samples, health latencies and the seconds it took."""
    rng = random.Random(seed)
    work = [
        (index % len(load.prompts), rng.randint(1, load.max_tokens - 1) if rng.random() < load.disconnect else None)
        for index in range(requests)
    ]
    pending = iter(work)
    samples: list[Sample] = []

    async def client() -> None:
        for index, cut_after in pending:
            samples.append(await stream(load, index, cut_after))

    latencies: list[float] = []
    health = asyncio.create_task(sample_health(load, latencies))
    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.perf_counter() - start
    health.cancel()
    await asyncio.gather(health, return_exceptions=True)
    return samples, latencies, seconds


def quantile(values: list[float], fraction: float) -> float | None:
    """Nearest-rank quantile in milliseconds, two decimals; None of nothing."""
    if not values:
        return None
    return round(sorted(values)[min(len(values) - 1, int(fraction * len(values)))] * 1e3, 2)


def summary(concurrency: int, samples: list[Sample], latencies: list[float], seconds: float) -> dict[str, Any]:
    """The numbers of one run. Streams cut on purpose count in tokens/s and TTFT; their text is never compared."""
    good = [sample for sample in samples if sample.error is None]
    first = [sample.arrivals[0] - sample.start for sample in good if sample.arrivals]
    gaps = [later - earlier for s in good for earlier, later in zip(s.arrivals, s.arrivals[1:], strict=False)]
    whole = [sample for sample in good if not sample.cut]
    prompt_tokens = [sample.usage["prompt_tokens"] for sample in whole if sample.usage]
    return {
        "concurrency": concurrency,
        "requests": len(samples),
        "cut": sum(sample.cut for sample in samples),
        "errors": len(samples) - len(good),
        "first_error": next((sample.error for sample in samples if sample.error), None),
        "prompt_tokens": round(sum(prompt_tokens) / len(prompt_tokens), 1) if prompt_tokens else None,
        "output_tokens": sum(sample.tokens for sample in good),
        "seconds": round(seconds, 2),
        "tok_s": round(sum(sample.tokens for sample in good) / seconds, 1),
        "ttft_p50": quantile(first, 0.5),
        "ttft_p99": quantile(first, 0.99),
        "itl_p50": quantile(gaps, 0.5),
        "itl_p99": quantile(gaps, 0.99),
        "health_p50": quantile(latencies, 0.5),
        "health_p99": quantile(latencies, 0.99),
        "health_samples": len(latencies),
    }


async def served_model(url: str) -> str:
    """The first model the server lists."""
    async with Connection(url) as connection:
        return str(json.loads(await connection.get("/v1/models"))["data"][0]["id"])


async def measure(args: argparse.Namespace) -> int:
    """Warms up, runs each concurrency and prints it; the exit status."""
    load = Workload(
        url=args.url,
        model=args.model or await served_model(args.url),
        prompts=prompts(args.prompts, args.prompt_words),
        max_tokens=args.max_tokens,
        chat=args.chat,
        ignore_eos=args.ignore_eos,
        disconnect=args.disconnect,
        health_path=args.health_path or None,
    )
    warm = await stream(replace(load, max_tokens=8), 0)
    if warm.error:
        print(f"the server refused the first request: {warm.error}", file=sys.stderr)
        return 1
    solo: list[Sample] = []
    if args.check:
        solo = [await stream(load, index) for index in range(len(load.prompts))]
    failed = 0
    for concurrency in args.concurrency:
        before = await lag_buckets(args.url)
        samples, latencies, seconds = await run(load, concurrency, args.requests or args.prompts, args.seed)
        row = summary(concurrency, samples, latencies, seconds)
        row["lag_p999_bound"] = lag_bound(before, await lag_buckets(args.url), 0.999)
        if args.check:
            wrong = [s.prompt for s in samples if not s.cut and (s.error or s.text != solo[s.prompt].text)]
            row["checked"], row["wrong"] = sum(not s.cut for s in samples), len(wrong)
            failed += len(wrong)
        failed += row["errors"]
        row = {"server": args.label or args.url, **row}
        print(json.dumps(row) if args.json else table(row), flush=True)
    return 1 if failed else 0


def table(row: dict[str, Any]) -> str:
    """The numbers for a person, milliseconds where no unit is given."""
    text = (
        f"{row['server']}: {row['concurrency']} streams, {row['requests']} requests"
        f" ({row['cut']} cut, {row['errors']} failed), prompts of {row['prompt_tokens']} tokens\n"
        f"  {row['tok_s']} tok/s ({row['output_tokens']} tokens in {row['seconds']} s)\n"
        f"  TTFT p50 {row['ttft_p50']} p99 {row['ttft_p99']}   ITL p50 {row['itl_p50']} p99 {row['itl_p99']}"
        f"   /health p50 {row['health_p50']} p99 {row['health_p99']} ({row['health_samples']} samples)"
    )
    if row["lag_p999_bound"] is not None:
        text += f"   loop lag p99.9 <= {row['lag_p999_bound']:g}"
    if "checked" in row:
        text += f"\n  {row['checked'] - row['wrong']} of {row['checked']} whole streams equal their solo text"
    return text + (f"\n  first error: {row['first_error']}" if row["first_error"] else "")


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--label", help="the server's name in the output")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="streams at once, one run each")
    parser.add_argument("--prompts", type=int, default=16, help="different prompts")
    parser.add_argument("--prompt-words", type=int, default=58, help="58 words are about 64 tokens")
    parser.add_argument("--requests", type=int, help="streams per run; default: one per prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    parser.add_argument("--ignore-eos", action="store_true", help="where the server knows it")
    parser.add_argument("--disconnect", type=float, default=0.0, help="share of streams cut at a random token")
    parser.add_argument("--check", action="store_true", help="compare whole streams with solo runs")
    parser.add_argument("--health-path", default="/health", help="sampled meanwhile; '' for none")
    parser.add_argument("--seed", type=int, default=0, help="of the random disconnects")
    parser.add_argument("--json", action="store_true", help="one JSON object per run")
    sys.exit(asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
