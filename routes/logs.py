"""The server's log: text or JSON lines on stderr, written by a thread of its own.

A terminal or a pipe that takes no more must never hold the event loop up: lines wait in a bounded queue, and are
dropped, and counted, once that is full. server.py sets it up; an application in somebody else's server logs as that
says. A record's `fields` (see middleware.py) become members of its JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from queue import Empty, Full, Queue
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]
MAX_WAITING = 10_000  # lines
_BATCH = 64  # lines written at once
_FLUSH_SECONDS = 1.0
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, the record's fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class ThreadHandler(logging.Handler):
    """Formats at once, and leaves the writing to a daemon thread."""

    def __init__(self, out: TextIO, *, limit: int = MAX_WAITING) -> None:
        super().__init__()
        self._out = out
        self._lines: Queue[str | None] = Queue(limit)
        self._thread = threading.Thread(target=self._write, name="aserve-log", daemon=True)
        self._thread.start()
        self.num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except Full:
            self.num_dropped += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Gives what waits a moment to be written."""
        try:
            self._lines.put(None, timeout=_FLUSH_SECONDS)
            self._thread.join(_FLUSH_SECONDS)
        except Full:
            pass
        super().close()

    def _write(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            lines: list[str | None] = [line]
            with suppress(Empty):
                while lines[-1] is not None and len(lines) < _BATCH:
                    lines.append(self._lines.get_nowait())
            text = "".join([each for each in lines if each is not None])
            if self.num_dropped > told:
                told = self.num_dropped
                text += f"{told} log lines were dropped so far\n"
            try:
                self._out.write(text)
                self._out.flush()
            except (OSError, ValueError):  # stderr is gone
                return
            if lines[-1] is None:
                return


@contextmanager
def logging_to_stderr(level: str, kind: LogFormat) -> Iterator[None]:
    """Sets the root logger up; at the end what waits is written."""
    handler = ThreadHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(TEXT))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()
