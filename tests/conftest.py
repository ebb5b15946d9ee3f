"""What every test shares: the asyncio backend, and a guard that fails whatever blocks an event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    """Raises BlockingError where code run by an event loop sleeps, reads files or sockets, or waits for a lock."""
    with blockbuster_ctx() as guard:
        yield guard
