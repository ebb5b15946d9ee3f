"""The breakdown of steps: its rows as text, and what an engine logs into it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from blockbuster import BlockBuster

from aserve import Engine, SamplingParams, profiled
from aserve.steps import PHASES, StepLog, StepRow
from tests.engine_util import HeldExecutor
from tests.fakes import FakeRunner


def row(number: int, at: float, *, num_decodes: int, num_chunks: int, device: float) -> StepRow:
    spans = dict.fromkeys(PHASES, 0.0) | {"device": device}
    return StepRow(number, num_decodes, num_chunks, num_decodes + 10 * num_chunks, at, **spans)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_table_tells_kinds_of_steps_apart() -> None:
    log = StepLog()
    log.add(row(1, 1.0, num_decodes=0, num_chunks=1, device=0.050))
    log.add(row(2, 1.1, num_decodes=1, num_chunks=1, device=0.030))
    log.add(row(3, 1.2, num_decodes=2, num_chunks=0, device=0.010))
    log.add(row(4, 1.25, num_decodes=2, num_chunks=0, device=0.020))
    table = log.table()
    assert "all: 4 steps, 0.250 s" in table
    assert "decode: 2 steps, 0.150 s, 2.0 tokens and 2.0 decodes a step" in table
    assert "mixed: 1 steps, 0.100 s, 11.0 tokens and 1.0 decodes a step" in table
    decode = table[table.index("decode:") :]
    device = next(line for line in decode.splitlines() if "device" in line)
    assert device.split() == ["device", "15.000", "15.000", "20.000", "0.030"]


def test_the_rows_are_microseconds() -> None:
    log = StepLog()
    log.add(row(7, 2.5, num_decodes=3, num_chunks=0, device=0.001))
    (found,) = csv.DictReader(log.csv().splitlines())
    assert (found["number"], found["num_tokens"], found["at"], found["device"]) == ("7", "3", "2500000.0", "1000.0")


@pytest.mark.anyio
async def test_an_engine_logs_each_step_while_it_is_profiled(tmp_path: Path, no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # torch's profiler reads files when it starts
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    async with Engine(executor=HeldExecutor(FakeRunner())) as engine:
        before = engine.stats().num_steps
        async with profiled(engine, tmp_path / "profile"):
            await engine.generate([1, 2, 3], params).completions()
        logged = engine.stats().num_steps - before
        await engine.generate([1, 2, 3], params).completions()
    rows = list(csv.DictReader((tmp_path / "profile" / "steps.csv").read_text().splitlines()))
    assert len(rows) == logged >= 5
    assert [row["num_decodes"] for row in rows] == ["0", "1", "1", "1", "1"]
    assert names(tmp_path / "profile") == {
        "steps.csv",
        "steps.txt",
        "trace.json",
        "kernels.txt",
    }


@pytest.mark.anyio
async def test_a_windowed_profile_traces_nothing_where_few_steps_ran(
    tmp_path: Path, no_blocking_calls: BlockBuster
) -> None:
    no_blocking_calls.deactivate()
    async with Engine(executor=HeldExecutor(FakeRunner())) as engine, profiled(engine, tmp_path, window=True):
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)).completions()
    assert names(tmp_path) == {"steps.csv", "steps.txt"}
