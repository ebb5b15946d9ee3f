"""The sequences that hold slots, and what each computes next: decodes, then chunks, under one token budget.

scheduler.py seats and unseats them; this plans their tokens, grows their tables and publishes their full blocks. It
never decides who runs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from aserve.beam_groups import BeamGroups
from aserve.block_manager import BlockManager
from aserve.plan import BlockDelta, Chunk
from aserve.policy import Policy
from aserve.prefix_cache import slice_tokens
from aserve.request import Request, Sequence
from aserve.seat import Draft, Row, Seat
from aserve.waiting import Rank, rank_of


class Batch:
    """Running requests by rank, their seats, and the slots left.

    Invariant: an active seat is decoding, prefilling, waiting to fork from its leader's prompt row, or has every draw
    it may make in flight; or it is of a group in `beams`.
    """

    def __init__(self, blocks: BlockManager, policy: Policy, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._policy = policy
        self._block_size = blocks.block_size
        self._free_slots = list(range(max_num_seqs))
        self._running: list[tuple[Rank, Request]] = []
        self.groups: dict[Request, list[Seat]] = {}
        self.num_by_tenant: Counter[str] = Counter()  # seats
        self.seats: dict[Sequence, Seat] = {}
        self.prefilling: dict[Seat, None] = {}
        self.beams = BeamGroups(blocks)
        self._computing: dict[bytes, None] = {}  # names of blocks that chunks in flight fill
        self._decoding: dict[Seat, None] = {}
        self._constrained: dict[Seat, None] = {}  # those of them whose next mask follows from their last draw
        self._held: dict[Seat, None] = {}  # those of these that cannot be planned yet
        self._changed = False
        self._decode_seats: tuple[Seat, ...] = ()
        self._decode_slots: tuple[int, ...] = ()

    # who is in

    @property
    def num_free_slots(self) -> int:
        """Slots that may be handed out."""
        return len(self._free_slots)

    def take_slot(self) -> int:
        """The lowest free slot: the model thread pads less."""
        return heapq.heappop(self._free_slots)

    def add(self, request: Request, seats: list[Seat]) -> None:
        """The request runs, one seat per unfinished sequence."""
        insort(self._running, (rank_of(request), request))
        self.groups[request] = seats
        self.num_by_tenant[request.tenant] += len(seats)
        for seat in seats:
            self.seats[seat.sequence] = seat

    def remove(self, seat: Seat) -> None:
        """The seat's slot is free from the next plan on. Its table stays with the caller."""
        seat.active = False
        sequence = seat.sequence
        request = sequence.request
        del self.seats[sequence]
        self.prefilling.pop(seat, None)
        self.beams.ready.pop(seat, None)
        if seat in self._decoding:
            self._leave_decoding(seat)
        for name in seat.computing:
            self._computing.pop(name, None)
        sequence.slot = None
        heapq.heappush(self._free_slots, seat.slot)
        self.num_by_tenant[request.tenant] -= 1
        if not self.num_by_tenant[request.tenant]:
            del self.num_by_tenant[request.tenant]
        group = self.groups[request]
        group.remove(seat)
        if not group:
            del self.groups[request]
            del self._running[bisect_left(self._running, (rank_of(request), request))]

    def newest_first(self) -> Iterator[Request]:
        """Running requests, those of lowest priority and then the newest first, without the one that must progress."""
        return (self._running[index][1] for index in range(len(self._running) - 1, 0, -1))

    def victim(self) -> Request:
        """The running request to preempt where memory is short: one whose reader is away, or of those of lowest
        priority the newest, or the newest of the tenant that the policy names. With more than one running never the
        oldest of highest priority."""
        for request in self.newest_first():
            if request.detached:
                return request
        last = self._running[-1][1]
        tenant = self._policy.loser(None, self.num_by_tenant)
        for request in self.newest_first() if tenant is not None else ():
            if request.priority != last.priority:
                break
            if request.tenant == tenant:
                return request
        return last

    def loser(self, request: Request) -> str | None:
        """The tenant that has to make room for the waiting request."""
        return self._policy.loser(request, self.num_by_tenant)

    @property
    def num_due(self) -> int:
        """Tokens that those who run could compute in one step."""
        left = sum(seat.sequence.num_tokens - seat.sequence.num_computed for seat in self.prefilling)
        return len(self._decoding) + len(self.beams.ready) + left

    # decodes

    def growing(self) -> list[Seat]:
        """Decoding seats whose next position needs a block of its own, and beams whose next may."""
        if self._constrained or self._held:
            held = {
                seat: None
                for seat in self._constrained
                if seat.sequence.num_inflight or (seat.constraint is not None and not seat.constraint.ready)
            }
            if held != self._held:
                self._held = held
                self._changed = True
        self._collect_decodes()
        growing = [seat for seat in self._decode_seats if seat.sequence.num_computed == seat.grow_at]
        if self.beams.ready:
            growing += self.beams.ready
        return growing

    def _collect_decodes(self) -> None:
        """Makes the tuples anew where a seat has come, gone, or is held back since."""
        if self._changed:
            seats = [seat for seat in self._decoding if seat not in self._held] if self._held else self._decoding
            self._decode_seats = tuple(seats)
            self._decode_slots = tuple([seat.slot for seat in self._decode_seats])  # a list is quicker than a generator
            self._changed = False

    def num_growth(self, growing: list[Seat]) -> int:
        """Blocks that grow() would take: the last of those that copy one shared block may keep it."""
        count = len(growing)
        sharers: Counter[int] = Counter()
        for seat in growing:
            index = seat.grow_at // self._block_size
            if index < len(seat.table.blocks):
                sharers[seat.table.blocks[index]] += 1
        for block, num_sharers in sharers.items():
            count -= num_sharers >= self._blocks.num_owners(block)
        return count

    def grow(self, draft: Draft, growing: list[Seat]) -> None:
        """Gives each seat a block it may write: a new one, or its own copy of a shared one."""
        size = self._block_size
        for seat in growing:
            blocks = seat.table.blocks
            index = seat.grow_at // size
            if seat.forked_at is not None:
                draft.blocks.append(BlockDelta(seat.slot, seat.forked_at, tuple(blocks[seat.forked_at :])))
                seat.forked_at = None
            if index == len(blocks):
                self._blocks.allocate(seat.table, 1)
                draft.blocks.append(BlockDelta(seat.slot, index, (blocks[index],)))
            elif self._blocks.num_owners(blocks[index]) > 1:
                draft.copies.append(self._blocks.copy_on_write(seat.table, index))
                draft.blocks.append(BlockDelta(seat.slot, index, (blocks[index],)))
            seat.grow_at = (index + 1) * size
            if seat.sequence.request.beams is None:
                self._policy.charge(seat.sequence.request, output=size)

    def plan_decodes(self, draft: Draft) -> tuple[int, ...]:
        """Every decoding seat computes its last token and draws, a constrained one only once its last draw is
        committed. Returns the slots, the same tuple while unchanged."""
        self._collect_decodes()  # seats may have been preempted since growing()
        draft.decoding = self._decode_seats
        slots = self._decode_slots
        draft.num_tokens = len(slots)
        if self._constrained:  # before those that make their last draw leave
            draft.mask(draft.decoding)
        for seat in draft.decoding:
            sequence = seat.sequence
            sequence.num_inflight += 1
            sequence.num_computed = num_computed = sequence.num_computed + 1
            if num_computed == seat.full_at:
                self._leave_decoding(seat)
        return slots

    def _leave_decoding(self, seat: Seat) -> None:
        del self._decoding[seat]
        self._constrained.pop(seat, None)
        self._changed = True

    # chunks

    def plan_beams(self, draft: Draft, budget: int) -> None:
        """Every live beam of the groups that are ready computes its last token; they go before prompts, as decodes."""
        for seat in list(self.beams.ready):
            self.plan_chunk(draft, seat, budget)
            self._policy.charge(seat.sequence.request, output=1)
        self.beams.ready.clear()

    def plan_prefills(self, draft: Draft, budget: int) -> None:
        """Continues prompts in order of admission while tokens of the budget are left."""
        if not self.prefilling:
            return
        ready = [seat for seat in self.prefilling if self._is_ready(seat)]
        for seat in ready:
            if draft.num_tokens >= budget:
                return
            self.plan_chunk(draft, seat, budget)

    def _is_ready(self, seat: Seat) -> bool:
        """False while the seat waits for prompt blocks that another choice computes. Takes over from one that ended."""
        shared = seat.shared
        if shared is None or shared.leader is seat:
            return True
        if shared.covered >= shared.length:
            seat.sequence.num_computed = shared.length
            seat.shared = None
            return True
        if shared.leader.active:
            return False
        shared.leader = seat
        seat.sequence.num_computed = shared.covered
        return True

    def plan_chunk(self, draft: Draft, seat: Seat, budget: int) -> None:
        """Computes as many of the seat's tokens as the budget has left; draws where they are the last."""
        sequence = seat.sequence
        request = sequence.request
        start, total = sequence.num_computed, sequence.num_tokens
        end = min(total, start + budget - draft.num_tokens)
        tokens = slice_tokens(request.prompt, seat.output, start, end)
        names = self._announce(seat, start, end)
        drawing = self._draw_from(draft, seat, end) if end == total else ()
        draft.chunks.append(Chunk(seat.slot, start, tokens, tuple(each.slot for each in drawing if each.limit)))
        draft.rows.append(Row(seat, end, names, drawing))
        draft.num_tokens += end - start
        draft.num_pairs += (end - start) * (end + start) / 2
        sequence.num_computed = end
        if seat.shared is not None:
            seat.shared.covered = end
        if not (request.num_preemptions or seat.output):  # computing it again is no service
            self._policy.charge(request, prompt=end - start)

    def _draw_from(self, draft: Draft, seat: Seat, end: int) -> tuple[Seat, ...]:
        """The seat's last row is planned: it and the choices that fork from it draw, and decode from the next step."""
        self.prefilling.pop(seat, None)
        if seat.sequence.request.beams is not None:
            seat.sequence.num_inflight += 1
            return (seat,)
        for fork in seat.forks:
            self._blocks.share(fork.table, seat.table.blocks)
            draft.blocks.append(BlockDelta(fork.slot, 0, tuple(fork.table.blocks)))
            fork.sequence.num_computed = end
            fork.chain.adopt(seat.chain, end // self._block_size)
        drawing = (seat, *seat.forks)
        shares_tail = bool(seat.forks) and end % self._block_size
        for each in drawing:
            each.sequence.num_inflight += 1
            each.grow_at = end if shares_tail else len(each.table.blocks) * self._block_size
            each.num_published = end // self._block_size if each is not seat else each.num_published
            self._look_again(each, end)
            if end < each.full_at:
                self._decoding[each] = None
                self._changed = True
                if each.constraint is not None:
                    self._constrained[each] = None
        seat.forks = []
        draft.mask(drawing)
        return drawing

    # prefix cache

    def committed(self, seat: Seat) -> None:
        """The seat's output has reached `look_at`: publishes the block that has filled, if one has."""
        if seat.active and self._blocks.prefix_caching:
            num_committed = seat.sequence.num_tokens - 1  # the last token has been drawn but not computed
            self.publish(seat, num_committed)
            self._look_again(seat, num_committed)
        else:
            seat.look_at = seat.limit  # a preempted seat's draws in flight publish nothing, and may be its last

    def _look_again(self, seat: Seat, num_tokens: int) -> None:
        """Sets look_at to the output length that fills the next block after `num_tokens` positions, or to the last."""
        if self._blocks.prefix_caching:
            full = (num_tokens // self._block_size + 1) * self._block_size
            seat.look_at = min(seat.limit, full - len(seat.sequence.request.prompt) + 1)

    def is_computing(self, name: bytes) -> bool:
        """True where a chunk in flight computes the block: it can be shared once that is committed."""
        return name in self._computing

    def _announce(self, seat: Seat, start: int, end: int) -> list[bytes]:
        """Names the blocks that a chunk fills, for others to wait for."""
        if not self._blocks.prefix_caching:
            return []
        first, last = start // self._block_size, end // self._block_size
        names = seat.chain.extend(seat.sequence.request.prompt, seat.output, last)[first:last]
        names = [name for name in names if name not in self._computing]
        self._computing.update(dict.fromkeys(names))
        seat.computing.update(dict.fromkeys(names))
        return names

    def settle(self, row: Row) -> None:
        """A chunk was committed: its blocks are published where the seat still holds them."""
        seat = row.seat
        for name in row.names:
            if name in seat.computing:
                del seat.computing[name]
                self._computing.pop(name, None)
        if seat.active:
            self.publish(seat, row.end)

    def publish(self, seat: Seat, num_tokens: int) -> None:
        """The KV of the seat's first `num_tokens` positions is committed: its full blocks may be shared."""
        if not self._blocks.prefix_caching:
            return
        num_blocks = num_tokens // self._block_size
        names = seat.chain.extend(seat.sequence.request.prompt, seat.output, num_blocks)
        for index in range(seat.num_published, num_blocks):
            self._blocks.publish(seat.table.blocks[index], names[index])
        seat.num_published = max(seat.num_published, num_blocks)
