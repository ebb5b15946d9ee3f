"""Faults of a device under a real runner: no memory for a step is got over, an illegal access ends the engine.

The CPU's twin of the first raises the same error by hand. The second poisons the CUDA context of its process, so it has
one of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from aserve.config import EngineConfig
from aserve.engine import Engine
from aserve.errors import EngineDeadError
from aserve.executors.thread import ThreadExecutor
from aserve.models import KVCache
from aserve.request import SamplingParams
from aserve.worker.runner import ModelRunner
from aserve_kernels import AttentionMeta, Kernels
from tests.tiny_model import VOCAB, Files, TinyModel

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [tuple((i * 7 + j * 3) % VOCAB for j in range(9)) for i in range(3)]
ROOT = Path(__file__).resolve().parents[2]


class Troubled(TinyModel):
    """Does what `trouble` says, once, in its next step."""

    trouble: str | None = None

    def forward(self, token_ids: Tensor, meta: AttentionMeta, caches: list[KVCache]) -> Tensor:
        trouble, self.trouble = self.trouble, None
        if trouble == "memory" and token_ids.is_cuda:
            torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device=token_ids.device)
        elif trouble == "memory":
            raise torch.cuda.OutOfMemoryError("no memory")
        elif trouble == "access":
            self.embed[token_ids + (1 << 30)].sum()
        return super().forward(token_ids, meta, caches)


def troubled(device: str) -> tuple[Engine, list[Troubled]]:
    """An engine over the small model, which it makes when it starts."""
    made: list[Troubled] = []
    config = EngineConfig(
        model="tiny",
        dtype="float32",
        device=device,  # type: ignore[arg-type]
        block_size=4,
        num_gpu_blocks_override=64,
        max_num_seqs=8,
        num_threads=1,
        enforce_eager=True,
        step_timeout=20.0,
    )

    def load_model(files: Any, *, dtype: torch.dtype, device: torch.device, kernels: Kernels, **_: Any) -> Troubled:
        made.append(Troubled(kernels, dtype, device))
        return made[0]

    def make() -> ModelRunner:
        return ModelRunner(Files(), config, load_model=load_model)  # type: ignore[arg-type]

    return Engine(config, executor=ThreadExecutor(make)), made


async def tokens(engine: Engine) -> list[tuple[int, ...]]:
    """What each prompt gives, all of them at once."""
    streams = [await engine.submit(prompt, PARAMS) for prompt in PROMPTS]
    return [(await stream.completions())[0].token_ids for stream in streams]


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", ["cpu", CUDA])
async def test_a_step_that_has_no_memory_is_got_over(device: str) -> None:
    engine, made = troubled(device)
    async with engine:
        undisturbed = await tokens(engine)
        streams = [await engine.submit(prompt, PARAMS) for prompt in PROMPTS]
        before = engine._scheduler.max_num_batched_tokens
        with anyio.fail_after(5):
            await anext(streams[0])
            made[0].trouble = "memory"
            rest = [await stream.completions() for stream in streams]
        assert [completion[0].token_ids[-30:] for completion in rest] == [ids[-30:] for ids in undisturbed]
        assert made[0].trouble is None
        assert engine.metrics.num_failed_steps == 1
        assert engine._scheduler.max_num_batched_tokens < before
        engine.check()


async def poisoned() -> None:
    """Every stream ends with the error within seconds, and so does every later call."""
    engine, made = troubled("cuda")
    async with engine:
        streams = [await engine.submit(prompt, PARAMS) for prompt in PROMPTS]
        await anext(streams[0])
        made[0].trouble = "access"
        with anyio.fail_after(5):
            for stream in streams:
                try:
                    await stream.completions()
                except EngineDeadError as error:
                    print("ended by", str(error).splitlines()[0], flush=True)
            try:
                await engine.submit(PROMPTS[0], PARAMS)
            except EngineDeadError:
                print("refused", flush=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_an_illegal_access_ends_the_engine_within_seconds() -> None:
    code = "import anyio; from tests.gpu.test_faults import poisoned; anyio.run(poisoned)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.count("ended by") == len(PROMPTS), done.stdout + done.stderr[:2000]
    assert "refused" in done.stdout, done.stdout + done.stderr[:2000]
