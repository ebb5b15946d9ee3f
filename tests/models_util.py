"""Tiny random models of each family, made with transformers' own classes, and a paged memory to run ours in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from aserve.models import Model
from aserve.models.files import ModelFiles, resolve
from aserve.models.loader import load_model
from aserve_kernels import AttentionMeta, load

BLOCK_SIZE = 4

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}

# case -> (configuration class, what it sets beyond the shape)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama3": (
        "LlamaConfig",
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "tie_word_embeddings": True,
        },
    ),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "llama-linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("LlamaConfig", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-yarn": (
        "LlamaConfig",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "mistral-full": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2moe": (
        "Qwen2MoeConfig",
        _EXPERTS | {"num_experts": 5, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "qwen3moe": ("Qwen3MoeConfig", _EXPERTS | {"head_dim": 16, "num_experts": 6, "mlp_only_layers": [1]}),
    "qwen3moe-normalized": (
        "Qwen3MoeConfig",
        _EXPERTS | {"head_dim": 16, "num_experts": 6, "norm_topk_prob": True},
    ),
    "gemma2": ("Gemma2Config", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"sliding_window_pattern": 3}),
    "gemma3-linear": (
        "Gemma3TextConfig",
        GEMMA | {"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "opt": ("OPTConfig", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "opt-untied": ("OPTConfig", {"ffn_dim": 80, "word_embed_proj_dim": 48, "tie_word_embeddings": False}),
    "gpt2": ("GPT2Config", {"n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 4}),
    "gptneox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "gptneox-serial": ("GPTNeoXConfig", {"use_parallel_residual": False, "attention_bias": False}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-longrope": (
        "Phi3Config",
        {
            "sliding_window": 9,
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
            },
        },
    ),
}


def make_reference(case: str, **changes: Any) -> Any:
    """transformers' model of a case: random weights by a fixed seed, large enough that greedy draws have gaps."""
    class_name, options = TINY[case]
    config = getattr(transformers, class_name)(**(SHAPE | options | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(20)
    return randomize(transformers.AutoModelForCausalLM.from_config(config))


def randomize(model: Any) -> Any:
    """The model with weights large enough that greedy draws have gaps, float32, for inference."""
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.2)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def load_saved(directory: Path, **options: Any) -> Model:
    """Our model from a directory, float32 on the host."""
    return load_model(resolved(directory), dtype=torch.float32, device="cpu", kernels=load("torch"), **options)


def resolved(directory: Path, **options: Any) -> ModelFiles:
    """The files of a directory that has no tokenizer."""
    return resolve(str(directory), need_tokenizer=False, **options)


@dataclass(eq=False)
class PagedSequence:
    """A sequence's place in a PagedMemory: how many tokens are in its blocks."""

    blocks: list[int]
    length: int = 0


@dataclass(eq=False)
class PagedMemory:
    """KV pools for one model and a step over them. Blocks are handed out from the far end, alternating."""

    model: Model
    num_blocks: int = 160
    sequences: list[PagedSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.model.spec
        shape = (self.num_blocks + 1, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.caches = [
            (torch.zeros(shape, dtype=spec.dtype), torch.zeros(shape, dtype=spec.dtype)) for _ in range(spec.num_layers)
        ]
        self._free = [*range(0, self.num_blocks, 2), *range(1, self.num_blocks, 2)]

    def add(self, max_tokens: int = 80) -> PagedSequence:
        """A new sequence with room for max_tokens."""
        sequence = PagedSequence([self._free.pop() for _ in range(-(-max_tokens // BLOCK_SIZE))])
        self.sequences.append(sequence)
        return sequence

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[PagedSequence, Sequence[int]]], *, last_only: bool = False) -> list[Tensor]:
        """Appends tokens to each sequence; gives the logits [tokens, V] of each, in the order of `work`.
        `last_only` computes the head for the last token of each alone."""
        order = sorted(range(len(work)), key=lambda index: len(work[index][1]) != 1)  # decodes first
        positions: list[int] = []
        slots: list[int] = []
        token_ids: list[int] = []
        starts = [0]
        for index in order:
            sequence, tokens = work[index]
            for position in range(sequence.length, sequence.length + len(tokens)):
                positions.append(position)
                slots.append(sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            token_ids += tokens
            starts.append(len(token_ids))
            sequence.length += len(tokens)
        rows = [work[index][0] for index in order]
        width = max(len(row.blocks) for row in rows)
        meta = AttentionMeta(
            num_decodes=sum(len(work[index][1]) == 1 for index in order),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([row.length for row in rows], dtype=torch.int32),
            block_tables=torch.tensor(
                [row.blocks + [0] * (width - len(row.blocks)) for row in rows], dtype=torch.int32
            ),
            max_query_len=max(len(tokens) for _, tokens in work),
            max_seq_len=max(row.length for row in rows),
        )
        hidden = self.model.forward(torch.tensor(token_ids), meta, self.caches)
        if last_only:
            hidden = hidden[torch.tensor(starts[1:]) - 1]
            starts = list(range(len(work) + 1))
        logits = self.model.logits(hidden)
        out: list[Tensor] = [logits] * len(work)
        for place, index in enumerate(order):
            out[index] = logits[starts[place] : starts[place + 1]]
        return out
