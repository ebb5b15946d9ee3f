"""Turns a GGUF model into a Hugging Face directory: config.json, model.safetensors in float32, the tokenizer.

cache.py calls `convert` once per file and keeps the result. Tensors are dequantized exactly and streamed to disk
by row ranges, so memory stays at a few chunks. The mapping undoes what llama.cpp's convert_hf_to_gguf.py did.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aserve.errors import ConfigError
from aserve.models.gguf import GGUFFile
from aserve.models.gguf_tokenizer import end_token_ids, write_tokenizer

_CHUNK_ELEMENTS = 4 << 20  # 16 MiB of float32 at a time and thread


@dataclass(frozen=True, slots=True)
class _Family:
    """What sets an architecture's GGUF apart from its Hugging Face checkpoint."""

    architecture: str
    model_type: str
    permuted: bool = False  # q and k rows are interleaved per head for llama.cpp's rotary
    norm_offset: float = 0.0  # added to norm weights in the GGUF
    names: dict[str, str] = field(default_factory=dict)
    config: Callable[[GGUFFile], dict[str, Any]] = lambda file: {}


_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gemma_config(file: GGUFFile, pattern: int) -> dict[str, Any]:
    """Layers alternate: every `pattern`th sees the whole context, the others the sliding window."""
    stated = file.get("attention.sliding_window_pattern", pattern)
    num_layers = file.get("block_count")
    sliding = stated if isinstance(stated, list) else [bool((index + 1) % stated) for index in range(num_layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.get("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sliding],
        "query_pre_attn_scalar": 256,
    }


def _gemma2_config(file: GGUFFile) -> dict[str, Any]:
    return _gemma_config(file, 2) | {
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        # the 27B alone scales by hidden size / heads instead of the head
        "query_pre_attn_scalar": 144 if file.get("block_count") == 46 else 256,
    }


def _gemma3_config(file: GGUFFile) -> dict[str, Any]:
    return _gemma_config(file, 6) | {
        "rope_local_base_freq": file.get("rope.freq_base_swa", 10000.0),
        # the 27B alone scales by hidden size / heads instead of the head
        "query_pre_attn_scalar": 168 if file.get("block_count") == 62 else 256,
    }


def _qwen2_config(file: GGUFFile) -> dict[str, Any]:
    return {"use_sliding_window": False}


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", permuted=True),
    "mistral": _Family("MistralForCausalLM", "mistral", permuted=True, config=lambda file: {"sliding_window": None}),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", config=_qwen2_config),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", config=_qwen2_config),
    "gemma2": _Family("Gemma2ForCausalLM", "gemma2", norm_offset=1.0, names=_FOUR_NORMS, config=_gemma2_config),
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", norm_offset=1.0, names=_FOUR_NORMS, config=_gemma3_config),
}


def convert(path: Path, target: Path, progress: Callable[[str], None] | None = None) -> None:
    """Writes the model at `path` into the existing directory `target`. Raises ConfigError for what it cannot map."""
    file = GGUFFile(path)
    family = _FAMILIES.get(file.architecture)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(f"{path} has architecture {file.architecture!r}; GGUF is read for {known}", param="model")
    report = progress or (lambda text: None)
    report("writing the tokenizer")
    write_tokenizer(file, target)
    config = _config(file, family)
    _write_json(target / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    _write_json(target / "generation_config.json", special | {"eos_token_id": end_token_ids(file)})
    report("dequantizing the weights")
    _write_tensors(file, family, config, target / "model.safetensors")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def _config(file: GGUFFile, family: _Family) -> dict[str, Any]:
    num_heads, hidden_size = file.get("attention.head_count"), file.get("embedding_length")
    if not isinstance(num_heads, int) or not isinstance(hidden_size, int):
        raise ConfigError(f"{file.path} does not state attention.head_count and embedding_length", param="model")
    head_dim = file.get("attention.key_length") or file.get("rope.dimension_count") or hidden_size // num_heads
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.get("feed_forward_length"),
        "num_hidden_layers": file.get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.get("context_length"),
        "rms_norm_eps": file.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
    }
    for key, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        config[f"{ours}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if (scaling := _rope_scaling(file)) is not None:
        config["rope_scaling"] = scaling
    return config | family.config(file)


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    """Scaled rotary embeddings. Llama 3's are stored as one divisor per frequency, which longrope can express."""
    original = file.get("rope.scaling.original_context_length", file.get("context_length"))
    if "rope_freqs.weight" in file.tensors:
        factors = file.values("rope_freqs.weight").tolist()
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }
    kind, factor = file.get("rope.scaling.type"), file.get("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return None


def _hf_name(name: str, family: _Family) -> str | None:
    """The checkpoint's name of a GGUF tensor; None for one that only feeds the config."""
    if name == "rope_freqs.weight":
        return None
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match name.split("."):
        case ["blk", layer, kind, leaf] if mapped := family.names.get(kind) or _NAMES.get(kind):
            return f"model.layers.{layer}.{mapped}.{leaf}"
    raise ConfigError(f"the GGUF holds a tensor {name!r} that {family.architecture} has no place for", param="model")


def _write_tensors(file: GGUFFile, family: _Family, config: dict[str, Any], target: Path) -> None:
    """One safetensors file (https://github.com/huggingface/safetensors#format), each range written at its place."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    end = 0
    for name, info in file.tensors.items():
        if (mapped := _hf_name(name, family)) is not None:
            places[name], start = end, end
            end += 4 * int(np.prod(info.shape, dtype=np.int64))
            header[mapped] = {"dtype": "F32", "shape": list(info.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    base = 8 + len(encoded)
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.pwrite(descriptor, struct.pack("<Q", len(encoded)) + encoded, 0)
        os.truncate(descriptor, base + end)

        def write(job: tuple[str, NDArray[np.uint8], int, float]) -> None:
            name, rows, offset, minus = job
            values = file.dequantize(name, rows)
            _pwrite_all(descriptor, values - np.float32(minus) if minus else values, base + offset)

        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(write, _jobs(file, family, config, places)):
                pass
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _jobs(
    file: GGUFFile, family: _Family, config: dict[str, Any], places: dict[str, int]
) -> Iterator[tuple[str, NDArray[np.uint8], int, float]]:
    """Row ranges to dequantize: (tensor, stored rows, byte offset of the result, constant to subtract)."""
    for name, offset in places.items():
        rows = file.rows(name)
        if family.permuted and ".attn_q." in name:
            rows = _unpermute(rows, file, name, config["num_attention_heads"])
        elif family.permuted and ".attn_k." in name:
            rows = _unpermute(rows, file, name, config["num_key_value_heads"])
        minus = family.norm_offset if name.endswith("norm.weight") else 0.0
        width = file.tensors[name].shape[-1]
        step = max(1, _CHUNK_ELEMENTS // width)
        for start in range(0, len(rows), step):
            yield name, rows[start : start + step], offset + 4 * start * width, minus


def _unpermute(rows: NDArray[np.uint8], file: GGUFFile, name: str, num_heads: int) -> NDArray[np.uint8]:
    """Puts each head's rows back as two halves. Rows are quantized one by one, so the stored bytes can move."""
    shape = rows.shape
    num_rows = file.tensors[name].shape[0]
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(shape)


def _pwrite_all(descriptor: int, values: NDArray[np.float32], offset: int) -> None:
    data = np.ascontiguousarray(values).data.cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
