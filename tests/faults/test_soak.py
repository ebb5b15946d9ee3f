"""A mixed load, and what is left after it: no growth, no block, no task, consistent counters, right texts."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time

import psutil
import pytest

from tests.faults.soak import SLOW, Soak
from tests.faults.wire import fetch, gauges, idle
from tests.process import Process, server

MIB = 1 << 20


@pytest.mark.live
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seconds", [15.0, pytest.param(120.0, marks=pytest.mark.slow)])
def test_a_server_is_as_new_after_a_mixed_load(seconds: float, request: pytest.FixtureRequest) -> None:
    """Growth is judged in the second half: what a server keeps for its first requests is no leak."""
    given = request.config.getoption("--soak")
    if given and seconds < 120:
        pytest.skip("the run of --soak SECONDS does what this one does")
    seconds = given or seconds
    live = request.config.getoption("--live")
    if live:
        asyncio.run(loaded(live, seconds, None))
        return
    with server(max_num_seqs=64, step=0.002, max_unsent_bytes=2000, slow_client="pause") as process:
        child = psutil.Process(process.child.pid)
        before = num_tasks(process), child.num_threads(), child.num_fds()
        memory = asyncio.run(loaded(process.url, seconds, child))
        assert_no_growth(memory, seconds)
        after = num_tasks(process), child.num_threads(), child.num_fds()
        print(f"tasks, threads, files: {before} before, {after} after")
        assert after[0] <= before[0] and after[2] <= before[2]
        assert after[1] <= before[1] + 2  # what encodes long prompts stays for the next
        process.child.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "Traceback" not in process.log()


async def loaded(url: str, seconds: float, process: psutil.Process | None) -> list[tuple[float, int]]:
    """Loads the server and checks what it is left with. Its memory over time, in bytes."""
    memory: list[tuple[float, int]] = []
    began = time.monotonic()

    async def watch() -> None:
        while process is not None:
            memory.append((time.monotonic() - began, (await asyncio.to_thread(process.memory_info)).rss))
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    before = await gauges(url)
    soak = Soak(url, seed=1)
    await soak.run(seconds)
    watching.cancel()
    assert soak.wrong == []
    print(dict(soak.done), f"slow readers took {min(soak.rates):.1f} to {max(soak.rates):.1f} bytes a second")
    assert max(soak.rates) <= SLOW
    after = await idle(url, 10)
    assert (await fetch(url, "GET", "/load"))[1].startswith(b'{"server_load":0')
    ended = {name: after[name] - before[name] for name in after if name.startswith("aserve_requests_total")}
    assert not ended['aserve_requests_total{outcome="error"}']
    for name in ("request_seconds_count", "requests_total"):
        counted = [value - before[key] for key, value in after.items() if key.startswith(f"aserve_{name}")]
        assert sum(counted) == sum(ended.values())
    assert sum(ended.values()) >= soak.done["normal"]
    return memory


def assert_no_growth(memory: list[tuple[float, int]], seconds: float) -> None:
    """The trend of the second half, over its length, is a few megabytes at most. Streams that may be resumed are kept
    for 30 s after their end, so that a short run is still filling up."""
    second_half = [(at, size) for at, size in memory if at > seconds / 2]
    slope, _ = statistics.linear_regression(*zip(*second_half, strict=True))
    growth = slope * seconds / 2
    print(f"grew by {growth / MIB:.1f} MiB of {second_half[-1][1] / MIB:.0f} in the second half")
    assert growth < (8 * MIB if seconds >= 240 else 24 * MIB)


def num_tasks(process: Process) -> int:
    """Tasks on the server's loop, less those of connections that are just closing."""
    assert process.child.stdout is not None
    counts = []
    for _ in range(20):
        process.child.send_signal(signal.SIGUSR1)
        counts.append(int(process.child.stdout.readline()))
    return min(counts)
