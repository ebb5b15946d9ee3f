"""Any causal model of transformers over paged memory: its own modelling code, with our attention in place of its.

loader.py takes it for architectures that have no native decoder. A model qualifies if every layer calls transformers'
attention interface once, causally, with keys and values of one shape; a probe at load finds out, so that a model that
does not qualify is refused before it serves. Code of a checkpoint's author is run only where the user asked for it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aserve.errors import ConfigError
from aserve.models import KVCache, ModelSpec
from aserve.models.families import architecture
from aserve.models.files import ModelFiles
from aserve_kernels import AttentionMeta, Kernels
from aserve_kernels.linear import PackedLinear, packs

_ATTENTION = "aserve_paged"


@dataclass(slots=True)
class _Probe:
    """What the layers ask of attention: per layer the shape of keys and values, and why it cannot be served."""

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_heads: int = 0
    refusal: str | None = None


class _Step(NamedTuple):
    """What the attention of the step in progress works on; a probe instead while a model is looked at."""

    kernels: Kernels
    meta: AttentionMeta | None
    caches: list[KVCache]
    probe: _Probe | None = None


_step: ContextVar[_Step] = ContextVar("aserve_step")  # one per thread: engines in one process do not mix


def supports(architecture: str) -> bool:
    """True where transformers has a causal model of this name whose attention can be replaced."""
    names = {name for entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _listed(entry)}
    return architecture in names and bool(
        getattr(getattr(transformers, architecture, None), "_supports_attention_backend", False)
    )


def _listed(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


class TransformersModel:
    """models.Model over a transformers causal model. Raises ConfigError where the model cannot be served so."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        dummy: bool = False,
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        self._kernels = kernels
        known = supports(architecture(files.config))
        causal = _load(files, dtype, device, dummy, seed, trust_remote_code and not known)
        prefix = causal.base_model_prefix
        self._base = getattr(causal, prefix)
        setattr(causal, prefix, _Given())  # what is left of the causal model turns hidden states into logits
        self._causal = causal
        self.spec = self._probed(dtype, device)

    def forward(self, token_ids: Tensor, meta: AttentionMeta, caches: list[KVCache]) -> Tensor:
        """Final hidden states [T, H]: the step's tokens go through as one sequence, which only attention could tell."""
        return self._hidden(token_ids, meta.positions, _Step(self._kernels, meta, caches))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, V] of hidden [S, H], scaled and capped as the model's own code does."""
        logits: Tensor = self._causal(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits

    def _hidden(self, token_ids: Tensor, positions: Tensor, step: _Step) -> Tensor:
        token = _step.set(step)
        try:
            output = self._base(input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        finally:
            _step.reset(token)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _probed(self, dtype: torch.dtype, device: torch.device) -> ModelSpec:
        """The numbers the runner needs, from one token's way through the model."""
        config, probe = self._causal.config.get_text_config(), _Probe()
        name = type(self._causal).__name__
        try:
            place = torch.zeros(1, dtype=torch.int64, device=device)
            with torch.inference_mode():
                hidden = self._hidden(place, place, _Step(self._kernels, None, [], probe))
                vocab_size = self.logits(hidden).shape[-1]
        except Exception as error:  # whatever the model's own code raises
            raise ConfigError(f"{name} cannot be served through transformers: {error}", param="model") from error
        shapes = set(probe.shapes.values())
        if probe.refusal is None and sorted(probe.shapes) != list(range(config.num_hidden_layers)):
            probe.refusal = f"{len(probe.shapes)} of its {config.num_hidden_layers} layers attend"
        if probe.refusal is None and len(shapes) != 1:
            probe.refusal = f"its layers have keys of different shapes: {sorted(shapes)}"
        if probe.refusal is None and getattr(config, "attention_chunk_size", None):
            probe.refusal = "it attends in chunks"
        if probe.refusal is not None:
            raise ConfigError(f"{name} cannot be served through transformers: {probe.refusal}", param="model")
        num_kv_heads, head_dim = shapes.pop()
        return ModelSpec(
            num_layers=len(probe.shapes),
            num_heads=probe.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=hidden.shape[-1],
            vocab_size=vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            dtype=dtype,
        )


@dataclass
class _Output(MoeModelOutputWithPast):  # type: ignore[misc]
    """Every field that some causal model looks for in its base model's output."""

    cross_attentions: Any = None


class _Given(nn.Module):
    """Stands where the base model was: gives back the hidden states it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **options: Any) -> Any:
        return _Output(last_hidden_state=inputs_embeds)


def _load(
    files: ModelFiles, dtype: torch.dtype, device: torch.device, dummy: bool, seed: int, trust_remote_code: bool
) -> Any:
    """transformers' model, for inference, on the device."""
    try:
        if dummy:
            config = transformers.AutoConfig.from_pretrained(  # nosec B615 # a directory
                files.directory, trust_remote_code=trust_remote_code
            )
            with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
                torch.manual_seed(seed)
                causal = transformers.AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=_ATTENTION, trust_remote_code=trust_remote_code
                )
        else:
            causal = transformers.AutoModelForCausalLM.from_pretrained(  # nosec B615 # a directory
                files.directory,
                dtype=dtype,
                attn_implementation=_ATTENTION,
                use_safetensors=files.load_format != "pickle",
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"transformers cannot load {files.directory}: {reason}", param="model") from error
    causal = causal.to(device).eval().requires_grad_(False)
    _pack_linears(causal)
    return causal


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


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, T, Hq, D]."""
    step = _step.get()
    index: int = module.layer_idx  # type: ignore[assignment]
    if step.meta is None:
        assert step.probe is not None
        step.probe.num_heads = query.shape[1]
        step.probe.refusal = step.probe.refusal or _refusal(module, key, value, attention_mask, options)
        if index in step.probe.shapes:
            step.probe.refusal = f"layer {index} attends twice"
        step.probe.shapes[index] = (key.shape[1], key.shape[3])
        return torch.zeros_like(query).transpose(1, 2), None
    for cache, new in zip(step.caches[index], (key, value), strict=True):
        cache.view(-1, new.shape[1], new.shape[3]).index_copy_(0, step.meta.slot_mapping, new[0].transpose(0, 1))
    out = step.kernels.paged_attention(
        query[0].transpose(0, 1).contiguous(),
        *step.caches[index],
        step.meta,
        scaling if scaling is not None else query.shape[3] ** -0.5,
        options.get("sliding_window"),
        options.get("softcap"),
    )
    return out.view(1, query.shape[2], query.shape[1], query.shape[3]), None


def _refusal(
    module: nn.Module, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> str | None:
    """Why a layer's attention is none that paged_attention computes."""
    if key.shape != value.shape:
        return f"its keys have {key.shape[3]} features and its values {value.shape[3]}"
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        return "its attention is not causal"
    if attention_mask is not None:
        return "it adds a mask of its own"
    if options.get("s_aux") is not None:
        return "it has attention sinks"
    config = getattr(module, "config", None)
    if "sliding_window" not in options and getattr(config, "sliding_window", None):
        return "it applies its sliding window by a mask"
    return None


transformers.AttentionInterface.register(_ATTENTION, _paged_attention)
