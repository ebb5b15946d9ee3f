"""Which running requests give way to a waiting one whose tenant holds less than its share.

scheduler.py asks before it plans a step; the policy says which tenant loses a place. Preempts nothing itself.
"""

from __future__ import annotations

from aserve.batch import Batch
from aserve.block_manager import BlockManager
from aserve.request import Request

MAX_YIELDS = 4  # requests that make room for one
MAX_TIMES = 2  # a request preempted that often keeps its place


def find_yielding(request: Request, batch: Batch, blocks: BlockManager, num_reserved: int) -> list[Request] | None:
    """The requests to preempt, maybe none, so that the waiting `request` can start in this step.

    None where it has no claim, or its claim cannot be met: then nobody is preempted in vain. `num_reserved` blocks
    stay free beside its own. The oldest of the highest priority keeps its place.
    """
    tenant = batch.loser(request)
    if tenant is None:
        return None
    width = len(request.sequences)
    num_slots = width - batch.num_free_slots
    num_blocks = blocks.blocks_for(len(request.prompt)) + num_reserved - blocks.num_free
    surplus = batch.num_by_tenant[tenant] - batch.num_by_tenant.get(request.tenant, 0) - width
    yielding: list[Request] = []
    for candidate in batch.newest_first():
        if num_slots <= 0 and num_blocks <= 0:
            break
        if (
            candidate.tenant == tenant
            and candidate.priority >= request.priority
            and candidate.num_preemptions < MAX_TIMES
        ):
            seats = batch.groups[candidate]
            surplus -= len(seats)
            if surplus < 0 or len(yielding) == MAX_YIELDS:
                return None
            yielding.append(candidate)
            num_slots -= len(seats)
            held = {block for seat in seats for block in seat.table.blocks}
            num_blocks -= sum(blocks.num_owners(block) <= len(seats) for block in held)
    return yielding if num_slots <= 0 and num_blocks <= 0 else None
