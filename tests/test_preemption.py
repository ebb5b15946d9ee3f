from __future__ import annotations

from aserve.preemption import CostModel


def test_the_cheaper_way_back_is_taken() -> None:
    costs = CostModel("auto", block_size=16, block_bytes=2**20, copy_rate=2**30, prefill_rate=1600.0)
    # ten blocks: 20 MiB over 1 GiB/s is 0.02 s; 160 tokens at 1600 a second are 0.1 s
    assert costs.swap_seconds(10) < 0.02 and costs.recompute_seconds(10) == 0.1
    assert costs.prefers_swap(10, num_uncached=10)
    assert not costs.prefers_swap(10, num_uncached=1)  # the prefix cache has the rest


def test_a_fixed_mode_asks_no_cost() -> None:
    assert CostModel("swap", block_bytes=2**40).prefers_swap(10, 0)
    assert not CostModel("recompute").prefers_swap(10, 10)


def test_the_prefill_rate_follows_large_steps_only() -> None:
    costs = CostModel(prefill_rate=1000.0)
    costs.observe_prefill(8, 0.1)
    costs.observe_prefill(1000, 0.0)
    assert costs.prefill_rate == 1000.0
    for _ in range(100):
        costs.observe_prefill(512, 0.1)
    assert abs(costs.prefill_rate - 5120.0) < 1.0
