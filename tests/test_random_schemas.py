"""Whatever schema people send, what a finished output holds is valid under it: random schemas, a real model's draws."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest

from aserve import Completion, Engine, EngineConfig, SamplingParams, StructuredOutput
from tests.schemas import SchemaMaker
from tests.serving import LLAMA, TOKENIZER

pytestmark = pytest.mark.anyio

# A random model would hardly ever close a string or an object by itself.
CLOSERS = {TOKENIZER.encode(char, False)[0]: bias for char, bias in (('"', 4.0), ("}", 3.0), ("]", 3.0))}
VALIDATOR = jsonschema.Draft202012Validator


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A small random model with room for long documents."""
    for file in LLAMA.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return str(tmp_path)


@pytest.fixture
async def engine(model: str) -> AsyncIterator[Engine]:
    """It, served."""
    options = EngineConfig(
        model=model, load_format="dummy", dtype="float32", device="cpu", num_threads=1, max_num_seqs=32
    )
    async with Engine(options) as engine:
        yield engine


@pytest.mark.parametrize(
    ("first", "count"), [(0, 20), pytest.param(20, 200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
async def test_every_finished_output_is_valid(engine: Engine, first: int, count: int) -> None:
    schemas = [SchemaMaker(seed).make() for seed in range(first, first + count)]

    async def run(seed: int, schema: dict[str, object]) -> Completion:
        structured = StructuredOutput("json_schema", schema)
        params = SamplingParams(structured=structured, seed=seed, max_tokens=1500, logit_bias=CLOSERS)
        (completion,) = await engine.generate("hi", params).completions()
        return completion

    completions = await asyncio.gather(*(run(seed, schema) for seed, schema in enumerate(schemas, first)))
    finished = [
        (done, schema) for done, schema in zip(completions, schemas, strict=True) if done.finish_reason == "stop"
    ]
    assert len(finished) > 0.9 * count
    for completion, schema in finished:
        VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).validate(json.loads(completion.text))
