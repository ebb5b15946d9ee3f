"""Headers of safetensors files: what they say is what is read, and one that lies is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aserve.errors import ConfigError
from aserve.models.stored import read_header

TENSORS = {"first": torch.ones(4, 3), "second": torch.zeros(5, dtype=torch.bfloat16), "none": torch.empty(0, 2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "some.safetensors", metadata={"format": "pt"})
    return tmp_path / "some.safetensors"


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def test_tensors_are_found_where_they_lie(path: Path) -> None:
    found = read_header(path)
    assert {name: stored.shape for name, stored in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    data = path.read_bytes()
    for name, stored in found.items():
        assert stored.num_bytes == TENSORS[name].nbytes
        raw = data[stored.offset : stored.offset + stored.num_bytes]
        assert raw == TENSORS[name].flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"data_offsets": [0, 48]}, "begins within another"),
        ({"data_offsets": [1000, 1048]}, "is cut short"),
        ({"data_offsets": [-48, 0]}, "place"),
        ({"data_offsets": [48, 0]}, "place"),
        ({"data_offsets": [0, 40]}, "does not have 40 bytes"),
        ({"data_offsets": [0.0, 48.0]}, "place"),
        ({"data_offsets": [1, 2, 3]}, "place"),
        ({"data_offsets": None}, "place"),
        ({"shape": [8, 3]}, "does not have"),
        ({"shape": [-4, -3]}, "shape"),
        ({"shape": ["a", 3]}, "shape"),
        ({"dtype": "F64"}, "does not have"),
        ({"dtype": 5}, "type 5"),
    ],
)
def test_an_entry_that_lies_is_refused(path: Path, entry: dict[str, Any], reason: str) -> None:
    name = "second" if entry.get("data_offsets") == [0, 48] else "first"  # where the first one begins, another does
    rewrite(path, lambda header: header | {name: header["first"] | entry})
    with pytest.raises(ConfigError, match=reason) as caught:
        read_header(path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("header", [[1, 2], "text", {"first": 5}])
def test_a_header_of_another_form_is_refused(path: Path, header: Any) -> None:
    rewrite(path, lambda _: header)
    with pytest.raises(ConfigError, match="is damaged"):
        read_header(path)


def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.safetensors").symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"some\.safetensors is damaged"):
        read_header(tmp_path / "some.safetensors")
