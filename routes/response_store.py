"""Responses that can be asked for again, in this process's memory: by id, with the conversation they continue.

responses.py fills it. Bounded by number and bytes, oldest out first; ids are 128 random bits, so knowing one is the
right to it. What runs in the background is kept by its task, not by its place here.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from aserve import NotFoundError, Stream
from routes.records import Record

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Entry:
    """A response, and what it takes to go on from it or to cancel it."""

    response: dict[str, Any]  # its wire form; grows until it ends
    messages: list[dict[str, Any]]  # the conversation it answers, without instructions
    record: Record
    stream: Stream
    size: int = 0

    @property
    def running(self) -> bool:
        """True while more may come."""
        return bool(self.response["status"] == "in_progress")

    def settle(self) -> None:
        """A client that left has cancelled what it was reading, and nothing else says so."""
        if self.running and self.stream.ended and not self.response["background"]:
            self.response["status"] = "cancelled"


class ResponseStore:
    """The responses, by id."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, entry: Entry) -> None:
        """Keeps it from now on."""
        self._entries[entry.response["id"]] = entry
        self.measure(entry)

    def measure(self, entry: Entry) -> None:
        """Counts an entry's bytes anew, and lets the oldest go where there are too many."""
        if entry.response["id"] not in self._entries:
            return
        size = len(json.dumps([entry.response, entry.messages]))
        self._bytes += size - entry.size
        entry.size = size
        while len(self._entries) > self._max_responses or (self._bytes > self._max_bytes and self._entries):
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, id: str, param: str = "id") -> Entry:
        """Raises NotFoundError where it is unknown, or gone."""
        entry = self._entries.get(id)
        if entry is None:
            raise NotFoundError(f"no response {id!r} is stored", param=param, code="response_not_found")
        entry.settle()
        return entry

    def remove(self, id: str) -> None:
        """Forgets it. Raises NotFoundError."""
        self._bytes -= self.get(id).size
        del self._entries[id]

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a response in the background. It ends with its stream, which ends with the engine."""
        task = asyncio.get_running_loop().create_task(work, name="aserve-response")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
