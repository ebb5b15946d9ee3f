"""A short run of scripts/fuzz-api: made-up requests never get a server's error."""

from __future__ import annotations

import pytest

pytest.importorskip("schemathesis")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_made_up_request_breaks_the_server() -> None:
    from tests.fuzz import run

    found = run(60)
    assert found["POST /v1/completions"][400] > 10
    assert found["POST /v1/completions"][200] > 0
