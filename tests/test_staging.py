"""Host memory of a step's copies: it is used again after the step, and never before."""

from __future__ import annotations

import numpy as np
import torch

from aserve.worker.staging import Staging

CUDA = torch.device("cuda")  # the buffers' part runs anywhere


def test_on_a_cpu_everything_is_where_it_should_be() -> None:
    staging = Staging(torch.device("cpu"))
    array, tensor = np.arange(3), torch.ones(2)
    assert staging.pinned(array).data_ptr() == array.ctypes.data
    assert staging.to_host(tensor) is tensor
    assert staging.hand_over() == []


def test_a_step_in_flight_keeps_its_buffers() -> None:
    staging = Staging(CUDA)
    first = staging.pinned(np.arange(5))
    held = staging.hand_over()
    second = staging.to_host(torch.full((2, 3), 7.0))
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second.tolist() == [[7.0] * 3] * 2
    assert first.data_ptr() != second.data_ptr()
    assert len(held) == len(staging.hand_over()) == 1


def test_a_step_that_is_done_gives_its_buffers_to_the_next() -> None:
    staging = Staging(CUDA)
    places = set()
    for number in range(20):  # two in flight
        held = staging.hand_over()
        places.add(staging.pinned(np.full(600, number)).data_ptr())
        staging.to_host(torch.zeros(4, dtype=torch.bool))
        if number:
            staging.give_back(held)
    assert len(places) <= 4
    large = staging.pinned(np.arange(5000, dtype=np.uint8).reshape(2, 2500))
    assert large.shape == (2, 2500)
    assert large[1, 0] == 2500 % 256
    assert staging.pinned(np.empty(0, dtype=np.int64)).shape == (0,)


def test_what_a_failed_step_took_is_the_next_ones_to_give_back() -> None:
    staging = Staging(CUDA)
    lost = staging.pinned(np.arange(3)).data_ptr()
    kept = staging.pinned(np.arange(3)).data_ptr()  # of the step after it
    staging.give_back(staging.hand_over())
    assert {staging.pinned(np.arange(3)).data_ptr() for _ in range(2)} == {lost, kept}
