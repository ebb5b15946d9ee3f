from __future__ import annotations

import random

import pytest

from aserve.preemption import CostModel


def test_the_cheaper_way_back_is_taken() -> None:
    costs = CostModel("auto", block_size=16, block_bytes=2**20, copy_rate=2**30, prefill_rate=1600.0)
    # ten blocks: 20 MiB over 1 GiB/s is 0.02 s; 160 tokens at 1600 a second are 0.1 s
    choice = costs.choose(10, 99, 160, 160)
    assert choice.kind == "swap" and choice.swap_seconds < 0.02 and choice.recompute_seconds == 0.1
    assert costs.choose(10, 99, 16, 160).kind == "recompute"  # the prefix cache has the rest


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_without_room_on_the_host_it_is_recomputed(mode: str) -> None:
    costs = CostModel(mode, block_bytes=1)  # type: ignore[arg-type]
    assert costs.choose(10, 10, 160, 160).kind == "swap"
    assert costs.choose(10, 9, 160, 160).kind == "recompute"


def test_a_fixed_mode_asks_no_cost() -> None:
    assert CostModel("swap", block_bytes=2**40).choose(10, 10, 0, 160).kind == "swap"
    assert CostModel("recompute").choose(10, 10, 160, 160).kind == "recompute"


def test_the_rate_follows_large_chunks_only() -> None:
    costs = CostModel(prefill_rate=1000.0)
    costs.observe_chunks(8, 32.0, 0.1)
    costs.observe_chunks(1000, 0.0, 0.0)
    assert costs.recompute_seconds(100, 100) == 0.1
    for _ in range(100):
        costs.observe_chunks(512, 512 * 256.0, 0.1)
    assert costs.recompute_seconds(512, 512) == pytest.approx(0.1, rel=0.02)


def test_one_measured_step_outweighs_the_default() -> None:
    costs = CostModel(prefill_rate=5000.0)
    costs.observe_chunks(8192, 0.0, 0.2)
    assert costs.recompute_seconds(8192, 8192) == pytest.approx(0.2, rel=0.02)


def test_what_decodes_take_anyway_is_not_counted() -> None:
    costs = CostModel()
    for _ in range(50):
        costs.observe_decode(0.05)
        costs.observe_chunks(256, 0.0, 0.05 + 0.02)
    assert costs.recompute_seconds(256, 256) == pytest.approx(0.02, rel=0.02)


def test_long_contexts_cost_more_per_token() -> None:
    draw = random.Random(0)
    costs = CostModel()
    for _ in range(200):
        start, count = draw.choice([0, 2000, 16_000]), draw.choice([128, 512, 2048])
        pairs = count * (start + count / 2)
        noise = draw.uniform(0.95, 1.05)
        costs.observe_chunks(count, pairs, (30e-6 * count + 1e-9 * pairs) * noise)
    assert costs.per_token == pytest.approx(30e-6, rel=0.05)
    assert costs.per_pair == pytest.approx(1e-9, rel=0.15)
    assert costs.recompute_seconds(32_000, 32_000) == pytest.approx(30e-6 * 32_000 + 1e-9 * 32_000**2 / 2, rel=0.1)


def test_survival_follows_what_victims_find_at_their_return() -> None:
    costs = CostModel()
    for _ in range(60):
        costs.observe_survival(8, 8)
    assert costs.survival > 0.95
    for _ in range(60):
        costs.observe_survival(-3, 8)
    assert costs.survival < 0.05
