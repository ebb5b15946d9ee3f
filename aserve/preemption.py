"""What it costs to take a request's memory away and give it back: by swap or by recompute.

scheduler.py asks per victim. Rates start from defaults and follow what steps measure. Pure arithmetic, no clock.
"""

from __future__ import annotations

from aserve.config import Preemption

SMOOTHING = 0.1  # weight of a new measurement
MIN_PREFILL_TOKENS = 64  # a smaller step says more about its fixed costs than about the rate


class CostModel:
    """Estimates seconds of a swap and of a recompute. Bytes are of one block over all layers, rates per second."""

    def __init__(
        self,
        mode: Preemption = "auto",
        *,
        block_size: int = 16,
        block_bytes: int = 0,
        copy_rate: float = 10e9,
        prefill_rate: float = 5_000.0,
    ) -> None:
        self.mode = mode
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.copy_rate = copy_rate
        self.prefill_rate = prefill_rate

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed that many tokens in that time."""
        if num_tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self.prefill_rate += SMOOTHING * (num_tokens / seconds - self.prefill_rate)

    def swap_seconds(self, num_blocks: int) -> float:
        """Copying the blocks out and in again."""
        return 2 * num_blocks * self.block_bytes / self.copy_rate

    def recompute_seconds(self, num_blocks: int) -> float:
        """Computing the blocks' tokens again."""
        return num_blocks * self.block_size / self.prefill_rate

    def prefers_swap(self, num_blocks: int, num_uncached: int) -> bool:
        """True where swapping `num_blocks` is cheaper than computing the `num_uncached` that the prefix cache lacks."""
        if self.mode == "auto":
            return self.swap_seconds(num_blocks) < self.recompute_seconds(num_uncached)
        return self.mode == "swap"
