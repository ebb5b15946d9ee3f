"""Brings requests into memory and takes them out: first admission, preemption by swap or recompute, and resumption.

scheduler.py decides who and when; this finds the blocks and seats the sequences. A request enters and leaves with all
its unfinished sequences, so that shared prompt blocks stay shared. Never plans tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from aserve.batch import Batch
from aserve.block_manager import BlockManager, BlockTable, num_common
from aserve.plan import BlockCopy
from aserve.preemption import Choice, CostModel
from aserve.prefix_cache import HashChain, root_hash
from aserve.request import Phase, Request, Sequence
from aserve.seat import Draft, Seat, SharedPrefix

LOOKUP_STRIDE = 64  # blocks hashed ahead of the cache lookup: a cold long prompt costs one stride
MAX_HEADROOM = 4.0  # blocks per running sequence that admissions leave free at most
HEADROOM_RISE, HEADROOM_DECAY = 0.5, 0.02  # per preemption, per admission


Entry = Literal["in", "no slots", "no blocks", "later"]  # later: another computes the next block of its prefix


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
        self._dropped: dict[Request, tuple[int, int]] = {}  # cached blocks others held, and its own, when preempted
        self.swapped: dict[Request, dict[Sequence, BlockTable]] = {}
        self.parked: dict[Request, dict[Sequence, BlockTable]] = {}  # in either pool, without slots

    @property
    def num_swapped(self) -> int:
        """Requests in the host pool."""
        return len(self.swapped)

    def holds(self, request: Request) -> bool:
        """True where the request has memory, in either pool, and no slot."""
        return request in self.swapped or request in self.parked

    # in

    def enter(self, request: Request, draft: Draft, *, urgent: bool = False) -> Entry:
        """Seats the request if slots and blocks allow. An urgent one may take the blocks kept spare."""
        unfinished = [sequence for sequence in request.sequences if sequence.phase is not Phase.FINISHED]
        if len(unfinished) > self._batch.num_free_slots or any(sequence.num_inflight for sequence in unfinished):
            return "no slots"
        room = self._blocks.num_free - (0 if urgent else self._num_spare)
        placed = [sequence for sequence in unfinished if sequence.output] or unfinished[:1]  # the others will fork
        if self.holds(request):
            return "in" if self._bring_back(request, unfinished, len(placed), draft, room) else "no blocks"
        num_shared = self._num_shared(request, placed)
        places = self._places(request, placed, num_shared)
        if places is None:
            return "later"
        return "in" if self._compute_in(request, places, num_shared, draft, room) else "no blocks"

    def _num_shared(self, request: Request, placed: list[Sequence]) -> int:
        """Whole blocks that all of them begin with: of the prompt, and of the output that beams have in common."""
        length = len(request.prompt)
        if request.beams is not None and len(placed) > 1:
            outputs = [sequence.output for sequence in placed]
            length += num_common(min(outputs), max(outputs))
        return length // self._blocks.block_size

    @property
    def _num_spare(self) -> int:
        """Blocks an admission leaves free, so that those that run may grow: one per running sequence, and more while
        preemptions show that they outgrow it (as SGLang's new-token ratio learns)."""
        return int(self._headroom * len(self._batch.seats))

    def widen(self) -> None:
        """Memory ran out: more is kept spare."""
        self._headroom = min(MAX_HEADROOM, self._headroom + HEADROOM_RISE)

    def _places(self, request: Request, placed: list[Sequence], num_shared: int) -> list[_Place] | None:
        """Where each sequence's KV would come from. None while another computes the leader's next block."""
        leader = placed[0]
        places: list[_Place] = []
        for sequence in placed:
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

    def _compute_in(self, request: Request, places: list[_Place], num_shared: int, draft: Draft, room: int) -> bool:
        """Seats sequences whose KV is to be computed, beyond what the cache has. False where blocks are short."""
        need = sum(place.num_blocks - (num_shared if place.follows else len(place.cached)) for place in places)
        need += sum(map(self._blocks.is_idle, {block for place in places for block in place.cached}))
        if need > room:
            return False
        if request in self._dropped:
            others, own = self._dropped.pop(request)
            self._costs.observe_survival(len({block for place in places for block in place.cached}) - others, own)
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

    def _bring_back(
        self, request: Request, unfinished: list[Sequence], num_placed: int, draft: Draft, room: int
    ) -> bool:
        """Seats a parked request, or a swapped one with its KV copied back. False where blocks are short."""
        parked = request in self.parked
        held = self.parked if parked else self.swapped
        tables = held[request]
        size = self._blocks.block_size
        group = [(tables[sequence], sequence.num_computed // size) for sequence in unfinished]
        lengths = [self._blocks.blocks_for(sequence.num_tokens) for sequence in unfinished[:num_placed]]
        more = [length - len(tables[each].blocks) for length, each in zip(lengths, unfinished, strict=False)]
        if (self._blocks.num_unshared if parked else self._blocks.num_swap_in)(group) + sum(more) > room:
            return False
        del held[request]
        if parked:
            draft.copies.extend(self._blocks.unshare(group))
        else:
            draft.swap_in.extend(self._blocks.swap_in(group))
        seats = [self._seat(sequence, tables[sequence]) for sequence in unfinished]
        for seat, count in zip(seats, more, strict=False):
            self._blocks.allocate(seat.table, count)
        seats, seats[0].forks = seats[:num_placed], seats[num_placed:]
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

    def preempt(self, request: Request) -> tuple[Choice, list[BlockCopy]]:
        """Unseats a running request: its KV goes to the host pool where that is cheaper and fits, else it is computed
        again later. Returns how, and the copies of the next plan. Draws in flight still count."""
        request.num_preemptions += 1
        seats = self._batch.groups[request]
        self._unwind_beams(seats)
        tables = {seat.sequence: seat.table for seat in seats}
        choice = self._choose(request, tables, swappable=self._may_swap(request))
        if choice.kind == "recompute":
            self.discard(request)
            return choice, []
        copies = self._blocks.swap_out(self._computed(tables))
        self._unseat(request, Phase.SWAPPED)
        self.swapped[request] = tables
        return choice, copies

    # requests whose readers are behind

    def park(self, request: Request) -> None:
        """Unseats a running request. Its KV stays until memory is short, where it can be moved then."""
        if not self._may_swap(request):
            self.discard(request, Phase.PAUSED)
            return
        seats = self._batch.groups[request]
        self._unwind_beams(seats)
        self.parked[request] = {seat.sequence: seat.table for seat in seats}
        self._unseat(request, Phase.PAUSED)

    def unpark(self, request: Request) -> None:
        """The request may run again, from where its KV is."""
        tables = self.parked.get(request, {})
        on_host = any(table.on_host for table in tables.values())
        for sequence in request.sequences:
            if sequence.phase is Phase.PAUSED:
                sequence.move(Phase.SWAPPED if on_host else Phase.WAITING)
        if on_host:
            self.swapped[request] = self.parked.pop(request)

    def evict_parked(self, keep: Request | None = None) -> tuple[Request, Choice, list[BlockCopy]] | None:
        """Memory is short: the request parked first that is still in the device pool leaves it, as a victim would.
        None where there is none but `keep`."""
        for request, tables in self.parked.items():
            if request is not keep and not any(table.on_host for table in tables.values()):
                break
        else:
            return None
        request.num_preemptions += 1
        paused = all(sequence.phase is Phase.PAUSED for sequence in tables)
        choice = self._choose(request, tables, swappable=paused)
        if choice.kind == "swap":
            return request, choice, self._blocks.swap_out(self._computed(tables))
        self.discard(request)
        return request, choice, []

    def _computed(self, tables: dict[Sequence, BlockTable]) -> list[tuple[BlockTable, int]]:
        """The tables with the number of blocks that hold KV."""
        return [(table, self._blocks.blocks_for(sequence.num_computed)) for sequence, table in tables.items()]

    def _unseat(self, request: Request, phase: Phase) -> None:
        for seat in self._batch.groups.get(request, [])[:]:
            self._batch.remove(seat)
            seat.sequence.move(phase)

    def _unwind_beams(self, seats: list[Seat]) -> None:
        """Beams come back to where their search is: what they draw in flight, or have drawn before others of their
        group, is found again from their last tokens."""
        for seat in seats:
            sequence = seat.sequence
            if sequence.request.beams is not None:
                sequence.num_inflight = 0
                sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)

    def _choose(self, request: Request, tables: dict[Sequence, BlockTable], *, swappable: bool) -> Choice:
        owned = Counter(block for table, keep in self._computed(tables) for block in table.blocks[:keep])
        cached = [block for block in owned if self._blocks.is_cached(block)]
        own = sum(self._blocks.num_owners(block) <= owned[block] for block in cached)
        num_lost = len(owned) - len(cached) + round(own * (1.0 - self._costs.survival))
        computed = [sequence.num_computed for sequence in tables]
        num_lost = min(num_lost * self._blocks.block_size, sum(computed))
        room = self._blocks.num_host_free if swappable else 0
        choice = self._costs.choose(len(owned), room, num_lost, max(computed))
        if choice.kind == "recompute" and own:
            self._dropped[request] = (len(cached) - own, own)
        return choice

    def _may_swap(self, request: Request) -> bool:
        """False where a running request's state is more than its blocks."""
        if request.params.prompt_logprobs is not None:
            return False  # the model thread carries what the next chunk's first logprob needs
        # or else parts of the shared prefix are not computed yet
        return all(seat.shared is None or seat.shared.leader is seat for seat in self._batch.groups[request])

    def discard(self, request: Request, phase: Phase = Phase.WAITING) -> None:
        """Takes a running, parked or swapped request out of both pools; its KV is computed again when it resumes, but
        for what the prefix cache still has."""
        if len(request.prompt_logprobs) < len(request.prompt) - 1:
            request.prompt_logprobs.clear()
        seats = self._batch.groups.get(request, [])[:]
        self._unwind_beams(seats)
        for seat in seats:
            self._batch.remove(seat)
            self._blocks.release(seat.table)
            seat.sequence.move(phase)
            seat.sequence.num_computed = 0
        for sequence, table in (*self.swapped.pop(request, {}).items(), *self.parked.pop(request, {}).items()):
            self._blocks.release(table)
            sequence.num_computed = 0
            if sequence.phase is Phase.SWAPPED:
                sequence.move(Phase.WAITING)

    def withdraw(self, request: Request) -> None:
        """The KV of a running or parked request is not to be trusted: nobody may share it."""
        for seat in self._batch.groups.get(request, ()):
            self._blocks.withdraw(seat.table)
        for table in self.parked.get(request, {}).values():
            if not table.on_host:
                self._blocks.withdraw(table)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, wherever it was: nothing of it is kept."""
        self._chains.pop(sequence, None)
        self._dropped.pop(sequence.request, None)
        seat = self._batch.seats.get(sequence)
        if seat is not None:
            self._batch.remove(seat)
            self._blocks.release(seat.table)
            return
        for held in (self.swapped, self.parked):
            tables = held.get(sequence.request)
            if tables is not None:
                self._blocks.release(tables.pop(sequence))
                if not tables:
                    del held[sequence.request]

    def check_invariants(self) -> None:
        """Raises AssertionError where a sequence's table and its phase disagree."""
        for request, tables in self.swapped.items():
            for sequence, table in tables.items():
                assert sequence.phase is Phase.SWAPPED and sequence.request is request
                assert table.on_host
        for request, tables in self.parked.items():
            assert request not in self.swapped and request not in self._batch.groups
            for sequence, table in tables.items():
                assert sequence.request is request
                assert sequence.phase is Phase.PAUSED or (sequence.phase is Phase.WAITING and not table.on_host)
        for sequence, seat in self._batch.seats.items():
            assert sequence.phase is Phase.RUNNING and sequence.slot == seat.slot
            assert not seat.table.on_host
            assert sequence.num_computed <= sequence.num_tokens + sequence.num_inflight
            waits = seat.shared is not None and seat.shared.leader is not seat
            if seat.table.blocks and not waits:
                assert self._blocks.blocks_for(sequence.num_computed) <= len(seat.table.blocks)
