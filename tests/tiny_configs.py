"""A tiny configuration of any causal model that transformers knows: its class's defaults, shrunk by the keys' names."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

VOCAB_SIZE = 199
_SMALL = {
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim lru_width",
    4: """
        num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_hidden_layers
        n_layer n_layers num_layers zero_expert_num""",
    16: """
        head_dim kv_channels qk_nope_head_dim attention_chunk_size floor_scale index_head_dim block_size
        mamba_d_head mamba_d_state o_lora_rank router_hidden_size shape_embed_dim pronunciation_embed_dim""",
    256: "max_position_embeddings n_positions n_ctx max_seq_len original_max_position_embeddings",
    96: """
        intermediate_size ffn_dim dff ffn_hidden_size dense_intermediate_size intermediate_size_mlp
        encoder_ffn_dim decoder_ffn_dim""",
    32: "moe_intermediate_size expert_ffn_hidden_size dim_model_base global_head_dim",
    40: "shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size",
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    9: "sliding_window attention_window_size local_attention keep_window_size",
    8: """
        num_experts n_routed_experts num_local_experts moe_num_experts qk_rope_head_dim rotary_dim index_topk
        index_block_size hidden_size_per_layer_input laurel_rank mamba_n_heads gated_norm_rank""",
    2: """
        num_experts_per_tok moe_k moe_topk n_group index_n_heads index_topk_blocks encoder_layers
        decoder_layers num_kv_shared_layers global_attn_every_n_layers eos_token_id sliding_window_pattern
        _sliding_window_pattern no_rope_layer_interval num_layers_per_stack n_recurrent_layers o_groups""",
    1: """
        n_shared_experts num_shared_experts moe_num_shared_experts topk_group first_k_dense_replace
        num_dense_layers max_window_layers n_input_layers n_output_layers bos_token_id
        num_global_key_value_heads""",
    0: "pad_token_id",
    24: "q_lora_rank qk_head_dim",
    20: "kv_lora_rank query_pre_attn_scalar",
    12: "v_head_dim",
    3: "cls_token_id sep_token_id eod_token_id moe_layer_end_index",
}
_SIZES = {name: size for size, names in _SMALL.items() for name in names.split()}
_OFF_AT_0 = {"n_group", "num_kv_shared_layers", "num_shared_experts", "n_shared_experts", "shared_intermediate_size"}
_OFF_AT_0 |= {"shared_expert_intermediate_size", "sliding_window", "num_nextn_predict_layers"}
_DECODER: dict[str, Any] = {"is_decoder": True}
_LATENT: dict[str, Any] = {"head_dim": 8}  # of what rotates
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
_LOCAL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# what a model needs beyond its defaults, and settings that would show a mistake
_OWN: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "camembert": _DECODER,
    "cohere_compass_text": _LOCAL
    | {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE | {"rope_theta": 1000.0}}},
    "data2vec-text": _DECODER,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "dots1": {"n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "electra": _DECODER,
    "ernie": _DECODER,
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_expand": 2},
    "granitemoehybrid": {"layer_types": ["attention"] * 4},
    "hrm_text": {"num_hidden_layers": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "longcat_flash": _LATENT,
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral": _LOCAL | {"head_dim": 16},
    "ministral3": {
        "rope_parameters": _ROPE
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
        | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    },
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "phimoe": {
        "rope_parameters": _ROPE
        | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        | {"original_max_position_embeddings": 128, "short_mscale": 1.1, "long_mscale": 1.2}
    },
    "reformer": _DECODER | {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32], "feed_forward_size": 96},
    "xmod": _DECODER | {"default_language": "en_XX", "languages": ["en_XX"]},
    "youtu": _LATENT,
    "zaya": {"num_experts_per_tok": 1},
}
_OWN |= dict.fromkeys(("big_bird", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm"), _DECODER)
_OWN |= dict.fromkeys(("roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl"), _DECODER)


def tiny_config(model_type: str) -> Any:
    """A configuration of the type with four small layers, of every kind that its default layers have."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_shrunk(kind(), model_type))


def _shrunk(full: Any, model_type: str) -> dict[str, Any]:
    stated: dict[str, Any] = full.to_dict()
    sections = getattr(type(full), "sub_configs", None) or {}
    small = _by_layer(full, stated)
    for key, value in stated.items():
        if key in sections or key in small or isinstance(value, bool):
            continue
        if key == "eos_token_id" or (isinstance(value, int) and key in _SIZES and (value or key not in _OFF_AT_0)):
            small[key] = _SIZES[key]
    heads, shared = stated.get("num_attention_heads"), stated.get("num_key_value_heads")
    if isinstance(shared, int):
        small["num_key_value_heads"] = 4 if shared == heads else min(shared, 2)
    if stated.get("n_group") == 1:
        small["n_group"] = 1
    for key in ("bos_token_id", "pad_token_id"):
        if key in stated:
            small[key] = _SIZES[key]
    for key in sections:
        if isinstance(stated.get(key), dict):
            small[key] = _shrunk(getattr(full, key), f"{model_type}.{key}")
            if "model_type" in stated[key]:
                small[key]["model_type"] = stated[key]["model_type"]
    return small | _OWN.get(model_type, {})


def _by_layer(full: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """The lists with a value for each layer, cut to four layers, the first of each kind among them."""
    count = getattr(full, "num_hidden_layers", None)
    lists = {key: value for key, value in stated.items() if isinstance(value, list) and len(value) == count}
    if not lists:
        return {}
    kinds = [repr(row) for row in zip(*lists.values(), strict=True)]
    firsts = sorted({kinds.index(kind) for kind in kinds})[:4]
    chosen = sorted([*firsts, *(index for index in range(len(kinds)) if index not in firsts)][:4])
    return {
        key: [_SIZES[key] if key in _SIZES and type(value[index]) is int else value[index] for index in chosen]
        for key, value in lists.items()
    }
