"""A runner without a model, and the requests tests feed it.

`FakeRunner` executes StepPlans against a paged KV of (position, token, chain of all tokens before) cells, reached only
through the block tables that plans build. A draw hashes the tokens read back, so any paging, copy-on-write, swap or
prefix mistake changes the output or raises KVError. It never looks into the scheduler.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from aserve.beams import Beam, BeamSearch
from aserve.constraint import Constraint
from aserve.executors import StepError
from aserve.plan import BlockCopy, Chunk, SlotUpdate, StepPlan, StepResult, TokenLogprobs, WorkerInfo
from aserve.request import Request, SamplingParams, Sequence


class KVError(AssertionError):
    """A plan read what was never written, or wrote what others read: a bug in the scheduler."""


class Cell(NamedTuple):
    """The KV of one token: it depends on the token, its position and everything before it."""

    position: int
    token: int
    chain: int


Block = list[Cell | None]


class SlotState:
    """What the runner remembers of one slot between steps."""

    def __init__(self, update: SlotUpdate) -> None:
        self.update = update
        self.table: list[int] = []
        self.last: int | None = None  # the last token drawn, not yet computed
        self.position = 0
        self.lost = False  # part of a failed step: its KV is unknown until the slot is handed out again


class FakeRunner:
    """executors.Runner over a fake paged KV. `launch` does all the work; `wait` hands the result over.

    `eos_chance` is the share of draws that give `eos_token_id`. `before_step` is called with each plan first: it may
    block, or raise StepError. `bad_slots` draw non-finite logits. `is_cached(block)` says whether a prefix-cache
    entry shares a device block: writing such a block raises.
    """

    def __init__(
        self,
        *,
        num_gpu_blocks: int = 64,
        num_cpu_blocks: int = 0,
        block_size: int = 4,
        max_model_len: int = 256,
        vocab_size: int = 1000,
        eos_token_id: int = 2,
        eos_chance: float = 0.0,
        depth: int = 1,
        before_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.info = WorkerInfo(
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            depth=depth,
            device="fake",
            dtype="float32",
        )
        self.eos_token_id = eos_token_id
        self.eos_chance = eos_chance
        self.before_step = before_step
        self.bad_slots: set[int] = set()
        self.is_cached: Callable[[int], bool] = lambda block: False
        self.device: list[Block] = [[None] * block_size for _ in range(num_gpu_blocks)]
        self.host: list[Block] = [[None] * block_size for _ in range(num_cpu_blocks)]
        self.slots: dict[int, SlotState] = {}
        self.plans: list[StepPlan] = []
        self.closed = False
        # plans that may be in flight already when a step fails: they read what it left unwritten
        self._num_doubtful = 0

    # executors.Runner

    def load(self) -> WorkerInfo:
        return self.info

    def launch(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        try:
            if self.before_step is not None:
                self.before_step(plan)
        except StepError:
            self._lose(plan)
            self._num_doubtful = self.info.depth - 1
            raise
        for update in plan.slots:
            self.slots[update.slot] = SlotState(update)
        for delta in plan.blocks:
            table = self.slots[delta.slot].table
            if delta.start > len(table) and not self.slots[delta.slot].lost:
                raise KVError(f"slot {delta.slot}: block table has a hole before entry {delta.start}")
            table[delta.start : delta.start + len(delta.blocks)] = delta.blocks
        self._copy(plan.swap_out, self.device, self.host)
        self._copy(plan.swap_in, self.host, self.device, check=True)
        self._copy(plan.copies, self.device, self.device, check=True)
        result = self._compute(plan)
        self._num_doubtful -= 1
        return result

    def wait(self, handle: object) -> StepResult:
        assert isinstance(handle, StepResult)
        return handle

    def idle(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    # the oracle

    def solo(
        self,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        choice: int = 0,
        max_tokens: int | None = None,
        constraint: Constraint | None = None,
    ) -> list[int]:
        """The output of one choice of a request that runs alone. `max_tokens` and `seed` default to the params'."""
        tokens = list(prompt)
        limit = params.max_tokens if max_tokens is None else max_tokens
        if limit is None:
            limit = min(self.info.max_model_len, self.info.num_gpu_blocks * self.info.block_size) - len(tokens)
        if seed is None:
            seed = params.seed or 0
        eos = () if params.ignore_eos else (self.eos_token_id,)
        ends = frozenset(eos + params.stop_token_ids)
        update = SlotUpdate(0, params, seed, choice, len(tokens), eos)
        output: list[int] = []
        while len(output) < limit:
            output.append(
                self._draw(tokens, update if constraint is None else _masked(update, constraint.mask().read()))
            )
            tokens.append(output[-1])
            if output[-1] in ends or (constraint is not None and constraint.accept(output[-1])):
                break
        return output

    def solo_beams(self, request: Request) -> list[Beam]:
        """The beams of a request that runs alone, without stop strings."""
        search = BeamSearch.of(request)
        prompt = list(request.prompt)
        while search.step([self.best([*prompt, *beam.tokens], search.num_asked) for beam in search.live]):
            pass
        return search.beams()

    def best(self, context: list[int], count: int) -> tuple[tuple[int, float], ...]:
        """The `count` most probable next tokens of a context, best first; an end is among them by `eos_chance`."""
        size = self.info.vocab_size
        digest = blake2b(array("q", context).tobytes(), digest_size=16, key=b"best").digest()
        chance, pick = int.from_bytes(digest[:8], "big") / 2**64, int.from_bytes(digest[8:], "big")
        tokens = [(pick + i) % size for i in range(min(count + 1, size)) if (pick + i) % size != self.eos_token_id]
        if chance < self.eos_chance:
            tokens.insert(pick % min(3, count), self.eos_token_id)
        found = sorted(((token, _logprob(context, token)) for token in tokens[:count]), key=lambda pair: -pair[1])
        return tuple(found)

    # one step

    def _compute(self, plan: StepPlan) -> StepResult:
        rows: list[tuple[list[int], tuple[int, ...]]] = []
        for slot in plan.decodes:
            state = self.slots[slot]
            if state.last is None:
                raise KVError(f"slot {slot} decodes but has drawn nothing")
            rows.append((self._forward(slot, state.position, (state.last,)), (slot,)))
        for chunk in plan.chunks:
            self._check_chunk(chunk)
            rows.append((self._forward(chunk.slot, chunk.start, chunk.tokens), chunk.draws))
            for slot in chunk.draws if self.slots[chunk.slot].lost else ():
                self.slots[slot].lost = True  # it draws from KV that is unknown, and will read it
        result = StepResult(plan.number, [])
        masks = {slot: mask.read() for slot, mask in plan.masks}
        bad = []
        for context, draws in rows:
            for slot in draws:
                state = self.slots[slot]
                update = state.update if slot not in masks else _masked(state.update, masks[slot])
                token = self._draw(context, update)
                if slot in self.bad_slots:
                    bad.append(len(result.tokens))
                params = update.params
                if params.logprobs is not None and not params.use_beam_search:
                    top = tuple((token + i, -1.0 - i) for i in range(params.logprobs))
                    result.logprobs[len(result.tokens)] = TokenLogprobs(token, -1.0, top)
                elif update.num_top is not None:
                    best = self.best(context, update.num_top)
                    result.logprobs[len(result.tokens)] = TokenLogprobs(token, _logprob(context, token), best)
                result.tokens.append(token)
                state.last = token
                state.position = len(context)
        result.bad = tuple(bad)
        assert len(result.tokens) == len(plan.draws)
        return result

    def _check_chunk(self, chunk: Chunk) -> None:
        if not chunk.tokens:
            raise KVError(f"slot {chunk.slot}: empty chunk")
        for slot in chunk.draws:
            if self.slots[slot].update.params.max_tokens == 0 and not self.slots[slot].lost:
                raise KVError(f"slot {slot} draws though max_tokens is 0")

    def _forward(self, slot: int, start: int, tokens: tuple[int, ...]) -> list[int]:
        """Writes tokens at start.. and returns every token from 0, read back through the block table."""
        state = self.slots[slot]
        if state.lost:
            return [0] * (start + len(tokens))
        size = self.info.block_size
        context: list[int] = []
        chain = 0
        for position in range(start):
            cell = self.device[self._block(slot, position)][position % size]
            if cell is None or cell.position != position or cell.chain != hash((chain, cell.token)):
                if self._num_doubtful > 0:
                    state.lost = True
                    return [0] * (start + len(tokens))
                raise KVError(f"slot {slot} reads {cell} at position {position}, chain {chain}")
            chain = cell.chain
            context.append(cell.token)
        for position, token in enumerate(tokens, start):
            block = self._block(slot, position)
            self._check_writable(block)
            if position % size == 0:
                self.device[block] = [None] * size
            chain = hash((chain, token))
            self.device[block][position % size] = Cell(position, token, chain)
            context.append(token)
        return context

    def _block(self, slot: int, position: int) -> int:
        table = self.slots[slot].table
        index = position // self.info.block_size
        if index >= len(table):
            raise KVError(f"slot {slot} has no block for position {position}")
        return table[index]

    def _check_writable(self, block: int) -> None:
        if self.is_cached(block):
            raise KVError(f"block {block} is written while the prefix cache shares it")

    def _copy(
        self, copies: tuple[BlockCopy, ...], source: list[Block], target: list[Block], check: bool = False
    ) -> None:
        for copy in copies:
            if check:
                self._check_writable(copy.target)
            target[copy.target] = list(source[copy.source])

    def _draw(self, context: list[int], update: SlotUpdate) -> int:
        """A deterministic token: of the context alone when greedy, else of seed and choice too."""
        params = update.params
        key = b"" if params.greedy else f"{update.seed % 2**64}.{update.choice}".encode()
        digest = blake2b(array("q", context).tobytes(), digest_size=16, key=key).digest()
        chance, pick = int.from_bytes(digest[:8], "big") / 2**64, int.from_bytes(digest[8:], "big")
        allowed: Items[int] = params.allowed_token_ids or range(self.info.vocab_size)
        ends = update.end_token_ids + params.stop_token_ids
        if len(context) - update.num_prompt_tokens < params.min_tokens:
            allowed = [token for token in allowed if token not in ends]
        elif chance < self.eos_chance and not params.ignore_eos and self.eos_token_id in allowed:
            return self.eos_token_id
        token = allowed[pick % len(allowed)]
        if token == self.eos_token_id and len(allowed) > 1:  # ends come only by eos_chance
            token = allowed[(pick + 1) % len(allowed)]
        return token

    def _lose(self, plan: StepPlan) -> None:
        """A step that failed leaves the slots it would have touched in an unknown state."""
        touched = {update.slot for update in plan.slots} | set(plan.decodes) | {chunk.slot for chunk in plan.chunks}
        for slot in touched | set(plan.draws):
            state = self.slots.setdefault(slot, SlotState(SlotUpdate(slot, SamplingParams(), 0, 0, 0)))
            state.lost = True
            state.last = 0


