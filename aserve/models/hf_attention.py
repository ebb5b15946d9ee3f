"""aserve's paged attention as transformers knows it, and what a model's layers ask of it.

hf.py puts it in the place of a model's own attention. The n-th call of a forward pass owns the n-th KV cache, whatever
layer it comes from, so layers that are run twice are no special case. Never guesses: what paged attention does not
compute is a refusal, found by one pass of a Probe before the model serves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import transformers
from torch import Tensor, nn

from aserve.models import KVCache
from aserve_kernels import AttentionMeta, Kernels

ATTENTION = "aserve_paged"  # its name among transformers' attention implementations

# options of a call that change nothing here: all that is not None and not among them is refused
_HARMLESS = frozenset(
    {
        "dropout",
        "is_causal",
        "sliding_window",
        "softcap",
        "s_aux",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
    }
)


class KVShape(NamedTuple):
    """Key-value heads and features of one call."""

    num_heads: int
    head_dim: int


class Call(NamedTuple):
    """One call of attention as a layer makes it: query [1, Hq, T, D], key and value [1, Hk, T, D]."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]


@dataclass(slots=True)
class Probe:
    """What a forward pass asks of attention: call by call the shapes, and why it cannot be served."""

    shapes: list[KVShape] = field(default_factory=list)
    num_heads: int = 0
    refusal: str | None = None

    def common(self) -> KVShape:
        """The shape in which every call's keys and values can be kept: heads repeat, features are filled with zeros."""
        return KVShape(
            math.lcm(*(shape.num_heads for shape in self.shapes)), max(shape.head_dim for shape in self.shapes)
        )

    def see(self, call: Call) -> Tensor:
        """Notes a call; gives an output of the shape it expects."""
        self.refusal = self.refusal or _refusal(call)
        _, query, key, value, _, _ = call
        self.shapes.append(KVShape(key.shape[1], max(key.shape[3], value.shape[3])))
        self.num_heads = max(self.num_heads, query.shape[1])
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _refusal(call: Call) -> str | None:
    """Why a call is none that paged attention computes."""
    module, query, key, value, mask, options = call
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        return "its attention is not causal"
    if mask is not None:
        return "it adds a mask of its own"
    if query.shape[0] != 1 or key.shape[:3] != value.shape[:3] or key.shape[2] != query.shape[2]:
        return f"it attends from {tuple(query.shape)} to {tuple(key.shape)} in a way of its own"
    config = getattr(module, "config", None)
    if "sliding_window" not in options and getattr(config, "sliding_window", None):
        return "it applies its sliding window by a mask"
    unknown = sorted(name for name, given in options.items() if given is not None and name not in _HARMLESS)
    return f"its attention takes {unknown[0]}, which is not known here" if unknown else None


@dataclass(slots=True)
class PagedStep:
    """Attention of the step in progress over its caches."""

    kernels: Kernels
    meta: AttentionMeta
    caches: list[KVCache]
    calls: int = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict[str, Any]) -> Tensor:
        """Writes keys and values of a call and attends: query [1, Hq, T, D] -> [1, T, Hq, D of the values]."""
        cache = self.caches[self.calls]
        self.calls += 1
        shape = KVShape(*cache[0].shape[2:])
        for pool, new in zip(cache, (key, value), strict=True):
            fitted = _wider(_repeated(new[0], shape.num_heads), shape.head_dim)
            pool.view(-1, *shape).index_copy_(0, self.meta.slot_mapping, fitted.transpose(0, 1))
        out = self.kernels.paged_attention(
            _wider(query[0], shape.head_dim).transpose(0, 1).contiguous(),
            *cache,
            self.meta,
            scale,
            options.get("sliding_window"),
            options.get("softcap"),
            options.get("s_aux"),
        )
        return out.view(1, query.shape[2], query.shape[1], shape.head_dim)[..., : value.shape[3]]


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """Each of the heads of [Hk, T, D] as often as fills `num_heads`: the queries of a group find their head again."""
    return x if x.shape[0] == num_heads else x.repeat_interleave(num_heads // x.shape[0], dim=0)


def _wider(x: Tensor, head_dim: int) -> Tensor:
    """[H, T, D] with zeros for the features up to `head_dim`: they add nothing to a product, and are cut off again."""
    return x if x.shape[2] == head_dim else nn.functional.pad(x, (0, head_dim - x.shape[2]))


_work: ContextVar[Probe | PagedStep] = ContextVar("aserve_attention")  # per thread: engines in one process do not mix


@contextmanager
def attending(work: Probe | PagedStep) -> Iterator[None]:
    """Within, the attention of models that use ATTENTION is `work`'s."""
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, T, Hq, D]."""
    work = _work.get(None)
    if work is None:
        raise RuntimeError("its attention runs outside of its base model")
    if isinstance(work, Probe):
        return work.see(Call(module, query, key, value, attention_mask, options)), None
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    return work.attend(query, key, value, float(scale), options), None


@contextmanager
def own_attention(causal: nn.Module) -> Iterator[None]:
    """Within, the model computes with its own attention and masks, as its authors wrote them."""
    configs = {id(config): config for module in causal.modules() if (config := getattr(module, "config", None))}
    ours = [config for config in configs.values() if getattr(config, "_attn_implementation", None) == ATTENTION]
    for config in ours:
        config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        for config in ours:
            config._attn_implementation_internal = ATTENTION


transformers.AttentionInterface.register(ATTENTION, _paged_attention)
