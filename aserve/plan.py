"""The words between the scheduler and the model thread: what one step computes, and what came out.

Plain data, stdlib only, so that a plan can cross a thread or a process. Built by scheduler.py, executed by
worker/runner.py. A plan says only what changed: the runner keeps each slot's last token, position, block table and
sampling parameters on the device, and all of it can be rebuilt from committed tokens.

Order within a step: slot updates, block-table deltas, swap_out, swap_in, copies, compute, draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from aserve.constraint import Mask
from aserve.request import SamplingParams


class SlotUpdate(NamedTuple):
    """Hands `slot` to a sequence (admitted or resumed): its block table and draws start afresh.

    The index of the output token a draw makes is `position - num_prompt_tokens`, so no draw counter is sent.
    `tokens` is prompt + output so far where the parameters need token counts (penalties), else None.
    """

    slot: int
    params: SamplingParams
    seed: int  # 64 bits; with `choice` the Philox key and counter of this sequence's draws
    choice: int  # index among the request's n choices
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...] = ()  # masked while fewer than params.min_tokens are out
    tokens: tuple[int, ...] | None = None
    num_top: int | None = None  # best tokens whose logprobs come with each draw, where it is not params.logprobs


class BlockDelta(NamedTuple):
    """block_table[slot, start : start + len(blocks)] = blocks."""

    slot: int
    start: int
    blocks: tuple[int, ...]


class Chunk(NamedTuple):
    """Computes `tokens` at positions start .. start + len(tokens) - 1 of `slot` (prompt or recomputed tokens).

    `draws` are the slots that sample from the last position: empty while the prompt is incomplete, the slot itself
    at its end, or all n choices' slots when they share the prompt row. Each drawing slot's position becomes
    start + len(tokens).
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    draws: tuple[int, ...] = ()


class SlotMask(NamedTuple):
    """The draw of `slot` in this step gives a token of `mask`."""

    slot: int
    mask: Mask


class BlockCopy(NamedTuple):
    """Copies one block, all layers, from source to target (device pool; or across pools in swap_out / swap_in)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step. `decodes` are slots that compute their last drawn token at their next position and draw again.

    The scheduler reuses the same `decodes` tuple object while the set of decoding slots is unchanged, so that a
    runner may skip the upload when `plan.decodes is previous.decodes`.
    """

    number: int
    decodes: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    slots: tuple[SlotUpdate, ...] = ()
    blocks: tuple[BlockDelta, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    masks: tuple[SlotMask, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return len(self.decodes) + sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def draws(self) -> tuple[int, ...]:
        """The slots that draw, in the order of StepResult's lists: decodes, then each chunk's draws."""
        return self.decodes + tuple(slot for chunk in self.chunks for slot in chunk.draws)


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural log, raw logits) of one position: the chosen token's and the top-k, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class StepTimings:
    """Where a step's seconds go, in the order of events: `began` of a clock that all threads share, then spans.

    On CPU `compute` is the launch, since the work is done when it returns.
    """

    began: float = 0.0  # the model thread took the plan
    inputs: float = 0.0  # slot state, copies and rows, on their way to the device
    launch: float = 0.0  # starting the model's kernels, or a graph of them
    gap: float = 0.0  # the device had nothing to do before it began the step
    compute: float = 0.0  # the device worked on it
    wait: float = 0.0  # the waiting thread had nothing to do until it was done
    lag: float = 0.0  # until the event loop took the result


@dataclass(slots=True)
class StepResult:
    """What a step drew, aligned with StepPlan.draws.

    `bad` holds indexes of draws whose logits were not finite: those requests fail, the others go on. A draw with
    bad logits still has some token id in `tokens`.
    """

    number: int
    tokens: list[int]
    bad: tuple[int, ...] = ()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # draw index -> logprobs, where asked
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # chunk index -> per next token
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the model thread tells the engine once the model is loaded and the pools are sized."""

    num_gpu_blocks: int  # device pool, in blocks a sequence may own
    num_cpu_blocks: int  # host pool for swapping
    block_size: int
    max_model_len: int  # tokens: the model's context, or the option if smaller
    vocab_size: int
    depth: int  # steps that may be in flight: 2 on CUDA, 1 on CPU
    device: str
    dtype: str
    max_num_seqs: int = 64  # the options, resolved for the device
    max_num_batched_tokens: int = 512
    block_bytes: int = 0  # KV of one block, all layers; 0 makes a swap look free
    copy_rate: float = 10e9  # bytes a second between the pools, as measured at start
    startup_seconds: float = 0.0
