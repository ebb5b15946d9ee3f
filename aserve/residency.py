"""Brings requests into memory and takes them out: first admission, preemption by swap or recompute, and resumption.

scheduler.py decides who and when; this finds the blocks and seats the sequences. A request enters and leaves with all
its unfinished sequences, so that shared prompt blocks stay shared. Never plans tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from aserve.batch import Batch
from aserve.block_manager import BlockManager, BlockTable
from aserve.plan import BlockCopy
from aserve.preemption import CostModel
from aserve.prefix_cache import HashChain, root_hash
from aserve.request import Phase, Request, Sequence
from aserve.seat import Draft, Seat, SharedPrefix

LOOKUP_STRIDE = 64  # blocks hashed ahead of the cache lookup: a cold long prompt costs one stride
MAX_HEADROOM = 4.0  # blocks per running sequence that admissions leave free at most
HEADROOM_RISE, HEADROOM_DECAY = 0.5, 0.02  # per preemption, per admission


class _Place(NamedTuple):
    """How one sequence would enter: blocks found in the cache, or the leader's first ones, and a table's length."""

    sequence: Sequence
    cached: list[int]
    follows: bool
    num_blocks: int


class Residency:
    """Tables of swapped requests, and the block names of every sequence that has been looked at."""

    def __init__(self, blocks: BlockManager, batch: Batch, costs: CostModel) -> None:
        self._blocks = blocks
        self._batch = batch
        self._costs = costs
        self._chains: dict[Sequence, HashChain] = {}
        self._headroom = 1.0
        self.swapped: dict[Request, dict[Sequence, BlockTable]] = {}

    @property
    def num_swapped(self) -> int:
        """Requests in the host pool."""
        return len(self.swapped)

    # in

    def enter(self, request: Request, draft: Draft, *, urgent: bool = False) -> Literal["in", "full", "later"]:
        """Seats the request if slots and blocks allow: "full" where they do not, "later" where the next block of its
        prefix is being computed by another. An urgent one may take the blocks kept spare."""
        unfinished = [sequence for sequence in request.sequences if sequence.phase is not Phase.FINISHED]
        if len(unfinished) > self._batch.num_free_slots or any(sequence.num_inflight for sequence in unfinished):
            return "full"
        room = self._blocks.num_free - (0 if urgent else self._num_spare)
        if request in self.swapped:
            return "in" if self._swap_in(request, unfinished, draft, room) else "full"
        places = self._places(request, unfinished)
        if places is None:
            return "later"
        return "in" if self._compute_in(request, places, draft, room) else "full"

    @property
    def _num_spare(self) -> int:
        """Blocks an admission leaves free, so that those that run may grow: one per running sequence, and more while
        preemptions show that they outgrow it (as SGLang's new-token ratio learns)."""
        return int(self._headroom * len(self._batch.seats))

    def widen(self) -> None:
        """Memory ran out: more is kept spare."""
        self._headroom = min(MAX_HEADROOM, self._headroom + HEADROOM_RISE)

    def _places(self, request: Request, unfinished: list[Sequence]) -> list[_Place] | None:
        """Where each sequence's KV would come from. None while another computes the leader's next block."""
        leader = unfinished[0]
        fresh = not leader.output  # then the other choices fork when the leader's prompt is done
        num_shared = len(request.prompt) // self._blocks.block_size
        places: list[_Place] = []
        for sequence in unfinished[:1] if fresh else unfinished:
            limit = (sequence.num_tokens - 1) // self._blocks.block_size  # the last token is always computed
            cached: list[int] = []
            if self._blocks.prefix_caching and request.params.prompt_logprobs is None:
                cached, name = self._find(sequence, limit)
                if sequence is leader and name is not None and self._batch.is_computing(name):
                    return None
            follows = sequence is not leader and len(cached) < num_shared
            places.append(_Place(sequence, cached, follows, self._blocks.blocks_for(sequence.num_tokens)))
        return places

    def _find(self, sequence: Sequence, limit: int) -> tuple[list[int], bytes | None]:
        """Cached blocks that begin the sequence, at most `limit`, and the name of the next one."""
        chain = self._chain(sequence)
        found: list[int] = []
        while len(found) < limit:
            stop = min(limit, len(found) + LOOKUP_STRIDE)
            names = chain.extend(sequence.request.prompt, sequence.output, stop)
            found += self._blocks.find_prefix(names[len(found) : stop])
            if len(found) < stop:
                return found, names[len(found)]
        return found, None

    def _compute_in(self, request: Request, places: list[_Place], draft: Draft, room: int) -> bool:
        """Seats sequences whose KV is to be computed, beyond what the cache has. False where blocks are short."""
        num_shared = len(request.prompt) // self._blocks.block_size
        need = sum(place.num_blocks - (num_shared if place.follows else len(place.cached)) for place in places)
        need += sum(map(self._blocks.is_idle, {block for place in places for block in place.cached}))
        if need > room:
            return False
        seats: list[Seat] = []
        for place in places:  # every cached block first: allocation must not evict them
            table = BlockTable()
            if not place.follows:
                self._blocks.share(table, place.cached)
            seats.append(self._seat(place.sequence, table))
        leader = seats[0]
        covered = len(leader.table.blocks) * self._blocks.block_size
        shared = SharedPrefix(leader, num_shared * self._blocks.block_size, covered)
        for seat, place in zip(seats, places, strict=True):
            if place.follows:
                self._blocks.share(seat.table, leader.table.blocks[:num_shared])
                seat.shared = leader.shared = shared
            else:
                seat.sequence.num_computed = len(place.cached) * self._blocks.block_size
            self._blocks.allocate(seat.table, place.num_blocks - len(seat.table.blocks))
        if request.first_scheduled is None:
            request.num_cached = leader.sequence.num_computed
        leader.forks = [self._seat(sequence, BlockTable()) for sequence in self._others(request, places)]
        self._take_in(request, seats, leader.forks, draft)
        return True

    def _others(self, request: Request, places: list[_Place]) -> list[Sequence]:
        """Unfinished sequences without a place of their own."""
        placed = {place.sequence for place in places}
        return [each for each in request.sequences if each.phase is not Phase.FINISHED and each not in placed]

    def _swap_in(self, request: Request, unfinished: list[Sequence], draft: Draft, room: int) -> bool:
        """Seats a swapped request with its KV copied back. False where blocks are short."""
        tables = self.swapped[request]
        size = self._blocks.block_size
        group = [(tables[sequence], sequence.num_computed // size) for sequence in unfinished]
        fresh = not unfinished[0].output
        lengths = [self._blocks.blocks_for(sequence.num_tokens) for sequence in unfinished[: 1 if fresh else None]]
        more = [length - len(tables[each].blocks) for length, each in zip(lengths, unfinished, strict=False)]
        if self._blocks.num_swap_in(group) + sum(more) > room:
            return False
        del self.swapped[request]
        draft.swap_in.extend(self._blocks.swap_in(group))
        seats = [self._seat(sequence, tables[sequence]) for sequence in unfinished]
        for seat, count in zip(seats, more, strict=False):
            self._blocks.allocate(seat.table, count)
        if fresh:
            seats, seats[0].forks = seats[:1], seats[1:]
        self._take_in(request, seats, seats[0].forks, draft)
        return True

    def _seat(self, sequence: Sequence, table: BlockTable) -> Seat:
        sequence.slot = self._batch.take_slot()
        return Seat(sequence, sequence.slot, table, self._chain(sequence))

    def _take_in(self, request: Request, seats: list[Seat], forks: list[Seat], draft: Draft) -> None:
        for seat in (*seats, *forks):
            seat.sequence.move(Phase.RUNNING)
            draft.hand_over(seat)
        self._headroom += HEADROOM_DECAY * (1.0 - self._headroom)
        self._batch.add(request, [*seats, *forks])
        self._batch.prefilling.update(dict.fromkeys(seats))

    def _chain(self, sequence: Sequence) -> HashChain:
        chain = self._chains.get(sequence)
        if chain is None:
            root = root_hash(salt=sequence.request.cache_salt)
            chain = self._chains[sequence] = HashChain(root, self._blocks.block_size)
        return chain

    # out

    def preempt(self, request: Request) -> list[BlockCopy]:
        """Unseats a running request: its KV goes to the host pool where that is cheaper and fits, else it is computed
        again later. Returns the copies of the next plan. Draws in flight still count."""
        request.num_preemptions += 1
        seats = self._batch.groups[request][:]
        group = [(seat.table, self._blocks.blocks_for(seat.sequence.num_computed)) for seat in seats]
        if not self._prefers_swap(seats, group):
            self.discard(request)
            return []
        copies = self._blocks.swap_out(group)
        self.swapped[request] = {seat.sequence: seat.table for seat in seats}
        for seat in seats:
            self._batch.remove(seat)
            seat.sequence.move(Phase.SWAPPED)
        return copies

    def _prefers_swap(self, seats: list[Seat], group: list[tuple[BlockTable, int]]) -> bool:
        held = {block for table, keep in group for block in table.blocks[:keep]}
        if not held or len(held) > self._blocks.num_host_free:
            return False
        if seats[0].sequence.request.params.prompt_logprobs is not None:
            return False  # the model thread carries what the next chunk's first logprob needs
        if any(seat.shared is not None and seat.shared.leader is not seat for seat in seats):
            return False  # parts of the shared prefix are not computed yet
        num_uncached = sum(not self._blocks.is_cached(block) for block in held)
        return self._costs.prefers_swap(len(held), num_uncached)

    def discard(self, request: Request, phase: Phase = Phase.WAITING) -> None:
        """Takes a running or swapped request out of both pools; its KV is computed again when it resumes, but for what
        the prefix cache still has."""
        if len(request.prompt_logprobs) < len(request.prompt) - 1:
            request.prompt_logprobs.clear()
        for seat in self._batch.groups.get(request, [])[:]:
            self._batch.remove(seat)
            self._blocks.release(seat.table)
            seat.sequence.move(phase)
            seat.sequence.num_computed = 0
        for sequence, table in self.swapped.pop(request, {}).items():
            self._blocks.release(table)
            if sequence.phase is Phase.SWAPPED:
                sequence.move(Phase.WAITING)
                sequence.num_computed = 0

    def withdraw(self, request: Request) -> None:
        """The KV of a running request is not to be trusted: nobody may share it."""
        for seat in self._batch.groups.get(request, ()):
            self._blocks.withdraw(seat.table)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, wherever it was: nothing of it is kept."""
        self._chains.pop(sequence, None)
        seat = self._batch.seats.get(sequence)
        if seat is not None:
            self._batch.remove(seat)
            self._blocks.release(seat.table)
            return
        tables = self.swapped.get(sequence.request)
        if tables is not None:
            self._blocks.release(tables.pop(sequence))
            if not tables:
                del self.swapped[sequence.request]

    def check_invariants(self) -> None:
        """Raises AssertionError where a sequence's table and its phase disagree."""
        for request, tables in self.swapped.items():
            for sequence, table in tables.items():
                assert sequence.phase is Phase.SWAPPED and sequence.request is request
                assert table.on_host
        for sequence, seat in self._batch.seats.items():
            assert sequence.phase is Phase.RUNNING and sequence.slot == seat.slot
            assert not seat.table.on_host
            assert sequence.num_computed <= sequence.num_tokens + sequence.num_inflight
            waits = seat.shared is not None and seat.shared.leader is not seat
            if seat.table.blocks and not waits:
                assert self._blocks.blocks_for(sequence.num_computed) <= len(seat.table.blocks)
