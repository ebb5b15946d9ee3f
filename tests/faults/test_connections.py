"""Clients that die, are slow, wait by the thousand, or sit behind a proxy that cuts: over real sockets."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time

import psutil
import pytest

from aserve import Client
from tests.faults.proxy import cutting_proxy
from tests.faults.wire import Drip, Wire, gauges, idle, read_text, request_bytes, stream_text
from tests.process import ROOT, server

BODY = {"prompt": "abcdefg", "temperature": 0}


@pytest.mark.live
def test_a_client_killed_with_200_open_streams_frees_all_blocks_within_a_second(live: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.hold", live, "200"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert asyncio.run(gauges(live))["aserve_kv_blocks_used"] > 0
        child.kill()
        asyncio.run(idle(live, 1.0))


@pytest.mark.live
def test_a_hundred_streams_through_a_proxy_that_cuts_every_5_events_lose_and_repeat_nothing(live: str) -> None:
    async def main() -> None:
        whole = await stream_text(live, BODY | {"max_tokens": 60})
        before = await gauges(live)
        async with cutting_proxy(live, 5) as (url, cuts), Client(url) as client:
            model = (await client.models())[0]

            async def one() -> str:
                return "".join(
                    [delta.text async for delta in client.complete(model=model, max_tokens=60, **BODY)]  # type: ignore[arg-type]
                )

            async with asyncio.timeout(60):
                texts = await asyncio.gather(*(one() for _ in range(100)))
        assert texts == [whole] * 100
        assert len(cuts) >= 100
        after = await gauges(live)
        ended = {name: after[name] - before[name] for name in after if name.startswith("aserve_requests_total")}
        assert sum(ended.values()) == 100
        assert not ended['aserve_requests_total{outcome="cancelled"}']

    asyncio.run(main())


@pytest.mark.parametrize("policy", ["coalesce", "pause", "cancel"])
def test_a_reader_of_nothing_is_bounded_and_no_other_stream_notices(policy: str) -> None:
    """One client stops reading; its stream is longer than what sockets hold."""

    async def main(url: str) -> None:
        slow = await Wire.open(url, receive_buffer=4096)
        await slow.send("POST", "/v1/completions", BODY | {"stream": True, "max_tokens": 3500, "ignore_eos": True})
        await slow.head()
        texts = await asyncio.gather(*(stream_text(url, BODY | {"max_tokens": 200}) for _ in range(4)))
        assert texts == [("abcdefg" * 29)[:200]] * 4
        async with asyncio.timeout(40):
            while True:
                now = await gauges(url)
                if policy == "pause" and now["aserve_requests_paused"]:
                    assert now["aserve_kv_blocks_used"] == 0
                    break
                if policy == "cancel" and now['aserve_requests_total{outcome="cancelled"}']:
                    break
                if policy == "coalesce" and now['aserve_requests_total{outcome="length"}'] == 6:  # and the warm-up
                    break
        assert await stream_text(url, BODY | {"max_tokens": 20}) == ("abcdefg" * 3)[:20]
        async with asyncio.timeout(40):
            if policy == "cancel":
                with pytest.raises(RuntimeError, match="unread"):
                    await read_text(slow)
            else:
                assert await read_text(slow) == ("abcdefg" * 500)[:3500]
        slow.close()
        await idle(url, 2)

    with server(slow_client=policy, max_unsent_bytes=200, step=0.001) as process:
        asyncio.run(main(process.url))


def test_a_reader_of_nothing_is_cut_in_time_and_one_that_is_slow_is_not() -> None:
    async def main(url: str) -> None:
        request = request_bytes("POST", "/v1/completions", BODY | {"stream": True, "max_tokens": 1500})
        slow, deaf = await Drip.open(url, request), await Drip.open(url, request)
        loop = asyncio.get_running_loop()
        await slow.read(500, loop.time() + 8)
        wire = await slow.rest()
        assert await wire.head() == 200
        assert await read_text(wire) == ("abcdefg" * 215)[:1500]
        wire.close()
        with pytest.raises(ConnectionResetError):
            await deaf.read(1 << 20, loop.time() + 5)
        deaf.close()
        await idle(url, 2)

    with server(deaf_seconds=3.0, slow_client="pause", max_unsent_bytes=1000, step=0.001) as process:
        asyncio.run(main(process.url))


def test_2000_streams_that_wait_cost_little_and_get_their_pings_on_time() -> None:
    """All but one wait in the queue. Every stream gets each ping, and none is half an interval late."""
    count, interval, rounds = 2000, 5.0, 3
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))

    async def main(url: str, process: psutil.Process) -> tuple[float, list[float]]:
        late: list[float] = []
        start = asyncio.Event()
        opened = 0

        async def wait() -> None:
            nonlocal opened
            wire = await Wire.open(url)
            try:
                await wire.send("POST", "/v1/completions", body)
                assert await wire.head() == 200
                opened += 1
                if opened == count:
                    start.set()
                chunks = wire.chunks()
                at: float | None = None
                seen = 0
                while seen < rounds:
                    assert b": ping" in await anext(chunks)
                    now = time.perf_counter()
                    if at is not None:
                        late.append(now - at - interval)
                    at, seen = now, seen + start.is_set()
            finally:
                wire.close()

        async def cpu() -> float:
            return sum((await asyncio.to_thread(process.cpu_times))[:2])

        body = {"prompt": "abc", "stream": True, "max_tokens": 4000}
        first = await Wire.open(url)  # it runs, the others wait for it
        await first.send("POST", "/v1/completions", body)
        await first.head()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(wait())
                await asyncio.sleep(interval / 2 / count)  # as pings go out over time, so do arrivals
            await start.wait()
            used, began = await cpu(), time.perf_counter()
            await asyncio.sleep(interval * (rounds - 1))
            share = (await cpu() - used) / (time.perf_counter() - began)
        first.close()
        return share, late

    try:
        with server(max_num_seqs=1, step=1.0, ping_interval=interval) as process:
            share, late = asyncio.run(main(process.url, psutil.Process(process.child.pid)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(late) >= count * (rounds - 1)
    print(f"{share:.1%} of a core; latest ping {max(late):.3f} s late")
    assert max(late) < interval / 2
    assert share < 0.10
