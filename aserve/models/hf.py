"""Any causal model of transformers over paged memory: its own modelling code, with our attention in place of its.

loader.py takes it for architectures that have no native decoder. A model qualifies if all that mixes tokens goes
through transformers' attention interface: a probe at load finds out what its layers ask of attention (hf_attention.py)
and a trial whether it computes the same as with its own (hf_trial.py), so that a model is right or is refused before
it serves.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from aserve.errors import ConfigError
from aserve.models import KVCache, ModelSpec, check_finite
from aserve.models.files import ModelFiles
from aserve.models.hf_attention import PagedStep, Probe, attending, own_attention
from aserve.models.hf_loading import first_line, load_causal, refusal
from aserve.models.hf_trial import apart, differences
from aserve_kernels import AttentionMeta, Kernels

# how far logits may lie apart, relative to their size: rounding, and no more
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.2}


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
        self._causal = load_causal(
            files, dtype=dtype, device=device, dummy=dummy, seed=seed, trust_remote_code=trust_remote_code
        )
        self._base = self._base_model()
        self._own_forward = self._base.forward
        # for the causal model, its base model gives back the hidden states it is given: what is left makes logits
        self._base.forward = _given
        try:
            self.spec = self._probed(dtype, device)
            self._try_out(device)
        except (ConfigError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the model's own code raises
            raise self._refusal(
                f"its code does not run over aserve's memory ({type(error).__name__}: {first_line(error)})"
            ) from error

    def forward(self, token_ids: Tensor, meta: AttentionMeta, caches: list[KVCache]) -> Tensor:
        """Final hidden states [T, H]: the step's tokens go through as one sequence, which only attention could tell."""
        return self._hidden(token_ids, meta.positions, PagedStep(self._kernels, meta, caches))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, V] of hidden [S, H], scaled and capped as the model's own code does."""
        logits: Tensor = self._causal(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits

    def _hidden(self, token_ids: Tensor, positions: Tensor, work: PagedStep | Probe) -> Tensor:
        with attending(work):
            output = self._own_forward(
                input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _own_logits(self, token_ids: Tensor, **options: Any) -> Tensor:
        """Logits [T, V] of one text as the model's authors compute them."""
        del self._base.forward
        try:
            with own_attention(self._causal):
                logits: Tensor = self._causal(input_ids=token_ids.unsqueeze(0), use_cache=False, **options).logits[0]
        finally:
            self._base.forward = _given
        return logits

    def _base_model(self) -> nn.Module:
        """The part of the causal model that turns tokens into hidden states."""
        for name in (self._causal.base_model_prefix, "model", "transformer"):
            if isinstance(found := getattr(self._causal, name, None), nn.Module):
                break
        else:
            raise self._refusal("it has no part that gives hidden states")
        if [name for name, _ in found.named_children()] == ["decoder"]:  # which the causal model calls by itself
            found = found.get_submodule("decoder")
            if "position_ids" not in inspect.signature(found.forward).parameters:
                raise self._refusal("it counts positions itself")
        return found

    def _refusal(self, reason: str) -> ConfigError:
        return refusal(type(self._causal).__name__, reason)

    @torch.inference_mode()
    def _probed(self, dtype: torch.dtype, device: torch.device) -> ModelSpec:
        """The numbers the runner needs, from two tokens' way through the model."""
        config, probe = self._causal.config.get_text_config(decoder=True), Probe()
        place = torch.arange(2, device=device)
        hidden = self._hidden(torch.zeros_like(place), place, probe)
        if probe.refusal is not None:
            raise self._refusal(probe.refusal)
        if len(probe.shapes) < config.num_hidden_layers:
            raise self._refusal(f"{len(probe.shapes)} of its {config.num_hidden_layers} layers attend")
        if getattr(config, "max_position_embeddings", None) is None:
            raise self._refusal("its config.json states no context")
        num_kv_heads, head_dim = probe.common()
        return ModelSpec(
            num_layers=len(probe.shapes),
            num_heads=probe.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=hidden.shape[-1],
            vocab_size=self.logits(hidden).shape[-1],
            max_position_embeddings=_context(config),
            dtype=dtype,
        )

    @torch.inference_mode()
    def _try_out(self, device: torch.device) -> None:
        """Raises ConfigError unless two texts in one batch, in pieces, get the logits that each has of its own."""
        positions = torch.arange(8, device=device)
        text = (positions + 5) % self.spec.vocab_size
        own = self._own_logits(text)
        check_finite(own)
        if apart(self._own_logits(text, position_ids=positions.unsqueeze(0)), own).max() > _ROUNDING[torch.float32]:
            raise self._refusal("it does not count positions from 0 on")
        alone, together = differences(self, self._own_logits, device)
        if not alone <= _ROUNDING[self.spec.dtype]:
            raise self._refusal(f"its logits differ by {alone:.1g} of their size from what its own attention gives")
        if not together <= max(_ROUNDING[self.spec.dtype] / 10, 1.5 * alone):
            raise self._refusal(f"in a batch its logits differ by {together:.1g} of their size from what it says alone")


def _context(config: Any) -> int:
    """Positions that one and the same model serves."""
    context = int(config.max_position_embeddings)
    if chunk := getattr(config, "attention_chunk_size", None):
        context = min(context, chunk)  # within a chunk, attention is plain
    stated = getattr(config, "rope_parameters", None) or {}
    for rope in (stated, *(section for section in stated.values() if isinstance(section, dict))):
        if rope.get("rope_type") == "longrope":  # beyond, it turns the whole batch, not the long text, by other angles
            context = min(context, rope.get("original_max_position_embeddings") or context)
    return context


@dataclass
class _Output(MoeModelOutputWithPast):  # type: ignore[misc]
    """A base model's output: None for whatever a causal model looks for beside the hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def _given(*_: Any, inputs_embeds: Tensor, **options: Any) -> Any:
    return _Output(last_hidden_state=inputs_embeds)
