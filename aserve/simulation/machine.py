"""What a simulated machine is: its pools, its limits, and how long a step takes on it.

simulator.py runs plans against it; PRESETS are machines by name. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from aserve.config import flag
from aserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model on a device. Times in seconds, sizes in bytes, of a block over all layers.

    A step takes `fixed` (reading the weights, launching), `per_token` for each token it computes, `per_context` for
    each position of KV it reads (once per sequence), `per_pair` for each token and position before it within chunks
    (attention's quadratic part), and the bytes it swaps over `copy_rate`.
    """

    fixed: float
    per_token: float
    per_context: float = 0.0
    per_pair: float = 0.0
    copy_rate: float = 10e9
    block_bytes: int = 2**20
    block_size: int = 16
    num_gpu_blocks: int = 4096
    num_cpu_blocks: int = 4096
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    depth: int = 1

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_gpu_blocks",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "depth",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} must be at least 1", param=name)
        for name in ("fixed", "per_token", "per_context", "per_pair", "block_bytes", "num_cpu_blocks"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{flag(name)} must be 0 or more", param=name)
        if self.copy_rate <= 0 or self.fixed + self.per_token <= 0:
            raise ConfigError("a step must take time and --copy-rate must be above 0", param="copy_rate")

    def step_seconds(self, num_tokens: int, num_context: int, num_pairs: float, num_copies: int) -> float:
        """How long the device is busy with one step that moves `num_copies` blocks between the pools."""
        return (
            self.fixed
            + self.per_token * num_tokens
            + self.per_context * num_context
            + self.per_pair * num_pairs
            + num_copies * self.block_bytes / self.copy_rate
        )


# To start from; docs/benchmarks/step_cost.py fits a machine of one's own.
PRESETS: dict[str, Machine] = {
    # From data sheets, at 80% of the memory's rate and 60% of the arithmetic's: 16 GB of bfloat16 weights at 4.8 TB/s,
    # 16 GFLOP a token at 989 TFLOP/s, 128 KiB of KV a token.
    "h200-llama-8b": Machine(
        fixed=4.5e-3,
        per_token=27e-6,
        per_context=34e-9,
        per_pair=0.9e-9,
        copy_rate=50e9,
        block_bytes=2 * 2**20,
        num_gpu_blocks=51_000,
        num_cpu_blocks=2048,
        max_model_len=32_768,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        depth=2,
    ),
    # Two cores that give 36 tokens a second alone and 210 at eight streams, in bfloat16, 1 GiB of KV.
    "cpu-gemma-270m": Machine(
        fixed=26e-3,
        per_token=1.5e-3,
        per_context=0.8e-6,
        copy_rate=4e9,
        block_bytes=16 * 18_432,
        num_gpu_blocks=3640,
        num_cpu_blocks=3640,
        max_model_len=32_768,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        depth=1,
    ),
}
