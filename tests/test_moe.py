"""Experts: the ways to compute them agree, whatever the tokens' experts are."""

from __future__ import annotations

import pytest
import torch

from aserve.models.families import FAMILIES, DecoderConfig
from aserve.models.moe import MoE
from aserve.models.weights import DummyWeights
from aserve_kernels import load

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}


def make(config: DecoderConfig, grouped: bool) -> MoE:
    assert config.experts is not None
    weights = DummyWeights(device=torch.device("cpu"), dtype=torch.float32, seed=4)
    moe = MoE(config, config.experts, "mlp", weights, load("torch"), grouped=grouped)
    for value in (moe._router, *([moe._shared_gate] if config.experts.shared_size else [])):
        value.mul_(5)  # spreads the shares
    return moe


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_every_way_to_compute_the_experts_agrees(num_tokens: int) -> None:
    moe = make(FAMILIES["Qwen3MoeForCausalLM"](SHAPE), grouped=True)
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1))
    shares, chosen = moe.route(x)
    by_mask = moe.by_mask(x, shares, chosen)
    assert by_mask.abs().max() > 0
    torch.testing.assert_close(moe.by_group(x, shares, chosen), by_mask, atol=1e-6, rtol=1e-5)


def test_a_token_is_computed_alike_alone_and_among_others() -> None:
    moe = make(FAMILIES["Qwen2MoeForCausalLM"](SHAPE), grouped=False)
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    together = moe(x)
    alone = torch.cat([moe(row.unsqueeze(0)) for row in x])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_shares_sum_to_one_where_the_model_says_so() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    plain = make(FAMILIES["Qwen3MoeForCausalLM"](SHAPE), grouped=False).route(x)[0].sum(dim=1)
    normalized = make(FAMILIES["Qwen3MoeForCausalLM"](SHAPE | {"norm_topk_prob": True}), grouped=False).route(x)[0]
    assert (plain < 0.999).all()
    torch.testing.assert_close(normalized.sum(dim=1), torch.ones(5))
