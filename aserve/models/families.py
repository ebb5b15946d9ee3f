"""What distinguishes the Llama-like families: config.json in, one frozen DecoderConfig out.

loader.py looks an architecture up here; decoder.py and rope.py read the result and never see config.json. No torch.
Meanings and defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from aserve.errors import ConfigError

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ROPE_NUMBERS = {  # without which a kind means nothing
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_KINDS = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope"})


class RopeConfig(NamedTuple):
    """One rotary embedding: `dim` features of a head turn. `scaling` is the kind's own numbers, as sorted items."""

    theta: float
    dim: int
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()


class LayerConfig(NamedTuple):
    """One layer: it attends over the last `window` positions or all of them; `sparse` puts experts for its MLP."""

    rope: RopeConfig
    window: int | None = None
    sparse: bool = False


class ExpertsConfig(NamedTuple):
    """A sparse layer's experts. `normalize` makes the shares of the chosen sum to 1; `shared_size` 0: no shared one."""

    num_experts: int
    per_token: int
    intermediate_size: int
    normalize: bool
    prefix: str = "mlp"
    gate_up_names: tuple[str, str] = ("gate_proj", "up_proj")
    down_name: str = "down_proj"
    shared_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder's shape and its family's choices. `context` is the most positions its rotary embedding serves."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    activation: str
    layers: tuple[LayerConfig, ...]
    tied: bool  # the head is the embedding
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before rotating
    post_norms: bool = False  # also normalize what attention and MLP give, before adding it
    norm_offset: float = 0.0  # added to stored norm weights
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up_names: tuple[str, ...] = ("gate_proj", "up_proj")
    experts: ExpertsConfig | None = None


def architecture(config: Mapping[str, Any]) -> str:
    """The class that config.json names. Raises ConfigError where it names none."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError("config.json names no architecture under 'architectures'", param="model")
    return names[0]


def required(config: Mapping[str, Any], key: str) -> Any:
    """config[key]. Raises ConfigError where it is missing or null."""
    value = config.get(key)
    if value is None:
        raise ConfigError(f"config.json does not state {key!r}", param="model")
    if isinstance(value, list):
        raise ConfigError(
            f"config.json has a list for {key!r}, one for each layer, which has no code here", param="model"
        )
    return value


def activation(name: str) -> str:
    """The kernels' name of an activation."""
    if name not in _ACTIVATIONS:
        raise ConfigError(f"config.json asks for activation {name!r}, which has no code here", param="model")
    return _ACTIVATIONS[name]


