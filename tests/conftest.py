"""What every test shares: the asyncio backend, and a guard that fails whatever blocks an event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--live", metavar="URL", help="run what can against this server, in place of one of the tests' own"
    )
    parser.addoption("--ping-interval", metavar="S", type=float, default=15.0, help="of the server of --live")
    parser.addoption("--walks", metavar="N", type=int, default=20, help="how many the scheduler's slow test takes")
    parser.addoption("--soak", metavar="SECONDS", type=float, help="how long the soak test loads the server")


@pytest.fixture
def walks(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--walks")
    return count


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    """How many steps an engine has in flight."""
    return int(request.param)


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    """Raises BlockingError where code run by an event loop sleeps, reads files or sockets, or waits for a lock."""
    with blockbuster_ctx() as guard:
        yield guard
