"""A server over the fake model as a process of its own, for tests of sockets, signals and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
LONG = {"prompt": "abc", "max_tokens": 4000, "temperature": 0, "stream": True}


class Process:
    """A running server."""

    def __init__(self, child: subprocess.Popen[str], log: IO[bytes], port: int) -> None:
        self.child = child
        self._log = log
        self.url = f"http://127.0.0.1:{port}"

    def log(self) -> str:
        """What it has said on stderr."""
        self._log.seek(0)
        return self._log.read().decode()

    def wait(self) -> int:
        return self.child.wait(timeout=30)


@contextmanager
def server(**options: Any) -> Iterator[Process]:
    """A server over the fake model that answers /health with 200. Options are those of serve_fake.py."""
    with TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.serve_fake", "0", json.dumps(options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert child.stdout is not None
            process = Process(child, log, int(child.stdout.readline()))
            with httpx.Client(timeout=30) as client:
                while client.get(process.url + "/health").status_code != 200:
                    pass
            yield process
        finally:
            child.kill()
            child.communicate()


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
