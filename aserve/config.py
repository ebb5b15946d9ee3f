"""The engine's options: one frozen dataclass, validated once. Stdlib only; no environment variables.

Option names are vLLM's where one exists. The CLI builds an EngineConfig from flags of the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from aserve.errors import ConfigError
from aserve.request import MAX_CHOICES

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
ModelImpl = Literal["auto", "native", "transformers"]
AttentionBackend = Literal["auto", "flash", "triton", "torch"]
Device = Literal["auto", "cpu", "cuda"]
Preemption = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an Engine needs to know. Raises ConfigError, naming the option, for a bad value.

    `model`: None (the demo model), a Hugging Face directory, a .gguf file, or a hub id. `max_model_len` in tokens;
    None is the model's own, bounded so that one sequence fits the KV pool. `max_num_seqs` sequences may run at
    once; a step computes at most `max_num_batched_tokens` tokens. None picks by device.
    """

    model: str | None = None
    tokenizer: str | None = None  # a directory or tokenizer.json; None is the model's own
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    chat_template: str | None = None  # a file, a built-in name, or a template; None is the model's own
    device: Device = "auto"
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    model_impl: ModelImpl = "auto"  # auto: transformers' code for what has no decoder here
    allow_pickle: bool = False  # read *.bin weights where there are no safetensors; tensors only, never code
    trust_remote_code: bool = False  # run the Python files that come with a model or its tokenizer
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9  # CUDA: share of the card's memory for weights, activations and KV
    kv_cache_memory: int | None = None  # bytes; CPU default 1 GiB
    swap_space: float = 4.0  # GiB of host memory for swapped blocks
    preemption: Preemption = "auto"
    policy: str = "fair"  # fcfs | priority | fair, or pkg.module:Class
    attention_backend: AttentionBackend = "auto"
    enforce_eager: bool = False  # no CUDA graphs
    seed: int = 0  # of dummy weights; a request has its own, or 64 fresh random bits
    max_queue: int = 10_000  # waiting requests; one more is refused
    max_queue_per_tenant: int | None = None  # waiting requests of one API key or user; one more is refused
    max_n: int = MAX_CHOICES
    num_threads: int | None = None  # CPU threads of the model; None is the cores this process may use
    depth: int | None = None  # steps in flight; None: 2 on CUDA, 1 on CPU
    step_timeout: float = 300.0  # seconds; a step that takes longer marks the engine dead

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"{flag(name)} must be one of {', '.join(known)}, got {value!r}", param=name)
        for name, low in (
            ("max_model_len", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("num_gpu_blocks_override", 1),
            ("kv_cache_memory", 1),
            ("max_queue", 1),
            ("max_queue_per_tenant", 1),
            ("num_threads", 1),
            ("depth", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{flag(name)} must be at least {low}, got {value}", param=name)
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be a power of two, got {self.block_size}", param="block_size")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}",
                param="gpu_memory_utilization",
            )
        if not 0 <= self.swap_space < float("inf"):
            raise ConfigError(f"--swap-space must be 0 or more GiB, got {self.swap_space}", param="swap_space")
        if not 1 <= self.max_n <= MAX_CHOICES:
            raise ConfigError(f"--max-n must be 1 to {MAX_CHOICES}, got {self.max_n}", param="max_n")
        if not self.step_timeout > 0:
            raise ConfigError(f"--step-timeout must be above 0 seconds, got {self.step_timeout}", param="step_timeout")


# of the fields that are one of a few words
_CHOICES = {name: get_args(hint) for name, hint in get_type_hints(EngineConfig).items() if get_origin(hint) is Literal}


def flag(name: str) -> str:
    """An option as the command line spells it."""
    return f"--{name.replace('_', '-')}"
