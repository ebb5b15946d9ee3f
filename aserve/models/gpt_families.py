"""What distinguishes the GPT-like families: config.json in, one frozen GPTConfig out.

The counterpart of families.py for gpt.py's layers: layer norms, biases, a plain MLP. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from aserve.errors import ConfigError
from aserve.models.families import RopeConfig, required, rope_config
from aserve.models.families import activation as gated_activation


class GPTNames(NamedTuple):
    """Where a checkpoint keeps each part. `layer` has the layer's number for {}."""

    embedding: str
    positions: str  # "" where positions are rotary
    final_norm: str
    head: str
    layer: str
    input_norm: str
    qkv: tuple[str, ...]
    output: str
    mlp_norm: str  # "" where the MLP reads the attention's norm
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """A GPT's shape and its family's choices.

    `parallel` adds attention and MLP of one input; else the MLP reads what attention gave. `stored` says how matrices
    lie in the checkpoint: "rows" as torch's Linear, "columns" as GPT-2's Conv1D, "heads" as GPT-NeoX's query, key and
    value, head by head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    context: int
    norm_eps: float
    activation: str
    tied: bool
    names: GPTNames
    rope: RopeConfig | None = None
    position_offset: int = 0  # of learned positions
    parallel: bool = False
    attention_bias: bool = True
    head_bias: bool = False
    stored: Literal["rows", "columns", "heads"] = "rows"

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_heads


_OPT = GPTNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
    layer="model.decoder.layers.{}.",
    input_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
)
_GPT2 = GPTNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    head="lm_head",
    layer="transformer.h.{}.",
    input_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
_PHI = GPTNames(
    embedding="model.embed_tokens",
    positions="",
    final_norm="model.final_layernorm",
    head="lm_head",
    layer="model.layers.{}.",
    input_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.dense",
    mlp_norm="",
    up="mlp.fc1",
    down="mlp.fc2",
)
_NEOX = GPTNames(
    embedding="gpt_neox.embed_in",
    positions="",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layer="gpt_neox.layers.{}.",
    input_norm="input_layernorm",
    qkv=("attention.query_key_value",),
    output="attention.dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def _activation(name: str) -> str:
    return "relu" if name == "relu" else gated_activation(name)


def _plain(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses a variant: a key that differs from the one value there is code for."""
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise ConfigError(f"config.json sets {key} to {config[key]!r}; there is code for {value!r}", param="model")


def _opt(config: Mapping[str, Any]) -> GPTConfig:
    hidden_size = required(config, "hidden_size")
    _plain(
        config,
        {
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "word_embed_proj_dim": hidden_size,
        },
    )
    return GPTConfig(
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required(config, "ffn_dim"),
        num_layers=required(config, "num_hidden_layers"),
        num_heads=required(config, "num_attention_heads"),
        context=required(config, "max_position_embeddings"),
        norm_eps=1e-5,
        activation=_activation(config.get("activation_function", "relu")),
        tied=config.get("tie_word_embeddings", True),
        names=_OPT,
        position_offset=2,
    )


def _gpt2(config: Mapping[str, Any]) -> GPTConfig:
    _plain(config, {"add_cross_attention": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False})
    hidden_size = required(config, "n_embd")
    return GPTConfig(
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.get("n_inner") or 4 * hidden_size,
        num_layers=required(config, "n_layer"),
        num_heads=required(config, "n_head"),
        context=required(config, "n_positions"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=_activation(config.get("activation_function", "gelu_new")),
        tied=config.get("tie_word_embeddings", True),
        names=_GPT2,
        stored="columns",
    )


def _phi(config: Mapping[str, Any]) -> GPTConfig:
    num_heads, hidden_size = required(config, "num_attention_heads"), required(config, "hidden_size")
    _plain(config, {"qk_layernorm": False})
    if (config.get("num_key_value_heads") or num_heads) != num_heads:
        raise ConfigError("config.json asks for Phi with fewer key-value heads, which has no code here", param="model")
    return GPTConfig(
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required(config, "intermediate_size"),
        num_layers=required(config, "num_hidden_layers"),
        num_heads=num_heads,
        context=required(config, "max_position_embeddings"),
        norm_eps=config.get("layer_norm_eps", 1e-5),
        activation=_activation(config.get("hidden_act", "gelu_new")),
        tied=config.get("tie_word_embeddings", False),
        names=_PHI,
        rope=rope_config({"partial_rotary_factor": 0.5} | dict(config), hidden_size // num_heads),
        parallel=True,
        head_bias=True,
    )


def _neox(config: Mapping[str, Any]) -> GPTConfig:
    num_heads, hidden_size = required(config, "num_attention_heads"), required(config, "hidden_size")
    rotary = {
        "partial_rotary_factor": config.get("rotary_pct", 0.25),
        "rope_theta": config.get("rotary_emb_base", 10_000.0),
    }
    return GPTConfig(
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required(config, "intermediate_size"),
        num_layers=required(config, "num_hidden_layers"),
        num_heads=num_heads,
        context=required(config, "max_position_embeddings"),
        norm_eps=config.get("layer_norm_eps", 1e-5),
        activation=_activation(config.get("hidden_act", "gelu")),
        tied=config.get("tie_word_embeddings", False),
        names=_NEOX,
        rope=rope_config(rotary | dict(config), hidden_size // num_heads),
        parallel=config.get("use_parallel_residual", True),
        attention_bias=config.get("attention_bias", True),
        stored="heads",
    )


GPT_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], GPTConfig]] = {
    "GPT2LMHeadModel": _gpt2,
    "GPTNeoXForCausalLM": _neox,
    "OPTForCausalLM": _opt,
    "PhiForCausalLM": _phi,
}
