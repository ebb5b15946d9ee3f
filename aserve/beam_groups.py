"""Beam searches that run: each is one request, whose first sequences are its live beams, best first.

Part of batch.py and results.py. Every live beam computes its last token as a chunk of one and asks for the best next
ones; once those of the whole group are in, `take` ranks them and forks the sequences by their block tables, with
copy-on-write: nothing is computed twice, and what beams share is stored once. So a group is planned only with no draw
outstanding, whatever the pipeline's depth; others do not wait for it. Never allocates: batch.py grows the tables.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from aserve.beams import LiveBeam
from aserve.block_manager import BlockManager, num_common
from aserve.plan import TokenLogprobs
from aserve.request import FinishReason, Request, Sequence
from aserve.seat import Seat


class BeamGroups:
    """Live beams whose next token may be computed.

    Invariant: the seats of a group are in the order of its sequences, the live beams first. One that is not live (a
    search begins with one, and stop strings may end many) keeps its slot and holds no blocks.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self.ready: dict[Seat, None] = {}

    def take(self, seat: Seat, found: TokenLogprobs, group: Items[Seat]) -> bool:
        """The best next tokens of one beam of the `group` are there. True where the search is over."""
        search = seat.sequence.request.beams
        assert search is not None
        seat.candidates = found.top
        best = [each.candidates for each in group[: len(search.live)] if each.candidates is not None]
        if len(best) < len(search.live):
            return False
        if not search.step(best):
            return True
        self._fork(group, search.live)
        self.ready.update(dict.fromkeys(group[: len(search.live)]))
        return False

    def _fork(self, group: Items[Seat], live: list[LiveBeam]) -> None:
        """Makes the first seats those of the `live` beams, each with the table of its parent: the table itself for one
        child, for others a table that is left over, made equal. The rest of the seats hold nothing."""
        before = [(seat.table, seat.table.blocks[:], seat.output, seat.chain.hashes) for seat in group]
        parents = {beam.parent for beam in live}
        spare = [table for place, (table, *_) in enumerate(before) if place not in parents]
        for place, seat in enumerate(group):
            seat.candidates = seat.shared = None
            if place >= len(live):
                seat.table = spare.pop()
                self._blocks.release(seat.table)
                _hold(seat, [], [])
                continue
            beam = live[place]
            table, _, output, hashes = before[beam.parent]
            if beam.parent in parents:
                parents.remove(beam.parent)
                seat.table = table
            else:
                seat.table = spare.pop()
                self._blocks.fork(seat.table, table)
            _hold(seat, [*output, beam.tokens[-1]], hashes[:])
            seat.sequence.num_computed = seat.grow_at = seat.sequence.num_tokens - 1
            seat.num_published = seat.grow_at // self._blocks.block_size
            seat.forked_at = num_common(before[place][1], seat.table.blocks)


def _hold(seat: Seat, output: list[int], hashes: list[bytes]) -> None:
    """The seat's sequence has another output from now on."""
    seat.sequence.output = seat.output = output
    seat.sequence.num_computed = 0
    seat.chain.hashes = hashes


def settle(request: Request, reason: FinishReason | None = None) -> list[tuple[Sequence, FinishReason]]:
    """A search is over, or ends where it is for the `reason`: its sequences are the best beams now, and why each ends.
    Those past n are not shown and hold nothing."""
    search = request.beams
    assert search is not None
    if reason is not None:
        search.cut(reason)
    beams = search.beams()[: request.params.n]
    ends: list[tuple[Sequence, FinishReason]] = []
    for place, sequence in enumerate(request.sequences):
        beam = beams[place] if place < len(beams) else None
        sequence.output = list(beam.token_ids) if beam is not None else []
        if beam is not None and beam.finish_reason == "stop" and search.ends_with(beam.token_ids[-1]):
            sequence.stop_token = beam.token_ids[-1]
        ends.append((sequence, reason or (beam.finish_reason if beam is not None else "stop")))
    return ends