def rope_config(config: Mapping[str, Any], head_dim: int, params: Mapping[str, Any] | None = None) -> RopeConfig:
    """The rotary embedding of heads of `head_dim`: of config.json's section, or of another with its layout."""
    params = _rope_params(config) if params is None else params
    kind = params.get("rope_type") or params.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # Phi-3's first name for it
    if kind not in _ROPE_KINDS:
        raise ConfigError(f"config.json asks for rotary embedding {kind!r}, which has no code here", param="model")
    partial = params.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    numbers = {key: value for key, value in params.items() if key not in ("rope_type", "type", "rope_theta")}
    original = config.get("original_max_position_embeddings") or numbers.get("original_max_position_embeddings")
    positions = required(config, "max_position_embeddings")
    numbers["original_max_position_embeddings"] = original or positions
    if kind in ("yarn", "longrope") and numbers.get("factor") is None:
        numbers["factor"] = positions / numbers["original_max_position_embeddings"]
    if missing := [key for key in _ROPE_NUMBERS.get(kind, ()) if numbers.get(key) is None]:
        raise ConfigError(f"config.json does not state {missing[0]!r} for rotary embedding {kind!r}", param="model")
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in numbers.items()}
    return RopeConfig(
        theta=float(params.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        dim=int(head_dim * partial),
        kind=kind,
        scaling=() if kind == "default" else tuple(sorted(frozen.items())),
    )


def _rope_params(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary section of config.json, old name or new; that of the unwindowed layers where it is by layer type."""
    params: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return params.get("full_attention") or params


def _context(config: Mapping[str, Any], rope: RopeConfig) -> int:
    """Positions the model was made for. Dynamic scaling starts beyond them and is not used: it would turn cached
    keys and new ones by different angles."""
    positions = int(required(config, "max_position_embeddings"))
    scaling = dict(rope.scaling)
    if rope.kind == "linear":
        return int(positions * scaling.get("factor", 1.0))
    if rope.kind == "yarn":
        return max(positions, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
    return positions


def _sliding(config: Mapping[str, Any], layer_types: list[str], window: int | None) -> list[int | None]:
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def _llama(
    config: Mapping[str, Any], *, head_dim: int | None = None, windows: list[int | None] | None = None
) -> DecoderConfig:
    """What all families share, with Llama's choices."""
    num_heads, hidden_size = required(config, "num_attention_heads"), required(config, "hidden_size")
    head_dim = config.get("head_dim") or head_dim or hidden_size // num_heads
    rope = rope_config(config, head_dim)
    bias = bool(config.get("attention_bias", False))
    num_layers = required(config, "num_hidden_layers")
    return DecoderConfig(
        vocab_size=required(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        context=_context(config, rope),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=activation(config.get("hidden_activation") or config.get("hidden_act") or "silu"),
        layers=tuple(LayerConfig(rope, window) for window in windows or [None] * num_layers),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_scale=head_dim**-0.5,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _mistral(config: Mapping[str, Any]) -> DecoderConfig:
    window = config.get("sliding_window", 4096)
    return _llama(config, windows=[window] * required(config, "num_hidden_layers"))


def _qwen_windows(config: Mapping[str, Any]) -> list[int | None]:
    num_layers = required(config, "num_hidden_layers")
    if not config.get("use_sliding_window", False):
        return [None] * num_layers
    first = config.get("max_window_layers", 28)
    types = config.get("layer_types") or [
        "sliding_attention" if index >= first else "full_attention" for index in range(num_layers)
    ]
    return _sliding(config, types, config.get("sliding_window", 4096))


def _qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    return replace(_llama(config, windows=_qwen_windows(config)), qkv_bias=True, output_bias=False)


def _qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    return replace(_llama(config, head_dim=128, windows=_qwen_windows(config)), qk_norm=True)


def _mixtral(config: Mapping[str, Any]) -> DecoderConfig:
    base = _mistral({"sliding_window": None} | dict(config))
    experts = ExpertsConfig(
        num_experts=required(config, "num_local_experts"),
        per_token=config.get("num_experts_per_tok", 2),
        intermediate_size=base.intermediate_size,
        normalize=True,
        prefix="block_sparse_moe",
        gate_up_names=("w1", "w3"),
        down_name="w2",
    )
    return replace(base, experts=experts, layers=tuple(layer._replace(sparse=True) for layer in base.layers))


def _qwen_sparse(config: Mapping[str, Any], base: DecoderConfig, shared_size: int = 0) -> DecoderConfig:
    num_experts = config.get("num_experts") or required(config, "num_local_experts")
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    experts = ExpertsConfig(
        num_experts=num_experts,
        per_token=required(config, "num_experts_per_tok"),
        intermediate_size=required(config, "moe_intermediate_size"),
        normalize=bool(config.get("norm_topk_prob", False)),
        shared_size=shared_size,
    )
    layers = tuple(
        layer._replace(sparse=index not in dense and (index + 1) % every == 0)
        for index, layer in enumerate(base.layers)
    )
    return replace(base, experts=experts, layers=layers)


def _qwen2_moe(config: Mapping[str, Any]) -> DecoderConfig:
    base = replace(_qwen2(config), qkv_bias=config.get("qkv_bias", True))
    return _qwen_sparse(config, base, required(config, "shared_expert_intermediate_size"))


def _qwen3_moe(config: Mapping[str, Any]) -> DecoderConfig:
    num_layers = required(config, "num_hidden_layers")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return _qwen_sparse(config, replace(_llama(config, windows=[window] * num_layers), qk_norm=True))


def _phi3(config: Mapping[str, Any]) -> DecoderConfig:
    window = config.get("sliding_window")
    base = _llama(config, windows=[window] * required(config, "num_hidden_layers"))
    return replace(base, qkv_names=("qkv_proj",), gate_up_names=("gate_up_proj",))


def _gemma(config: Mapping[str, Any], pattern: int) -> DecoderConfig:
    """Gemma 2's and 3's common part: scaled embeddings, four norms around 1, every `pattern`th layer unwindowed."""
    if config.get("use_bidirectional_attention"):
        raise ConfigError("config.json asks for bidirectional attention, which has no code here", param="model")
    num_layers = required(config, "num_hidden_layers")
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or pattern
    types = config.get("layer_types") or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num_layers)
    ]
    filled = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True} | dict(config)
    base = _llama(filled, head_dim=256, windows=_sliding(config, types, config.get("sliding_window", 4096)))
    return replace(
        base,
        attention_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=base.hidden_size**0.5,
        attention_softcap=config.get("attn_logit_softcapping"),
        final_softcap=config.get("final_logit_softcapping"),
    )


def _gemma2(config: Mapping[str, Any]) -> DecoderConfig:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _gemma(caps | dict(config), pattern=2)


def _gemma3(config: Mapping[str, Any]) -> DecoderConfig:
    """Gemma 3 also norms queries and keys, and turns its windowed layers by a base of their own."""
    base = _gemma({"rope_theta": 1_000_000.0} | dict(config), pattern=6)
    nested = (config.get("rope_parameters") or {}).get("sliding_attention")  # else any scaling is the other layers'
    local = nested or {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    rope = rope_config(config, base.head_dim, local)
    layers = tuple(layer if layer.window is None else layer._replace(rope=rope) for layer in base.layers)
    return replace(base, layers=layers, qk_norm=True)


def _gemma3_text(config: Mapping[str, Any]) -> DecoderConfig:
    """The text part of Gemma 3 with vision. Its section leaves out what transformers' class has as defaults."""
    left_out = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    }
    return _gemma3(left_out | dict(required(config, "text_config")))


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_text,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
