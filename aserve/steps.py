"""Where the time of each step went, phase by phase: what `--profile` writes beside torch's trace.

pipeline.py adds a row per step while someone has asked for it; profiling.py writes the table. Pure: times are given.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from statistics import fmean, median
from typing import NamedTuple

PHASES = (
    "schedule",
    "queue",
    "inputs",
    "launch",
    "gap",
    "device",
    "wait",
    "lag",
    "commit",
    "detokenize",
    "deliver",
)


class StepRow(NamedTuple):
    """One step: what it computed, when its result was committed, and its phases. Times in seconds.

    On the event loop: `schedule`, `lag` (its result waited for the loop's turn), `commit`, `detokenize`, `deliver` (to
    mailboxes; what readers do with it runs in their own turns). On the model thread: `queue` (the plan waited for it),
    `inputs`, `launch`. On the device: `gap` (idle before the step) and `device`. `wait` is the waiting thread's.
    """

    number: int
    num_decodes: int
    num_chunks: int
    num_tokens: int
    at: float
    schedule: float
    queue: float
    inputs: float
    launch: float
    gap: float
    device: float
    wait: float
    lag: float
    commit: float
    detokenize: float
    deliver: float


class StepLog:
    """Rows in order of commit."""

    def __init__(self) -> None:
        self.rows: list[StepRow] = []

    def add(self, row: StepRow) -> None:
        """Takes a step whose tokens are delivered."""
        self.rows.append(row)

    def csv(self) -> str:
        """Every row, times in microseconds."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(StepRow._fields)
        writer.writerows([*row[:4], *(round(value * 1e6, 1) for value in row[4:])] for row in self.rows)
        return out.getvalue()

    def table(self) -> str:
        """Milliseconds by kind of step: the interval to the step before, each phase's median and mean, and shares."""
        lines: list[str] = []
        intervals = [0.0, *(after.at - row.at for row, after in zip(self.rows, self.rows[1:], strict=False))]
        timed = list(zip(self.rows, intervals, strict=False))
        kinds: dict[str, Callable[[StepRow], bool]] = {
            "all": lambda _: True,
            "decode": lambda row: not row.num_chunks,
            "mixed": lambda row: bool(row.num_chunks and row.num_decodes),
            "prefill": lambda row: bool(row.num_chunks and not row.num_decodes),
        }
        for kind, belongs in kinds.items():
            rows = [(row, interval) for row, interval in timed if belongs(row)]
            if rows:
                lines += self._kind(kind, rows)
        return "\n".join(lines) + "\n"

    def _kind(self, kind: str, rows: list[tuple[StepRow, float]]) -> list[str]:
        total = sum(interval for _, interval in rows)
        tokens, decodes = (fmean(row[i] for row, _ in rows) for i in (3, 1))
        lines = [f"{kind}: {len(rows)} steps, {total:.3f} s, {tokens:.1f} tokens and {decodes:.1f} decodes a step"]
        columns = {"interval": [interval for _, interval in rows]}
        columns |= {phase: [getattr(row, phase) for row, _ in rows] for phase in PHASES}
        lines.append(f"  {'ms':10s}{'p50':>9s}{'mean':>9s}{'p99':>9s}{'total s':>10s}")
        for name, values in columns.items():
            last = sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
            parts = (median(values), fmean(values), last)
            lines.append(f"  {name:10s}" + "".join(f"{1e3 * value:9.3f}" for value in parts) + f"{sum(values):10.3f}")
        return lines
