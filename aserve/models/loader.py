"""Builds the model that config.json names, from its checkpoint or with random weights.

The runner calls load_model once on the model thread. Knows which class serves which architecture; the classes know
nothing of files. Raises ConfigError before anything is allocated where the model cannot be served.
"""

from __future__ import annotations

import torch

from aserve.errors import ConfigError
from aserve.models import Model
from aserve.models.decoder import Decoder
from aserve.models.families import FAMILIES, architecture
from aserve.models.files import ModelFiles
from aserve.models.gpt import GPT
from aserve.models.gpt_families import GPT_FAMILIES
from aserve.models.weights import CheckpointWeights, DummyWeights, Weights
from aserve_kernels import Kernels


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    load_format: str | None = None,
    seed: int = 0,
    max_positions: int | None = None,
) -> Model:
    """The model, on `device` in `dtype`. `load_format` "dummy" (default: as the files were resolved) draws random
    weights by `seed`; `max_positions` bounds its tables to the contexts that will be served."""
    check_supported(files)
    device = torch.device(device)
    weights: Weights
    if load_format == "dummy" or files.load_format == "dummy":
        weights = DummyWeights(device=device, dtype=dtype, seed=seed)
    else:
        weights = CheckpointWeights(files.weights, device=device, dtype=dtype)
    model: Model
    name = architecture(files.config)
    if name in FAMILIES:
        model = Decoder(FAMILIES[name](files.config), weights, kernels, max_positions=max_positions)
    else:
        model = GPT(GPT_FAMILIES[name](files.config), weights, kernels, max_positions=max_positions)
    weights.finish()
    return model


def supported_architectures() -> list[str]:
    """The names, as config.json spells them, that load_model takes."""
    return sorted([*FAMILIES, *GPT_FAMILIES])


def check_supported(files: ModelFiles) -> None:
    """Raises ConfigError, naming what is known, for a model that load_model would refuse."""
    name = architecture(files.config)
    if name not in FAMILIES and name not in GPT_FAMILIES:
        known = ", ".join(supported_architectures())
        raise ConfigError(f"{files.directory} is a {name}, which is not supported; supported: {known}", param="model")
    if (quantized := files.config.get("quantization_config")) is not None:
        kind = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"{files.directory} is quantized ({kind}), which is not read: use the unquantized model or its GGUF",
            param="model",
        )
