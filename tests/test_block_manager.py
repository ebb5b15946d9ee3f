from __future__ import annotations

import random

import pytest

from aserve.block_manager import BlockManager, BlockTable, OutOfBlocksError
from aserve.plan import BlockCopy
from aserve.prefix_cache import HashChain, root_hash


def filled(blocks: BlockManager, count: int) -> BlockTable:
    table = BlockTable()
    blocks.allocate(table, count)
    return table


def names(tokens: range, block_size: int = 4, salt: str | None = None) -> list[bytes]:
    return HashChain(root_hash(salt=salt), block_size).extend(tokens, (), len(tokens) // block_size)


def test_blocks_are_owned_once_and_come_back_on_release() -> None:
    blocks = BlockManager(4, 0, 4)
    first, second = filled(blocks, 2), filled(blocks, 2)
    assert not set(first.blocks) & set(second.blocks)
    assert blocks.num_free == 0 and blocks.num_used == 4
    blocks.release(first)
    assert blocks.num_free == 2
    blocks.release(second)
    blocks.check_invariants()
    assert blocks.num_free == 4


def test_taking_more_blocks_than_are_free_takes_none() -> None:
    blocks = BlockManager(2, 0, 4)
    table = BlockTable()
    with pytest.raises(OutOfBlocksError):
        blocks.allocate(table, 3)
    assert table.blocks == [] and blocks.num_free == 2


def test_a_shared_block_is_copied_before_writing_and_the_last_owner_keeps_it() -> None:
    blocks = BlockManager(4, 0, 4)
    parent, child = filled(blocks, 2), BlockTable()
    blocks.share(child, parent.blocks)
    shared = parent.blocks[1]
    assert blocks.num_owners(shared) == 2
    assert blocks.copy_on_write(child, 1) == BlockCopy(shared, child.blocks[1])
    assert child.blocks[1] != shared and blocks.num_owners(shared) == 1
    blocks.check_invariants()
    blocks.release(parent)
    assert blocks.num_owners(child.blocks[0]) == 1
    blocks.release(child)
    assert blocks.num_used == 0


def test_a_table_becomes_equal_to_another_and_keeps_what_both_begin_with() -> None:
    blocks = BlockManager(8, 0, 4)
    source = filled(blocks, 3)
    table = BlockTable()
    blocks.share(table, source.blocks[:1])
    blocks.allocate(table, 2)
    blocks.fork(table, source)
    assert table.blocks == source.blocks and blocks.num_used == 3
    assert [blocks.num_owners(block) for block in source.blocks] == [2, 2, 2]
    blocks.fork(table, source)
    assert [blocks.num_owners(block) for block in source.blocks] == [2, 2, 2]
    longer = filled(blocks, 4)
    blocks.fork(longer, source)
    blocks.check_invariants()
    assert longer.blocks == source.blocks and blocks.num_used == 3
    for each in (source, table, longer):
        blocks.release(each)
    assert blocks.num_used == 0


def test_a_released_block_is_found_again_by_its_name() -> None:
    blocks = BlockManager(4, 0, 4)
    table = filled(blocks, 2)
    found = names(range(8))
    owned = list(table.blocks)
    for block, name in zip(owned, found, strict=True):
        blocks.publish(block, name)
    blocks.release(table)
    assert blocks.num_free == 4 and blocks.num_cached == 2
    assert blocks.find_prefix(found) == owned
    again = BlockTable()
    blocks.share(again, blocks.find_prefix(found))
    assert blocks.num_free == 2
    blocks.check_invariants()


def test_reusing_a_block_drops_its_name() -> None:
    blocks = BlockManager(2, 0, 4)
    table = filled(blocks, 2)
    found = names(range(8))
    for block, name in zip(table.blocks, found, strict=True):
        blocks.publish(block, name)
    blocks.release(table)
    filled(blocks, 1)  # evicts the end of the prefix first
    assert len(blocks.find_prefix(found)) == 1
    filled(blocks, 1)
    assert blocks.find_prefix(found) == [] and blocks.num_cached == 0
    blocks.check_invariants()


def test_the_block_idle_longest_is_evicted_first() -> None:
    blocks = BlockManager(2, 0, 4)
    old, new = filled(blocks, 1), filled(blocks, 1)
    old_names, new_names = names(range(4)), names(range(4, 8))
    blocks.publish(old.blocks[0], old_names[0])
    blocks.publish(new.blocks[0], new_names[0])
    blocks.release(new)
    blocks.release(old)
    touched = BlockTable()
    blocks.share(touched, blocks.find_prefix(new_names))
    blocks.release(touched)
    filled(blocks, 1)
    assert blocks.find_prefix(new_names) and not blocks.find_prefix(old_names)


def test_the_first_block_of_a_name_keeps_it() -> None:
    blocks = BlockManager(4, 0, 4)
    first, second = filled(blocks, 1), filled(blocks, 1)
    name = names(range(4))[0]
    blocks.publish(first.blocks[0], name)
    blocks.publish(second.blocks[0], name)
    assert blocks.find_prefix([name]) == first.blocks
    blocks.release(second)
    blocks.check_invariants()


def test_withdrawn_blocks_are_not_shared_any_more() -> None:
    blocks = BlockManager(4, 0, 4)
    table = filled(blocks, 1)
    name = names(range(4))[0]
    blocks.publish(table.blocks[0], name)
    blocks.withdraw(table)
    assert blocks.find_prefix([name]) == []
    blocks.release(table)
    blocks.check_invariants()


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(4, 0, 4, prefix_caching=False)
    table = filled(blocks, 1)
    name = names(range(4))[0]
    blocks.publish(table.blocks[0], name)
    assert blocks.find_prefix([name]) == [] and blocks.num_cached == 0


def test_clearing_the_cache_keeps_running_tables() -> None:
    blocks = BlockManager(4, 0, 4)
    running, gone = filled(blocks, 1), filled(blocks, 1)
    blocks.publish(running.blocks[0], names(range(4))[0])
    blocks.publish(gone.blocks[0], names(range(4, 8))[0])
    blocks.release(gone)
    blocks.clear_prefix_cache()
    assert blocks.num_cached == 0 and blocks.num_used == 1 and blocks.num_free == 3
    blocks.check_invariants()


def test_a_shared_block_is_swapped_once_and_stays_shared() -> None:
    blocks = BlockManager(6, 6, 4)
    parent, child = filled(blocks, 2), BlockTable()
    blocks.share(child, parent.blocks[:1])
    blocks.allocate(child, 1)
    group = [(parent, 2), (child, 2)]
    assert blocks.num_swap_out(group) == 3
    assert len(blocks.swap_out(group)) == 3
    assert blocks.num_used == 0 and blocks.num_host_free == 3
    blocks.check_invariants()
    assert blocks.num_swap_in([(parent, 1), (child, 1)]) == 3
    assert len(blocks.swap_in([(parent, 1), (child, 1)])) == 3
    assert parent.blocks[0] == child.blocks[0] and parent.blocks[1] != child.blocks[1]
    assert blocks.num_host_free == 6
    blocks.check_invariants()


def test_a_shared_block_that_will_be_written_comes_back_as_copies() -> None:
    blocks = BlockManager(6, 6, 4)
    parent, child = filled(blocks, 1), BlockTable()
    blocks.share(child, parent.blocks)
    assert len(blocks.swap_out([(parent, 1), (child, 1)])) == 1
    copies = blocks.swap_in([(parent, 0), (child, 0)])
    assert len(copies) == 2 and copies[0].source == copies[1].source
    assert parent.blocks != child.blocks
    blocks.check_invariants()


def test_swapping_out_frees_blocks_that_hold_nothing_yet() -> None:
    blocks = BlockManager(4, 4, 4)
    table = filled(blocks, 3)
    assert len(blocks.swap_out([(table, 1)])) == 1
    assert blocks.num_free == 4 and len(table.blocks) == 1
    blocks.release(table)
    assert blocks.num_host_free == 4
    blocks.check_invariants()


def test_swapping_without_room_changes_nothing() -> None:
    blocks = BlockManager(4, 1, 4)
    table = filled(blocks, 2)
    with pytest.raises(OutOfBlocksError):
        blocks.swap_out([(table, 2)])
    assert len(table.blocks) == 2 and not table.on_host
    blocks.check_invariants()


@pytest.mark.parametrize("seed", range(20))
def test_invariants_hold_over_random_use(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(12, 8, 4)
    tables: list[BlockTable] = []
    for _ in range(300):
        action = rng.randrange(6)
        table = rng.choice(tables) if tables else None
        if action == 0 or table is None:
            tables.append(filled(blocks, rng.randint(0, min(3, blocks.num_free))))
        elif action == 1:
            blocks.release(table)
            tables.remove(table)
        elif action == 2 and not table.on_host:
            tables.append(BlockTable())
            blocks.share(tables[-1], table.blocks)
        elif action == 3 and not table.on_host and table.blocks and blocks.num_free:
            if blocks.num_owners(table.blocks[-1]) > 1:
                blocks.copy_on_write(table, len(table.blocks) - 1)
        elif action == 4 and not table.on_host:
            for block in table.blocks:
                blocks.publish(block, rng.randbytes(16))
        elif action == 5:
            group = [(table, len(table.blocks))]
            if table.on_host and blocks.num_swap_in(group) <= blocks.num_free:
                blocks.swap_in(group)
            elif not table.on_host and blocks.num_swap_out(group) <= blocks.num_host_free:
                blocks.swap_out(group)
        blocks.check_invariants()
    for table in tables:
        blocks.release(table)
    assert blocks.num_used == 0 and blocks.num_host_free == 8
