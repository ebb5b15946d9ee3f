"""Builds the model that config.json names, from its checkpoint or with random weights.

The runner calls load_model once on the model thread. Knows which class serves which architecture; the classes know
nothing of files. Raises ConfigError before anything is allocated where the model cannot be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aserve.config import ModelImpl
from aserve.errors import ConfigError
from aserve.models import Model
from aserve.models.decoder import Decoder
from aserve.models.families import FAMILIES, DecoderConfig, architecture
from aserve.models.files import ModelFiles
from aserve.models.gpt import GPT
from aserve.models.gpt_families import GPT_FAMILIES
from aserve.models.weights import CheckpointWeights, DummyWeights, Weights
from aserve_kernels import Kernels

_MODEL_TYPES = {  # the type that goes with an architecture's name
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    load_format: str | None = None,
    seed: int = 0,
    max_positions: int | None = None,
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
) -> Model:
    """The model, on `device` in `dtype`.

    `load_format` "dummy" (default: as the files were resolved) draws random weights by `seed`; `max_positions` bounds
    its tables to the contexts that will be served; `model_impl` "auto" takes transformers' code for what has no
    decoder here, and with `trust_remote_code` the checkpoint's own for what transformers does not know.
    """
    native = _is_native(files, model_impl, trust_remote_code)
    device = torch.device(device)
    dummy = load_format == "dummy" or files.load_format == "dummy"
    if not native:
        from aserve.models.hf import TransformersModel

        return TransformersModel(
            files,
            dtype=dtype,
            device=device,
            kernels=kernels,
            dummy=dummy,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
    name = architecture(files.config)
    try:
        family = FAMILIES[name](files.config) if name in FAMILIES else GPT_FAMILIES[name](files.config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"config.json has no {name}'s numbers ({reason})", param="model") from error
    weights: Weights
    if dummy:
        weights = DummyWeights(device=device, dtype=dtype, seed=seed)
    else:
        pickled = files.load_format == "pickle"
        weights = CheckpointWeights(files.weights, device=device, dtype=dtype, pickled=pickled)
    model: Model
    try:
        if isinstance(family, DecoderConfig):
            model = Decoder(family, weights, kernels, max_positions=max_positions)
        else:
            model = GPT(family, weights, kernels, max_positions=max_positions)
        weights.finish()
    finally:
        weights.close()
    return model


def native_architectures() -> list[str]:
    """The names, as config.json spells them, that have a decoder here."""
    return sorted([*FAMILIES, *GPT_FAMILIES])


def _is_native(files: ModelFiles, model_impl: ModelImpl, trust_remote_code: bool) -> bool:
    """Which code serves the model. Raises ConfigError, naming what is known, where none does."""
    if (quantized := files.config.get("quantization_config")) is not None:
        kind = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"{files.directory} is quantized ({kind}), which is not read: use the unquantized model or its GGUF",
            param="model",
        )
    name = architecture(files.config)
    if model_impl != "transformers" and _has_decoder(files.config):
        return True
    known = f"native: {', '.join(native_architectures())}"
    if model_impl == "native":
        raise ConfigError(f"{files.directory} is a {name}, which has no decoder here; {known}", param="model")
    from aserve.models.hf_loading import class_of  # imports all of transformers' models

    if class_of(files.config) is not None:
        return False
    if "auto_map" in files.config:
        if trust_remote_code:
            return False
        raise ConfigError(
            f"{files.directory} is a {name}, which runs by Python files of its own: read them, then give "
            "--trust-remote-code",
            param="trust_remote_code",
        )
    raise ConfigError(
        f"{files.directory} is a {name}, which neither aserve nor its attention in transformers can run; {known}",
        param="model",
    )


def _has_decoder(config: Mapping[str, Any]) -> bool:
    """True where the architecture has a decoder here, and means the same by it: some models use Llama's class in
    transformers with numbers of other names."""
    name = architecture(config)
    if name not in FAMILIES and name not in GPT_FAMILIES:
        return False
    return bool(config.get("model_type", _MODEL_TYPES[name]) == _MODEL_TYPES[name])
