"""G07: a compile that raises ends its request with an error; nothing waits for it."""

from __future__ import annotations

import pytest

from aserve import RequestFailedError, SamplingParams, StructuredOutput
from aserve.grammar import Grammars, Matcher
from tests.serving import serving

pytestmark = pytest.mark.anyio


async def test_the_request_ends_with_an_error_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(self: Grammars, structured: StructuredOutput) -> Matcher:
        raise ZeroDivisionError("a bug in the compiler")

    monkeypatch.setattr(Grammars, "compile", explode)
    async with serving() as engine:
        free = await engine.submit("abc", SamplingParams(max_tokens=50, temperature=0.0))
        stream = engine.generate("abc", SamplingParams(structured=StructuredOutput("json_object")))
        with pytest.raises(RequestFailedError, match="a bug in the compiler"):
            await stream.completions()
        assert stream.ended
        assert len((await free.completions())[0].token_ids) == 50
        assert engine.stats().num_waiting == engine.stats().num_running == 0
