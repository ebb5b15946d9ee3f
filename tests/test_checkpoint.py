"""Tensors by name from files: mapped views, and copies through a ring of buffers in any size and dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aserve.errors import ConfigError
from aserve.models.checkpoint import Checkpoint, DeviceCopier, PickledCheckpoint, dtype_of

TENSORS = {
    "wide": torch.randn(37, 11),
    "half": torch.randn(5, 3).bfloat16(),
    "one": torch.randn(()),
    "none": torch.empty(0, 4),
    "whole": torch.arange(6),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    save_file(TENSORS, path)
    return path


@pytest.mark.parametrize("name", ["wide", "half", "one", "none"])
def test_a_view_is_what_was_saved_and_outlives_its_checkpoint(path: Path, name: str) -> None:
    view = Checkpoint([path]).view(name)
    assert view.dtype == TENSORS[name].dtype
    assert torch.equal(view, TENSORS[name])


def test_integers_are_no_weights(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whole is I64"):
        Checkpoint([path]).view("whole")
    torch.save(TENSORS, tmp_path / "some.bin")
    with pytest.raises(ConfigError, match=r"whole is torch\.int64"):
        PickledCheckpoint([tmp_path / "some.bin"]).view("whole")


@pytest.mark.parametrize("buffer_bytes", [8, 64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_through_the_ring_are_whole_after_a_flush(path: Path, buffer_bytes: int, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint([path])
    copier = DeviceCopier(torch.device("cpu"), buffer_bytes=buffer_bytes)
    outs = {name: torch.full(TENSORS[name].shape, 7, dtype=dtype) for name in ("wide", "half", "none")}
    try:
        for name, out in outs.items():
            stored = checkpoint.tensors[name]
            copier.copy(stored, dtype_of(name, stored), out)
        copier.flush()
    finally:
        copier.close()
    for name, out in outs.items():
        assert torch.equal(out, TENSORS[name].to(dtype))


def test_a_file_that_shrinks_while_it_is_read_is_named(path: Path) -> None:
    stored = Checkpoint([path]).tensors["wide"]
    path.write_bytes(path.read_bytes()[: stored.offset + 8])
    copier = DeviceCopier(torch.device("cpu"), buffer_bytes=64)
    try:
        with pytest.raises(ConfigError, match=r"some\.safetensors was cut short"):
            copier.copy(stored, torch.float32, torch.empty(37, 11))
            copier.flush()
    finally:
        copier.close()


class Harm:
    """Pickled, it asks to call print."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("ran",)


def test_code_in_a_pickle_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.ones(2), "harm": Harm()}, tmp_path / "some.bin")
    with pytest.raises(ConfigError, match=r"some\.bin cannot be read") as caught:
        PickledCheckpoint([tmp_path / "some.bin"])
    assert "\n" not in caught.value.message
    assert capsys.readouterr().out == ""
