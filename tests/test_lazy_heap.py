from __future__ import annotations

import random

from aserve.lazy_heap import LazyHeap


def test_items_come_by_key_then_by_arrival() -> None:
    heap: LazyHeap[str] = LazyHeap()
    for key, item in ((2, "c"), (1, "a"), (1, "b")):
        heap.push(key, item)
    order = []
    while (head := heap.peek()) is not None:
        order.append(head[1])
        heap.discard(head[1])
    assert order == ["a", "b", "c"]


def test_pushing_again_moves_an_item() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push(1, "a")
    heap.push(2, "b")
    heap.push(3, "a")
    assert heap.peek() == (2, "b") and len(heap) == 2


def test_it_equals_a_sorted_list_and_keeps_no_garbage() -> None:
    rng = random.Random(0)
    heap: LazyHeap[int] = LazyHeap()
    keys: dict[int, int] = {}
    for _ in range(5000):
        item = rng.randrange(50)
        if rng.random() < 0.5:
            keys[item] = rng.randrange(1000)
            heap.push(keys[item], item)
        else:
            keys.pop(item, None)
            heap.discard(item)
        head = heap.peek()
        assert len(heap) == len(keys) and (item in heap) == (item in keys)
        assert (head[0] if head else None) == min(keys.values(), default=None)
        assert len(heap._run) + len(heap._heap) <= 2 * len(keys) + 17


def test_keys_that_come_in_order_make_no_heap() -> None:
    heap: LazyHeap[int] = LazyHeap()
    for item in range(100):
        heap.push(item, item)
    assert not heap._heap
    heap.push(5, 77)  # out of order, and moved
    order = []
    while (head := heap.peek()) is not None:
        order.append(head)
        heap.discard(head[1])
    assert order == sorted([*((item, item) for item in range(100) if item != 77), (5, 77)])
