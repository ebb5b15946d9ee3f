"""How long a request must wait at least, from what recent steps and ends have shown.

roster.py and results.py tell it what happened; admission refuses by it, and roster.py gives up early what cannot be
done in time. Every number errs towards hope: the best rates seen of late, and nothing that may turn out shorter. Pure
arithmetic, no clock.
"""

from __future__ import annotations

from typing import NamedTuple

FADING = 0.999  # what a best rate keeps from one step to the next
SMOOTHING = 0.05  # weight of a new output's length in their mean


class Ahead(NamedTuple):
    """What waits before a request and cannot be overtaken."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts
    num_sequences: int = 0


class Forecast:
    """Rates are tokens per second: `rate` of all that a step computes, `draw_rate` of those it draws."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.draw_rate = 0.0
        self.mean_output: float | None = None

    def observe_step(self, num_tokens: int, num_draws: int, seconds: float) -> None:
        """A step computed and drew that many tokens."""
        if seconds > 0:
            self.rate = max(FADING * self.rate, num_tokens / seconds)
            self.draw_rate = max(FADING * self.draw_rate, num_draws / seconds)

    def observe_end(self, num_output: int) -> None:
        """A sequence ended by itself with that many tokens."""
        if self.mean_output is None:
            self.mean_output = float(num_output)
        else:
            self.mean_output += SMOOTHING * (num_output - self.mean_output)

    def least_wait(self, ahead: Ahead, num_slots: int, share_computed: float = 1.0) -> float:
        """Seconds until a request may start behind `ahead`, of whose prompts that share is not in the cache. Those that
        run, and as many of those ahead as there are slots, may end at any time."""
        if not self.rate or not self.draw_rate:
            return 0.0
        prompts = share_computed * ahead.num_tokens / self.rate
        outputs = max(0, ahead.num_sequences - num_slots) * (self.mean_output or 0.0) / self.draw_rate
        return max(prompts, outputs)

    def can_compute(self, num_tokens: int, seconds: float) -> bool:
        """False where so many tokens surely take longer."""
        return num_tokens <= seconds * self.rate or not self.rate
