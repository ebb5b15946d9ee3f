"""The server's log: what a line says, and that nobody who does not read it can hold the server up."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from routes.logs import JsonFormatter, ThreadHandler
from tests.process import server


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("aserve.access", logging.INFO, "file", 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_a_json_line_has_the_records_fields() -> None:
    line = json.loads(JsonFormatter().format(record("a\nb", fields={"status": 200, "ttft": 0.5})))
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "info", "logger": "aserve.access", "message": "a\nb", "status": 200, "ttft": 0.5}


def test_a_json_line_has_the_exception() -> None:
    try:
        raise ValueError("why")
    except ValueError as error:
        made = record("it failed", exc_info=(ValueError, error, error.__traceback__))
    assert "ValueError: why" in json.loads(JsonFormatter().format(made))["exception"]


def test_lines_are_written_in_order_and_all_by_the_end() -> None:
    out = io.StringIO()
    handler = ThreadHandler(out)
    for number in range(100):
        handler.emit(record(str(number)))
    handler.close()
    assert out.getvalue().split() == [str(number) for number in range(100)]
    assert "aserve-log" not in [thread.name for thread in threading.enumerate()]


class Stuck(io.StringIO):
    """A pipe that is full until somebody reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.read_again = threading.Event()

    def write(self, text: str) -> int:
        self.read_again.wait(10)
        return super().write(text)


def test_a_pipe_that_nobody_reads_holds_nobody_up() -> None:
    out = Stuck()
    handler = ThreadHandler(out, limit=100)
    for _ in range(1000):
        handler.emit(record("x"))
    assert handler.num_dropped > 700
    out.read_again.set()
    handler.close()
    assert out.getvalue().count("x\n") == 1000 - handler.num_dropped
    assert f"{handler.num_dropped} log lines were dropped" in out.getvalue()


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_server_logs_a_line_per_request(kind: str) -> None:
    import httpx

    with server(log_format=kind) as process:
        body = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
        httpx.post(process.url + "/v1/completions", json=body, headers={"x-request-id": "mine"})
        process.child.terminate()
        assert process.wait() == 0
        lines = [line for line in process.log().splitlines() if "/v1/completions" in line]
    assert len(lines) == 1
    if kind == "json":
        fields = json.loads(lines[0])
        assert (fields["request_id"], fields["completion_tokens"], fields["status"]) == ("mine", 3, 200)
