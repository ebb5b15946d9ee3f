"""Memory while loading: no more than the weights, a tenth, and one tensor, whatever dtype the checkpoint has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_loading_takes_the_weights_and_little_more(stored: torch.dtype, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=16_000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        max_position_embeddings=4096,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(stored)
    model.save_pretrained(tmp_path)
    weights = 2 * sum(tensor.numel() for tensor in model.parameters())
    largest = 2 * max(tensor.numel() for tensor in model.parameters())
    del model
    done = subprocess.run(
        [sys.executable, "docs/benchmarks/load_rate.py", str(tmp_path), "--once", "--dtype", "bfloat16"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    grown = json.loads(done.stdout)["anonymous_peak"]
    assert weights // 2 < grown < 1.1 * weights + largest
