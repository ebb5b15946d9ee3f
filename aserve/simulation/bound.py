"""What a machine could do at best: what a scheduler is measured against where memory is short.

Tests and docs/benchmarks/overload.py ask. Both bounds know what a scheduler cannot, how long each output will be. They
count requests of one choice whose prompts share nothing, and the machine's own cost model. Pure arithmetic.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from operator import add
from typing import NamedTuple

from aserve.errors import ConfigError
from aserve.simulation.machine import Machine
from aserve.simulation.trace import TraceRequest


class Served(NamedTuple):
    """Tokens of one request that were computed and drawn."""

    prompt: int
    output: int  # at least 1


def least_seconds(machine: Machine, served: Iterable[Served]) -> float:
    """How long the machine takes for that work at least, in whatever order and with swaps that cost nothing.

    Every token costs what it costs; the number of steps is what can be saved. A sequence that draws holds its blocks
    in that step and takes a place of the batch, so that pool, slots and token budget each ask for a number of steps.
    """
    num_draws = num_held = num_tokens = 0
    seconds = 0.0
    for prompt, output in served:
        end = prompt + output - 1  # positions computed
        num_draws += output
        num_tokens += end
        num_held += _sum_blocks(end, machine.block_size) - _sum_blocks(prompt - 1, machine.block_size)
        context = (end * (end + 1) - prompt * (prompt - 1)) // 2
        seconds += machine.step_seconds(end, context, prompt * prompt / 2, 0) - machine.fixed
    num_steps = max(
        num_held / machine.num_gpu_blocks,
        num_draws / machine.max_num_seqs,
        num_tokens / machine.max_num_batched_tokens,
    )
    return seconds + num_steps * machine.fixed


def _sum_blocks(num_tokens: int, size: int) -> int:
    """Blocks that 1, 2, ... and `num_tokens` positions take, in sum."""
    full, rest = divmod(num_tokens, size)
    return size * full * (full + 1) // 2 + rest * (full + 1)


class Oracle:
    """Serves requests in order of arrival without a preemption: each starts as soon as it fits the pool to its end,
    beside all that run. In that order the pool cannot be fuller."""

    def __init__(self, machine: Machine) -> None:
        if machine.max_num_batched_tokens <= machine.max_num_seqs:
            raise ConfigError("--max-num-batched-tokens must be above the slots", param="max_num_batched_tokens")
        self.machine = machine
        self.now = 0.0
        self.num_steps = 0
        self.num_output_tokens = 0
        self._budget = machine.max_num_batched_tokens - machine.max_num_seqs  # of each step, for prompts
        self._waiting: deque[TraceRequest] = deque()
        self._prompts: deque[tuple[int, int]] = deque()  # length, and tokens computed so far, which the first alone has
        self._num_left = 0  # tokens to compute of all of them
        self._num_seats = 0
        self._num_decodes = 0
        self._context = 0  # positions of those that decode
        self._used: list[int] = []  # blocks by step
        self._starts: defaultdict[int, list[int]] = defaultdict(list)  # positions of those that draw first in a step
        self._ends: defaultdict[int, list[int]] = defaultdict(list)  # and of those that draw their last token

    def run(self, trace: Iterable[TraceRequest], until: float = float("inf")) -> float:
        """Serves the trace, which is in order of arrival, to its end or to that time. Returns output tokens a second.

        Raises ConfigError where a request does not fit the pool by itself.
        """
        arrivals = deque(trace)
        while self.now < until:
            while arrivals and arrivals[0].arrival <= self.now:
                self._waiting.append(arrivals.popleft())
            while self._waiting and self._num_left < self._budget and self._admits(self._waiting[0]):
                self._waiting.popleft()
            if self._num_seats:
                self._step()
            elif self._waiting:
                raise ConfigError("a request does not fit the pool", param="num_gpu_blocks")
            elif arrivals:
                self.now = arrivals[0].arrival
            else:
                break
        return self.num_output_tokens / self.now if self.now else 0.0

    def _admits(self, request: TraceRequest) -> bool:
        """Takes slot and blocks for the request from this step to its end, if it never lacks them."""
        prompt, output, size = request.prompt, request.output, self.machine.block_size
        delay = (self._num_left + prompt - 1) // self._budget  # steps until the one that computes its last prompt token
        first = self.num_steps + delay
        need = [-(-prompt // size)] * delay + [-(-end // size) for end in range(prompt, prompt + output)]
        used = self._used[self.num_steps : self.num_steps + len(need)]
        used += [0] * (len(need) - len(used))
        total = list(map(add, used, need))
        if self._num_seats == self.machine.max_num_seqs or max(total) > self.machine.num_gpu_blocks:
            return False
        self._used[self.num_steps : self.num_steps + len(need)] = total
        self._num_seats += 1
        self._num_left += prompt
        self._prompts.append((prompt, 0))
        self._starts[first].append(prompt)
        self._ends[first + output - 1].append(prompt + output - 1)
        return True

    def _step(self) -> None:
        """Each sequence that decodes draws a token, beside as much of the prompts as there is room for."""
        self._context += self._num_decodes
        left = min(self._budget, self._num_left)
        num_tokens, context, pairs = self._num_decodes + left, self._context, 0.0
        self._num_left -= left
        while left:
            prompt, done = self._prompts.popleft()
            count = min(left, prompt - done)
            left -= count
            context += done + count
            pairs += count * (done + count / 2)
            if done + count < prompt:
                self._prompts.appendleft((prompt, done + count))
        starts, ends = self._starts.pop(self.num_steps, []), self._ends.pop(self.num_steps, [])
        self.now += self.machine.step_seconds(num_tokens, context, pairs, 0)
        self.num_output_tokens += self._num_decodes + len(starts)
        self._num_decodes += len(starts) - len(ends)
        self._context += sum(starts) - sum(ends)
        self._num_seats -= len(ends)
        self.num_steps += 1
