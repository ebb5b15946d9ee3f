"""The scheduler's own words: a sequence's stay in a slot, what a step in flight will bring, and the events it causes.

Seats are made by residency.py, steps by scheduler.py; its parts change them and nobody else sees them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from aserve.block_manager import BlockTable
from aserve.plan import BlockCopy, BlockDelta, Chunk, SlotMask, SlotUpdate, StepPlan, TokenLogprobs
from aserve.preemption import Choice
from aserve.prefix_cache import HashChain
from aserve.request import FinishReason, Request, Sequence


class Event(NamedTuple):
    """A committed token, an end, or both. A sequence has one event with a finish_reason, its last."""

    sequence: Sequence
    token_id: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


PreemptionCause = Literal["memory", "fairness", "away"]  # away: its reader is, and memory was short


class Move(NamedTuple):
    """A running request was preempted, why and how, or one that had been runs again."""

    request: Request
    change: Literal["preempted", "resumed"]
    cause: PreemptionCause | None = None
    choice: Choice | None = None


class SharedPrefix:
    """Prompt blocks that several choices of a resumed request recompute once: `leader` fills them, the others wait.

    Invariant: positions below `covered` are computed or planned to be.
    """

    __slots__ = ("covered", "leader", "length")

    def __init__(self, leader: Seat, length: int, covered: int) -> None:
        self.leader = leader
        self.length = length
        self.covered = covered


class Seat:
    """One stay of a sequence in a slot, from its SlotUpdate until it ends or is preempted.

    A preempted seat is not `active`, but draws in flight for it still count; they do not once it is not `live`.
    """

    __slots__ = (
        "active",
        "candidates",
        "chain",
        "computing",
        "constraint",
        "ends",
        "forked_at",
        "forks",
        "full_at",
        "grow_at",
        "limit",
        "live",
        "look_at",
        "num_published",
        "output",
        "sequence",
        "shared",
        "slot",
        "table",
    )

    def __init__(self, sequence: Sequence, slot: int, table: BlockTable, chain: HashChain) -> None:
        request = sequence.request
        self.sequence = sequence
        self.output = sequence.output
        self.constraint = sequence.constraint
        self.slot = slot
        self.table = table
        self.chain = chain
        self.ends = frozenset(request.end_token_ids + request.params.stop_token_ids)
        self.limit = request.max_tokens
        self.full_at = len(request.prompt) + self.limit - 1  # num_computed once its last draw is planned
        self.grow_at = -1  # position that needs a block, or a copy of one, before it is computed
        self.look_at = self.limit  # output length at which it ends or has a full block to publish
        self.num_published = 0  # leading blocks already offered to the prefix cache
        self.computing: dict[bytes, None] = {}  # names of blocks that its chunks in flight fill
        self.forks: list[Seat] = []  # choices that will draw from this seat's prompt row
        self.shared: SharedPrefix | None = None
        self.candidates: tuple[tuple[int, float], ...] | None = None  # a beam's best next tokens, until all have theirs
        self.forked_at: int | None = None  # first entry of a beam's table that its slot does not know
        self.active = True
        self.live = True

    def update(self) -> SlotUpdate:
        """Hands the slot to the sequence on the model thread."""
        request = self.sequence.request
        params = request.params
        tokens = (*request.prompt, *self.output) if params.needs_token_counts else None
        return SlotUpdate(
            self.slot,
            params,
            request.seed,
            self.sequence.index,
            len(request.prompt),
            request.end_token_ids,
            tokens,
            request.num_top,
        )


class Row(NamedTuple):
    """A planned chunk: `seat` computes up to position `end` and fills the blocks of `names`; then `drawing` draw."""

    seat: Seat
    end: int
    names: list[bytes]
    drawing: tuple[Seat, ...]

    def keep_prompt_logprobs(self, found: list[TokenLogprobs]) -> None:
        """They come in order; a prompt that is computed again brings them again."""
        request = self.seat.sequence.request
        if self.seat.active:
            request.prompt_logprobs.extend(found[: len(request.prompt) - 1 - len(request.prompt_logprobs)])


class Draft:
    """A plan in the making, and what its result will mean."""

    __slots__ = (
        "blocks",
        "chunks",
        "copies",
        "decoding",
        "handed",
        "masks",
        "num_pairs",
        "num_tokens",
        "rows",
        "slots",
        "swap_in",
    )

    def __init__(self) -> None:
        self.decoding: tuple[Seat, ...] = ()
        self.num_tokens = 0
        self.num_pairs = 0.0  # of a chunk's tokens with those before them
        self.rows: list[Row] = []
        self.chunks: list[Chunk] = []
        self.slots: list[SlotUpdate] = []
        self.blocks: list[BlockDelta] = []
        self.swap_in: list[BlockCopy] = []
        self.copies: list[BlockCopy] = []
        self.handed: list[Seat] = []  # seats whose slots this plan hands over
        self.masks: list[SlotMask] = []

    def hand_over(self, seat: Seat) -> None:
        """The seat's slot, and the blocks it has so far, go to the model thread with this plan."""
        self.handed.append(seat)
        self.slots.append(seat.update())
        if seat.table.blocks:
            self.blocks.append(BlockDelta(seat.slot, 0, tuple(seat.table.blocks)))

    def mask(self, seats: Iterable[Seat]) -> None:
        """Asks for the masks of the draws that these seats are planned to make."""
        for seat in seats:
            if seat.constraint is not None and seat.limit:
                self.masks.append(SlotMask(seat.slot, seat.constraint.mask()))

    def build(self, number: int, decodes: tuple[int, ...], swap_out: list[BlockCopy]) -> StepPlan:
        """The plain data for the model thread."""
        return StepPlan(
            number=number,
            decodes=decodes,
            chunks=tuple(self.chunks),
            slots=tuple(self.slots),
            blocks=tuple(self.blocks),
            swap_out=tuple(swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple(self.copies),
            masks=tuple(self.masks),
        )


class Step(NamedTuple):
    """A plan in flight: whose draws its result holds, in order (`decoding`, then each row's `drawing`)."""

    number: int
    decoding: tuple[Seat, ...]
    rows: list[Row]
    handed: list[Seat]
    swapped_out: list[Request]
    num_tokens: int
    num_pairs: float  # of its chunks' tokens with those before them
    swaps: bool  # blocks move between the pools

    def drawing(self) -> list[Seat]:
        """Every seat that draws, in order; those whose limit is 0 only end."""
        return [*self.decoding, *(seat for row in self.rows for seat in row.drawing)]


class SchedulerStats(NamedTuple):
    """Counts for metrics; from num_preemptions on they only grow."""

    num_waiting: int
    num_running: int  # sequences
    num_swapped: int
    num_paused: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_preemptions: int
    num_swaps: int
    num_blocks_out: int  # copied to the host pool, and back
    num_blocks_in: int
    num_yields: int  # preemptions for a tenant that was under-served; the others were for want of memory
    num_prompt_tokens: int  # of admitted requests
    num_prefix_hit_tokens: int  # of those, found in the prefix cache
