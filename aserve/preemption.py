"""What it costs to take a request's memory away and give it back: by swap or by recompute.

residency.py asks per victim, results.py tells how long steps took. The copy rate is measured by the worker at start;
what computing tokens costs is fitted to the steps as they come. Pure arithmetic, no clock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from aserve.config import Preemption

PreemptionKind = Literal["swap", "recompute"]

SMOOTHING = 0.1  # weight of a new measurement in a mean
FORGETTING = 0.02  # weight that older steps lose in the fit with each new one
MIN_CHUNK_TOKENS = 64  # a smaller chunk says more about fixed costs than about its tokens
PRIOR = 1e-3  # weight of the default rates beside one measured step
RIDGE = 0.01  # holds attention's part at 0 until steps tell it apart from the tokens'


class Choice(NamedTuple):
    """How a victim gives its memory up, and the numbers that made it so: seconds for swapping all its blocks out and
    in, and for computing again the tokens that the prefix cache will not have."""

    kind: PreemptionKind
    num_blocks: int
    num_host_free: int  # blocks; with fewer than num_blocks it is recomputed, whatever that costs
    num_lost: int  # tokens
    swap_seconds: float
    recompute_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.kind} ({self.num_blocks} blocks out and in {1e3 * self.swap_seconds:.2f} ms, host has room for "
            f"{self.num_host_free}; {self.num_lost} tokens again {1e3 * self.recompute_seconds:.2f} ms)"
        )


class CostModel:
    """Estimates what a swap and a recompute add to the steps of those that run on.

    Chunks add per_token for each token and per_pair for each token and position before it (attention's quadratic part),
    fitted by least squares of the relative error over what recent steps took longer than one without chunks.
    `block_bytes` are of one block over all layers, `copy_rate` bytes a second between the pools.
    """

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
        self.per_token = 1.0 / prefill_rate
        self.per_pair = 0.0
        self.survival = 0.5  # share of a victim's cached blocks that were still cached when it came back
        self._decode_seconds: float | None = None
        self._tt, self._tp, self._pp = PRIOR * prefill_rate**2, 0.0, 0.0  # normal equations; t: tokens, p: pairs
        self._ty, self._py = PRIOR * prefill_rate, 0.0

    # measurements

    def observe_decode(self, seconds: float) -> None:
        """A step without chunks or swaps took that long."""
        if self._decode_seconds is None:
            self._decode_seconds = seconds
        else:
            self._decode_seconds += SMOOTHING * (seconds - self._decode_seconds)

    def observe_chunks(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """A step without swaps, with chunks of that many tokens and pairs, took that long."""
        seconds -= self._decode_seconds or 0.0
        if num_tokens < MIN_CHUNK_TOKENS or seconds <= 0:
            return
        tokens, pairs, keep = num_tokens / seconds, num_pairs / seconds, 1.0 - FORGETTING
        self._tt = keep * self._tt + tokens * tokens
        self._tp = keep * self._tp + tokens * pairs
        self._pp = keep * self._pp + pairs * pairs
        self._ty = keep * self._ty + tokens
        self._py = keep * self._py + pairs
        self._solve()

    def _solve(self) -> None:
        pp = self._pp * (1.0 + RIDGE)
        determinant = self._tt * pp - self._tp**2
        per_token = (pp * self._ty - self._tp * self._py) / determinant if determinant > 0 else 0.0
        per_pair = (self._tt * self._py - self._tp * self._ty) / determinant if determinant > 0 else 0.0
        if per_pair < 0 or per_token <= 0:
            per_token, per_pair = self._ty / self._tt, 0.0
        self.per_token, self.per_pair = per_token, per_pair

    def observe_survival(self, num_found: int, num_cached: int) -> None:
        """Of a victim's blocks that the prefix cache had and nobody else held, that many were left at its return."""
        if num_cached:
            share = max(0.0, min(1.0, num_found / num_cached))
            self.survival += SMOOTHING * (share - self.survival)

    # estimates

    def swap_seconds(self, num_blocks: int) -> float:
        """Copying the blocks out and in again."""
        return 2 * num_blocks * self.block_bytes / self.copy_rate

    def recompute_seconds(self, num_lost: int, num_tokens: int) -> float:
        """Computing `num_lost` tokens again, the last of sequences of up to `num_tokens`."""
        return num_lost * (self.per_token + self.per_pair * max(num_tokens - num_lost / 2, num_tokens / 2))

    def choose(self, num_blocks: int, num_host_free: int, num_lost: int, num_tokens: int) -> Choice:
        """The cheaper way, or the one that was asked for, as far as the host pool has room."""
        swap, recompute = self.swap_seconds(num_blocks), self.recompute_seconds(num_lost, num_tokens)
        kind = self.mode
        if kind == "auto":
            kind = "swap" if swap < recompute else "recompute"
        if not 0 < num_blocks <= num_host_free:
            kind = "recompute"
        return Choice(kind, num_blocks, num_host_free, num_lost, swap, recompute)
