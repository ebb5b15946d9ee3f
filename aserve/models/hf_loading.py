"""A causal model of transformers from a directory, ready for inference, aserve's attention in the place of its own.

hf.py serves what load_causal gives; loader.py asks class_of first. Code of a checkpoint's author is run only where the
user asked for it. Raises ConfigError, before weights are read where config.json tells.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aserve.errors import ConfigError
from aserve.models.checkpoint import Checkpoint, dtype_of
from aserve.models.families import architecture
from aserve.models.files import ModelFiles
from aserve.models.hf_attention import ATTENTION
from aserve.models.weights import check_complete, wrong_shape
from aserve_kernels.linear import PackedLinear, packs

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def class_of(config: Mapping[str, Any]) -> type[Any] | None:
    """transformers' causal model for a config.json: the class that it names, or for a name of its author's (as of
    "ExaoneForCausalLM", type "exaone") the one that transformers has for the type. None where there is none."""
    name, by_type, kind = architecture(config), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, str(config.get("model_type"))
    if name not in {each for entry in by_type.values() for each in _listed(entry)}:
        if kind not in by_type or name.removesuffix("ForCausalLM").lower() != kind.replace("_", "").replace("-", ""):
            return None
        name = _listed(by_type[kind])[0]
    found: type[Any] | None = getattr(transformers, name, None)
    return found


def _listed(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def refusal(name: str, reason: str) -> ConfigError:
    """That a class of transformers cannot be served, and why."""
    return ConfigError(f"{name} cannot be served through transformers: {reason}", param="model")


def first_line(error: BaseException) -> str:
    """What an error says, as one line."""
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__


def load_causal(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    dummy: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Any:
    """transformers' model on the device. `dummy` draws its weights by `seed`."""
    known = class_of(files.config)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION}
    trusted = trust_remote_code and known is None
    if known is None:
        known, options = transformers.AutoModelForCausalLM, options | {"trust_remote_code": trusted}
    try:
        config = transformers.AutoConfig.from_pretrained(  # nosec B615 # a directory
            files.directory, local_files_only=True, trust_remote_code=trusted
        )
        _check_class(known, architecture(files.config), config)
        if dummy:
            make = getattr(known, "_from_config", None) or known.from_config
            with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
                torch.manual_seed(seed)
                causal = make(config, **options)
        else:
            with _quiet():
                _check_stored(files, known, config)
                causal, info = known.from_pretrained(  # nosec B615 # a directory
                    files.directory,
                    config=config,
                    use_safetensors=files.load_format != "pickle",
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # told below, by name
                    **options,
                )
            for tensor, stored, asked in info["mismatched_keys"]:
                raise wrong_shape(tensor, tuple(stored), tuple(asked))
            check_complete(missing=info["missing_keys"], unused=info["unexpected_keys"])
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config or a checkpoint may be wrong in any way
        if isinstance(error, KeyError) and error.args == (ATTENTION,):  # looked up among the model's own kinds
            raise refusal(architecture(files.config), "its attention is code of its own") from error
        raise ConfigError(f"transformers cannot load {files.directory}: {first_line(error)}", param="model") from error
    causal = causal.to(device).eval().requires_grad_(False)
    _pack_linears(causal)
    return causal


def _check_stored(files: ModelFiles, known: type[Any], config: Any) -> None:
    """Raises ConfigError for weights that are no floating-point numbers, which transformers would take as they are, and
    for a model much larger than its files: it would draw the rest at random, and memory may not hold that."""
    if files.load_format != "safetensors":
        return
    tensors = Checkpoint(files.weights).tensors
    for name, stored in tensors.items():
        if name.endswith("weight"):
            dtype_of(name, stored)
    if not hasattr(known, "_from_config"):
        return
    with torch.device("meta"):
        asked = sum(parameter.numel() for parameter in known._from_config(config).parameters())
    held = sum(math.prod(stored.shape) for stored in tensors.values())
    if asked > 2 * held:
        raise ConfigError(
            f"config.json describes a model of {asked} numbers, and the checkpoint holds {held}", param="model"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, transformers reports nothing but its progress, and that only to a terminal."""
    log, verbosity = transformers.logging, transformers.logging.get_verbosity()
    shown = log.is_progress_bar_enabled()
    log.set_verbosity_error()
    if shown and not sys.stderr.isatty():
        log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if shown:
            log.enable_progress_bar()


def _check_class(known: type[Any], name: str, config: Any) -> None:
    """Raises ConfigError for what a class and its config.json tell of a model that cannot be served."""
    goes_with = _listed(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ()))
    expected = getattr(known, "config_class", None)
    if expected is not None and not isinstance(config, expected) and known.__name__ not in goes_with:
        raise refusal(name, f"its config.json has the numbers of another model, {config.model_type}")
    text = config.get_text_config(decoder=True)
    if strange := sorted({*(getattr(text, "layer_types", None) or ())} - _LAYER_TYPES):
        raise refusal(name, f"it has layers of type {strange[0]}")
    replaceable = getattr(known, "_can_set_attn_implementation", lambda: True)
    if not getattr(known, "_supports_attention_backend", False) and not replaceable():
        raise refusal(name, "its attention is code of its own")
    if getattr(text, "attn_temperature_tuning", False):  # Llama 4's, which counts the positions of a batch
        raise refusal(name, "it scales attention by positions that it counts itself")


class _Packed(nn.Module):
    """A linear layer whose weight is laid out for the processor."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._linear = PackedLinear(linear.weight, linear.bias)

    @property
    def weight(self) -> Tensor:
        """The plain weight, unpacked for modelling code that looks at it."""
        packed = self._linear.packed
        assert packed is not None
        plain: Tensor = packed.to_dense()
        return plain

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)


def _pack_linears(module: nn.Module) -> None:
    """Packs each linear layer in place, one after the other, so that no two copies of the weights are in memory."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and packs(child.weight):
            setattr(module, name, _Packed(child))
        else:
            _pack_linears(child)
