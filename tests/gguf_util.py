"""Writes GGUF files of tiny models with the gguf package, as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TWO_NORMS = {"post_attention_layernorm": "ffn_norm"}
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PIECES = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += [
    "\u2581",
    *"abcdehlnortw",
    "he",
    "ll",
    "hell",
    "hello",
    "\u2581w",
    "or",
    "\u2581wor",
    "ld",
    "\u2581world",
    "\u2581hello",
]


def gguf_name(name: str, norms: dict[str, str]) -> str:
    stem, leaf = name.rsplit(".", 1)
    if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem):
        return f"blk.{layer[1]}.{(NAMES | norms)[layer[2]]}.{leaf}"
    return f"{NAMES[stem]}.{leaf}"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Llama's query and key rows."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    reference: Any,
    architecture: str,
    *,
    quantize: bool = False,
    num_files: int = 1,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    extra_strings: Mapping[str, str] | None = None,
) -> None:
    """A GGUF of transformers' model `reference`, as llama.cpp's converter would write it."""
    config = reference.config
    num_tensors = len(reference.state_dict())
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=-(-num_tensors // num_files) if num_files > 1 else 0)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
    if architecture.startswith("gemma"):
        writer.add_rope_freq_base(1_000_000.0 if architecture == "gemma3" else 10_000.0)
        writer.add_sliding_window(config.sliding_window)
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_array(f"{architecture}.attention.sliding_window_pattern", kinds)
    else:
        writer.add_rope_freq_base(10_000.0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_sentencepiece(writer)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture.startswith("gemma") and "norm" in name:
            values = values + np.float32(1)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, config.num_attention_heads if "q_" in name else config.num_key_value_heads)
        name = gguf_name(name, FOUR_NORMS if architecture.startswith("gemma") else TWO_NORMS)
        if quantize and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    for key, value in (extra_strings or {}).items():
        writer.add_string(key, value)
    writer.write_header_to_file(path if num_files == 1 else path.with_name("tiny.gguf"))
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sentencepiece(writer: gguf.GGUFWriter, control: Sequence[str] = ()) -> None:
    """A small SentencePiece vocabulary with byte fallback, as Llama's."""
    pieces = [*PIECES, *control]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([float(-index) for index in range(len(pieces))])
    writer.add_token_types([3] * 3 + [2] + [6] * 256 + [1] * (len(PIECES) - 260) + [3] * len(control))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
