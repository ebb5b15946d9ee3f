"""A model of Llama 3.1 8B's shape in bfloat16 on a CUDA device, against the same weights computed in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import aserve_kernels
from aserve.models.decoder import Decoder
from aserve.models.families import FAMILIES
from aserve.models.weights import DummyWeights
from aserve_kernels import AttentionMeta, Kernels

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


class Widened(DummyWeights):
    """The bfloat16 numbers, in float32."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device, dtype=torch.float32, seed=0)

    def _normal(self, *shape: int) -> Tensor:
        self.dtype = torch.bfloat16
        drawn = super()._normal(*shape)
        self.dtype = torch.float32
        return drawn.float()


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


@pytest.mark.timeout(300)
def test_bfloat16_logits_of_an_8b_model_are_near_float32s() -> None:
    device = torch.device("cuda")
    config = FAMILIES["LlamaForCausalLM"](LLAMA_8B)
    token_ids = torch.randint(0, config.vocab_size, (PROMPT,), device=device)

    def build(weights: DummyWeights, kernels: Kernels) -> Decoder:
        return Decoder(config, weights, kernels, max_positions=PROMPT)

    with torch.inference_mode():
        model = build(Widened(device), aserve_kernels.load("torch"))
        wanted = logits_of(model, token_ids, decode_last=False)
        del model
        torch.cuda.empty_cache()
        weights = DummyWeights(device=device, dtype=torch.bfloat16, seed=0)
        found = logits_of(build(weights, aserve_kernels.load("triton")), token_ids, decode_last=True)
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert torch.isfinite(errors).all()
    assert errors.max() < 2e-2, (
        f"relative errors: mean {errors.mean():.2e}, last {errors[-1]:.2e}, most {errors.max():.2e}"
    )
    print(f"relative errors: mean {errors.mean():.2e}, last {errors[-1]:.2e}, most {errors.max():.2e}")