def _logprob(context: list[int], token: int) -> float:
    """Of a token after a context: -8 to 0, and different for each."""
    digest = blake2b(array("q", [*context, token]).tobytes(), digest_size=8, key=b"logprob").digest()
    return -8.0 * int.from_bytes(digest, "big") / 2**64


def _masked(update: SlotUpdate, mask: bytes) -> SlotUpdate:
    """The slot as if its request allowed only the mask's tokens."""
    allowed = tuple(token for token in range(len(mask) * 8) if mask[token // 8] >> (token % 8) & 1)
    return update._replace(params=replace(update.params, structured=None, bad_words=(), allowed_token_ids=allowed))


_ids = itertools.count(1)


def make_request(
    prompt: Iterable[int],
    params: SamplingParams | None = None,
    *,
    max_tokens: int | None = None,
    end_token_ids: tuple[int, ...] = (2,),
    arrival: float = 0.0,
    deadline: float | None = None,
    first_token_deadline: float | None = None,
    priority: int = 0,
    tenant: str = "",
    cache_salt: str | None = None,
) -> Request:
    """An admitted request with its sequences, as engine.submit would build it."""
    params = params or SamplingParams(temperature=0.0, max_tokens=8)
    number = next(_ids)
    limit = params.max_tokens if max_tokens is None else max_tokens
    assert limit is not None
    request = Request(
        id=number,
        key=f"{number:032x}",
        prompt=tuple(prompt),
        params=params,
        seed=params.seed or 0,
        max_tokens=limit,
        arrival=arrival,
        end_token_ids=() if params.ignore_eos else end_token_ids,
        deadline=deadline,
        first_token_deadline=first_token_deadline,
        priority=priority,
        tenant=tenant,
        cache_salt=cache_salt,
    )
    request.sequences = [Sequence(request, index) for index in range(params.num_sequences)]
    if params.use_beam_search:
        request.beams = BeamSearch.of(request)
    return request
