"""Huge pages behind packed weights: gathered by one thread that ends, and never for a weight that is gone."""

from __future__ import annotations

import weakref

import pytest
import torch

from aserve_kernels import huge_pages
from aserve_kernels.linear import PackedLinear

pytestmark = pytest.mark.skipif(huge_pages._libc() is None, reason="the system has no madvise")


@pytest.fixture
def collapsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that are gathered."""
    addresses: list[int] = []
    monkeypatch.setattr(huge_pages, "_QUIET", 0.01)
    monkeypatch.setattr(huge_pages, "_collapse", lambda address, size: addresses.append(address))
    wait()
    return addresses


def wait() -> None:
    thread = huge_pages._thread
    if thread is not None:
        thread.join(30)
        assert not thread.is_alive()


def test_large_weights_are_gathered_and_small_ones_are_not(collapsed: list[int]) -> None:
    linears = [PackedLinear(torch.randn(rows, 1024)) for rows in (512, 8, 512)]
    wait()
    large = [torch.ops.mkldnn.data_ptr(linears[index].packed) for index in (0, 2)]
    assert collapsed == large
    assert huge_pages._thread is None


def test_a_weight_that_was_freed_meanwhile_is_left_alone(collapsed: list[int]) -> None:
    gone = torch.ops.mkldnn._reorder_linear_weight(torch.randn(512, 1024), 64)
    with huge_pages._lock:
        huge_pages._queue.append(weakref.ref(gone))
        del gone
    linear = PackedLinear(torch.randn(512, 1024))
    wait()
    assert collapsed == [torch.ops.mkldnn.data_ptr(linear.packed)]


def test_gathering_changes_no_number() -> None:
    weight = torch.randn(1024, 1024)
    linear = PackedLinear(weight)
    wait()
    assert linear.packed is not None
    assert torch.equal(linear.packed.to_dense(), weight)
