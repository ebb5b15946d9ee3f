"""The server that a test may misuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process import server


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server's URL: the one under test (--live URL), or one of our own over the fake model."""
    url = request.config.getoption("--live")
    if url:
        yield url
        return
    with server(max_num_seqs=256) as process:
        yield process.url
        assert "Traceback" not in process.log()
