"""`--profile DIR`: torch's trace of some steps, and the breakdown of all of them, for an engine that is running.

Called by `aserve bench` and `aserve serve`. Writes trace.json (for chrome://tracing or Perfetto), kernels.txt (the
device's time by kernel), steps.csv and steps.txt (steps.py). Imports torch only when called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aserve.steps import StepLog, StepRow

if TYPE_CHECKING:
    from aserve.engine import Engine

TRACED_AFTER, TRACED_STEPS = 200, 100  # a server's trace: long enough to see, short enough to open


@asynccontextmanager
async def profiled(engine: Engine, directory: Path, *, window: bool = False) -> AsyncIterator[None]:
    """Logs the steps within and traces them: all, or with `window` TRACED_STEPS after the first TRACED_AFTER."""
    trace = _Trace(directory)
    log = _Window(trace) if window else StepLog()
    if not window:
        trace.start()
    engine.log_steps(log)
    try:
        yield
    finally:
        engine.log_steps(None)
        trace.stop()
        await asyncio.to_thread(_write, directory, log, trace)


class _Window(StepLog):
    """Traces some of the steps it logs."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self._trace = trace

    def add(self, row: StepRow) -> None:
        super().add(row)
        if len(self.rows) == TRACED_AFTER:
            self._trace.start()
        elif len(self.rows) == TRACED_AFTER + TRACED_STEPS:
            self._trace.stop()


class _Trace:
    """torch's profiler; started and stopped on the event loop's thread, it sees the kernels of all threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._profile: Any = None
        self._running = False

    def start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *device])
        self._profile.start()
        self._running = True

    def stop(self) -> None:
        if self._running:
            self._running = False
            self._profile.stop()

    def write(self) -> None:
        """Nothing where it never ran."""
        if self._profile is not None:
            self._profile.export_chrome_trace(str(self._directory / "trace.json"))
            averages = self._profile.key_averages()
            table = averages.table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90)
            (self._directory / "kernels.txt").write_text(table)


def _write(directory: Path, log: StepLog, trace: _Trace) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "steps.csv").write_text(log.csv())
    (directory / "steps.txt").write_text(log.table())
    trace.write()
