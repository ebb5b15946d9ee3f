"""A model of Llama 3.1 8B's shape in bfloat16 on a CUDA device, against the same weights computed in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

import aserve_kernels
from aserve.models.decoder import Decoder
from aserve.models.families import FAMILIES
from aserve.models.weights import Arrange, DummyWeights
from aserve_kernels import AttentionMeta

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
PROMPT, BLOCK = 96, 16


class Trained(DummyWeights):
    """Random bfloat16 numbers at the scales of GPT-2's initialization: products keep their input's size, and what the
    layers add is scaled by 1 / sqrt(2 layers). In bfloat16, or the same numbers in `dtype`.

    (With a standard deviation of 0.02 throughout, any bfloat16 program is 5e-2 off here, torch's own too.)
    """

    def _normal(self, *shape: int) -> Tensor:
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return drawn.normal_(generator=self._generator).to(self.dtype)

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int, arrange: Arrange | None = None) -> Tensor:
        added = names[0].endswith(("o_proj.weight", "down_proj.weight"))
        scale = 2.0 ** -round(math.log2(columns) / 2) * (0.125 if added else 1.0)  # exact in any dtype
        return super().matrix(names, rows, columns).mul_(scale)


def logits_of(model: Decoder, token_ids: Tensor, decode_last: bool) -> Tensor:
    """Logits [PROMPT, V] by one chunk, or by a chunk and then a decode step for the last token."""
    spec, device = model.spec, token_ids.device
    pages = -(-PROMPT // BLOCK)
    shape = (pages + 1, BLOCK, spec.num_kv_heads, spec.head_dim)
    caches = [(torch.zeros(shape, dtype=spec.dtype, device=device),) * 2 for _ in range(spec.num_layers)]
    caches = [(key, value.clone()) for key, value in caches]
    parts = []
    for start, end in ((0, PROMPT - 1), (PROMPT - 1, PROMPT)) if decode_last else ((0, PROMPT),):
        at = torch.arange(start, end, device=device)
        meta = AttentionMeta(
            num_decodes=int(end - start == 1),
            positions=at,
            slot_mapping=at,
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
            block_tables=torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0),
            max_query_len=end - start,
            max_seq_len=PROMPT,
        )
        parts.append(model.logits(model.forward(token_ids[start:end], meta, caches)))
    return torch.cat(parts).float()


def errors_of(found: Tensor, wanted: Tensor) -> Tensor:
    """Relative L2 error of each position's logits."""
    return (found - wanted).norm(dim=1) / wanted.norm(dim=1)


@pytest.mark.timeout(300)
def test_bfloat16_logits_of_an_8b_model_are_near_float32s() -> None:
    device = torch.device("cuda")
    config = FAMILIES["LlamaForCausalLM"](LLAMA_8B)
    token_ids = torch.randint(0, config.vocab_size, (PROMPT,), device=device)

    def logits(dtype: torch.dtype, backend: Literal["torch", "triton"], decode_last: bool) -> Tensor:
        weights = Trained(device=device, dtype=dtype, seed=0)
        model = Decoder(config, weights, aserve_kernels.load(backend), max_positions=PROMPT)
        out = logits_of(model, token_ids, decode_last)
        del model
        torch.cuda.empty_cache()
        return out

    with torch.inference_mode():
        wanted = logits(torch.float32, "torch", decode_last=False)
        errors = errors_of(logits(torch.bfloat16, "triton", decode_last=True), wanted)
        plain = errors_of(logits(torch.bfloat16, "torch", decode_last=False), wanted)
    print(f"relative errors: mean {errors.mean():.2e}, most {errors.max():.2e}; torch's {plain.mean():.2e}")
    assert errors.max() < 2e-2
    assert errors.mean() < 1.25 * plain.mean()
