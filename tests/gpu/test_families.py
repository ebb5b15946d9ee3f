"""Every native family on a CUDA device in float32 draws the CPU path's tokens: alone, batched, greedy and seeded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aserve.config import EngineConfig
from aserve.plan import Chunk
from aserve.request import SamplingParams
from aserve.worker.runner import ModelRunner
from tests.models_util import TINY, make_reference, resolved
from tests.tiny_model import BLOCK, Driver

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9)
PROMPTS = [tuple((i * 13 + j * 7) % 97 for j in range(3 + 5 * i)) for i in range(4)]


def load(directory: Path, device: str, dtype: str = "float32") -> ModelRunner:
    config = EngineConfig(
        device=device,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        block_size=BLOCK,
        num_gpu_blocks_override=40,
        max_num_seqs=8,
        num_threads=1,
        swap_space=0,
    )
    runner = ModelRunner(resolved(directory), config)
    runner.load()
    return runner


def batched(runner: ModelRunner, params: SamplingParams, count: int) -> list[list[int]]:
    """All prompts in one batch: the first prefilled alone, the others beside its decodes."""
    driver = Driver(runner)
    slots = [6, 1, 3, 4]
    updates = [
        driver.start(slot, len(p), params, seed=i)[0] for i, (slot, p) in enumerate(zip(slots, PROMPTS, strict=True))
    ]
    out = {slots[0]: driver.run(chunks=(Chunk(slots[0], 0, PROMPTS[0], (slots[0],)),), slots=(updates[0],)).tokens}
    chunks = tuple(Chunk(slot, 0, p, (slot,)) for slot, p in zip(slots[1:], PROMPTS[1:], strict=True))
    plan = driver.plan((slots[0],), chunks, tuple(updates[1:]))
    for slot, token in zip(plan.draws, runner.wait(runner.launch(plan)).tokens, strict=True):
        out.setdefault(slot, []).append(token)
    while min(map(len, out.values())) < count:
        for slot, token in zip(slots, driver.run(tuple(slots)).tokens, strict=True):
            out[slot].append(token)
    return [out[slot][:count] for slot in slots]


@pytest.fixture(scope="module", params=TINY)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_reference(request.param).save_pretrained(path)
    return path


def test_float32_tokens_equal_the_cpus(directory: Path) -> None:
    host, device = load(directory, "cpu"), load(directory, "cuda")
    for params in (GREEDY, SEEDED):
        want = [Driver(host).generate(0, p, params, 10, seed=i) for i, p in enumerate(PROMPTS)]
        assert [Driver(device).generate(5, p, params, 10, seed=i) for i, p in enumerate(PROMPTS)] == want
        assert batched(device, params, 10) == want


def test_bfloat16_logits_are_near_float32s(directory: Path) -> None:
    """Relative L2 error of the last position's logits, over one prompt."""
    found = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        runner = load(directory, device, dtype)
        model = runner.model
        seen: list[torch.Tensor] = []
        logits = model.logits
        model.logits = lambda hidden, logits=logits, seen=seen: seen.append(logits(hidden)) or seen[-1]  # type: ignore
        runner.graphs = None
        Driver(runner).generate(0, PROMPTS[3], GREEDY, 1)
        found[dtype] = seen[-1][0].double().cpu()
    error = (found["bfloat16"] - found["float32"]).norm() / found["float32"].norm()
    assert error < 6e-2  # three layers of weights ten times as large as a trained model's
