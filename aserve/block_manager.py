"""Who owns which block of KV memory, in two pools: device and host.

residency.py, batch.py and beam_groups.py own blocks through BlockTables; the runner executes the copies this returns,
in plan order, so a freed block may be handed out at once. O(1) per block. Never touches the memory itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from aserve.plan import BlockCopy
from aserve.prefix_cache import PrefixCache


class OutOfBlocksError(RuntimeError):
    """More blocks were taken than are free: the caller did not ask `num_free` first. A bug, never load."""


class BlockTable:
    """The blocks of one sequence, in order of position; device blocks, or host blocks while `on_host`."""

    __slots__ = ("blocks", "on_host")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.on_host = False


def num_common(blocks: Sequence[int], others: Sequence[int]) -> int:
    """Blocks that both begin with."""
    pairs = zip(blocks, others, strict=False)
    return next((index for index, (block, other) in enumerate(pairs) if block != other), min(len(blocks), len(others)))


class BlockManager:
    """Reference counts of both pools, and the prefix cache over the device pool.

    Invariant: every device block is free, idle in the prefix cache, or owned by as many tables as its count says; every
    host block is free or owned. Only full blocks whose KV is committed are published, so no shared block is written.
    """

    def __init__(
        self, num_device_blocks: int, num_host_blocks: int = 0, block_size: int = 16, *, prefix_caching: bool = True
    ) -> None:
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._cache = PrefixCache()
        self._free = list(range(num_device_blocks - 1, -1, -1))
        self._count = [0] * num_device_blocks
        self._host_free = list(range(num_host_blocks - 1, -1, -1))
        self._host_count = [0] * num_host_blocks
        self._tables: set[BlockTable] = set()  # those that own blocks; for check_invariants

    @property
    def num_free(self) -> int:
        """Device blocks that may be taken: free ones and idle cached ones."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_used(self) -> int:
        """Device blocks owned by tables."""
        return self.num_device_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Device blocks with a name in the prefix cache, owned or idle."""
        return len(self._cache)

    @property
    def num_host_free(self) -> int:
        """Host blocks that may be taken."""
        return len(self._host_free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    # taking and giving back

    def allocate(self, table: BlockTable, count: int) -> None:
        """Appends `count` device blocks of unknown content."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} free")
        table.blocks.extend([self._take() for _ in range(count)])
        self._tables.add(table)

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._cache.evict()
        self._count[block] = 1
        return block

    def share(self, table: BlockTable, blocks: Iterable[int]) -> None:
        """Appends blocks that already hold KV (found in the cache, or another table's) and references them."""
        count = self._count
        for block in blocks:
            if count[block] == 0:
                self._cache.revive(block)
            count[block] += 1
            table.blocks.append(block)
        if table.blocks:
            self._tables.add(table)

    def fork(self, table: BlockTable, source: BlockTable) -> None:
        """Makes a device table equal to another; what both begin with is left as it is."""
        common = num_common(table.blocks, source.blocks)
        for block in reversed(table.blocks[common:]):
            self._drop(block)
        del table.blocks[common:]
        self.share(table, source.blocks[common:])

    def num_owners(self, block: int) -> int:
        """Tables that own the device block: with more than one, copy before writing."""
        return self._count[block]

    def copy_on_write(self, table: BlockTable, index: int) -> BlockCopy:
        """Replaces a shared entry by a block of the table's own; the runner copies the content."""
        source = table.blocks[index]
        if not self.num_free:
            raise OutOfBlocksError("no block free for copy-on-write")
        target = self._take()
        table.blocks[index] = target
        self._drop(source)
        return BlockCopy(source, target)

    def num_unshared(self, group: Iterable[tuple[BlockTable, int]]) -> int:
        """Device blocks that unshare would take: the last of those that share a block may keep it."""
        sharers = Counter(block for table, num_full in group for block in table.blocks[num_full:])
        return sum(count - (self._count[block] == count) for block, count in sharers.items())

    def unshare(self, group: Iterable[tuple[BlockTable, int]]) -> list[BlockCopy]:
        """Makes what follows each table's first `num_full` blocks its own, since it will be written."""
        return [
            self.copy_on_write(table, index)
            for table, num_full in group
            for index in range(num_full, len(table.blocks))
            if self._count[table.blocks[index]] > 1
        ]

    def release(self, table: BlockTable) -> None:
        """Gives every block back, the last first: the cache then evicts from the end of a prefix."""
        drop = self._drop_host if table.on_host else self._drop
        for block in reversed(table.blocks):
            drop(block)
        table.blocks.clear()
        table.on_host = False
        self._tables.discard(table)

    def _drop(self, block: int) -> None:
        self._count[block] -= 1
        if self._count[block] == 0 and not self._cache.rest(block):
            self._free.append(block)

    def _drop_host(self, block: int) -> None:
        self._host_count[block] -= 1
        if self._host_count[block] == 0:
            self._host_free.append(block)

    # prefix cache

    def find_prefix(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached beginning of `names`; not referenced yet."""
        return self._cache.find(names) if self.prefix_caching else []

    def is_idle(self, block: int) -> bool:
        """True where sharing the block would take it out of `num_free`."""
        return self._count[block] == 0

    def is_cached(self, block: int) -> bool:
        """True where the prefix cache names the block."""
        return self._cache.has_block(block)

    def publish(self, block: int, name: bytes) -> None:
        """Names a full block whose KV is committed, for others to share."""
        if self.prefix_caching:
            self._cache.publish(block, name)

    def withdraw(self, table: BlockTable) -> None:
        """Takes back the names of a running table's blocks: their KV is not to be trusted."""
        for block in table.blocks:
            self._cache.withdraw(block)

    def clear_prefix_cache(self) -> None:
        """Forgets every cached prefix; running sequences keep their blocks."""
        self._free.extend(self._cache.clear())

    # swapping: a group is every table of one request with the number of blocks that count

    def num_swap_out(self, group: Iterable[tuple[BlockTable, int]]) -> int:
        """Host blocks that swap_out would take."""
        return len({block for table, keep in group for block in table.blocks[:keep]})

    def swap_out(self, group: Iterable[tuple[BlockTable, int]]) -> list[BlockCopy]:
        """Moves each table's first `keep` blocks to the host pool, shared ones once, and frees the rest."""
        group = list(group)
        if self.num_swap_out(group) > self.num_host_free:
            raise OutOfBlocksError("no host blocks left to swap out")
        host_of: dict[int, int] = {}
        for table, keep in group:
            moved = []
            for block in table.blocks[:keep]:
                if block not in host_of:
                    host_of[block] = self._host_free.pop()
                self._host_count[host_of[block]] += 1
                moved.append(host_of[block])
            self.release(table)
            table.blocks = moved
            table.on_host = True
            self._tables.add(table)
        return [BlockCopy(block, host) for block, host in host_of.items()]

    def num_swap_in(self, group: Iterable[tuple[BlockTable, int]]) -> int:
        """Device blocks that swap_in would take."""
        shared: set[int] = set()
        own = 0
        for table, num_full in group:
            shared.update(table.blocks[:num_full])
            own += max(0, len(table.blocks) - num_full)
        return len(shared) + own

    def swap_in(self, group: Iterable[tuple[BlockTable, int]]) -> list[BlockCopy]:
        """Brings tables back. Their first `num_full` blocks stay shared; later ones will be written, so each table gets
        its own copy."""
        group = list(group)
        if self.num_swap_in(group) > self.num_free:
            raise OutOfBlocksError("no device blocks left to swap in")
        copies: list[BlockCopy] = []
        device_of: dict[int, int] = {}
        for table, num_full in group:
            hosted = list(table.blocks)
            moved = []
            for index, host in enumerate(hosted):
                if index < num_full and host in device_of:
                    self._count[device_of[host]] += 1
                    moved.append(device_of[host])
                    continue
                block = self._take()
                copies.append(BlockCopy(host, block))
                moved.append(block)
                if index < num_full:
                    device_of[host] = block
            self.release(table)
            table.blocks = moved
            self._tables.add(table)
        return copies

    # invariants

    def check_invariants(self) -> None:
        """Raises AssertionError where a block is lost, owned without a count, or free and in use."""
        self._cache.check_invariants()
        device: Counter[int] = Counter()
        host: Counter[int] = Counter()
        for table in self._tables:
            assert len(set(table.blocks)) == len(table.blocks), "a table holds one block twice"
            (host if table.on_host else device).update(table.blocks)
        free = set(self._free)
        assert len(free) == len(self._free), "a device block is free twice"
        for block in range(self.num_device_blocks):
            assert self._count[block] == device[block], f"device block {block}: counted and owned differ"
            places = (block in free) + self._cache.is_idle(block) + (self._count[block] > 0)
            assert places == 1, f"device block {block} is in {places} of free, idle and owned"
            assert not (block in free and self._cache.has_block(block)), f"free block {block} has a stale name"
        host_free = set(self._host_free)
        assert len(host_free) == len(self._host_free), "a host block is free twice"
        for block in range(self.num_host_blocks):
            assert self._host_count[block] == host[block], f"host block {block}: counted and owned differ"
            assert (block in host_free) != (self._host_count[block] > 0), f"host block {block} is lost"
