"""Builds tokenizer.json from a GGUF's vocabulary, as the `tokenizers` library reads it.

gguf_convert.py calls it once per model. A GGUF names a kind of tokenizer (SentencePiece BPE, byte-level BPE) and lists
tokens, scores, types and perhaps merges; normalizer, splitting and decoding follow from the kind. The JSON is written
directly: building and saving a tokenizer object takes several times as long.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aserve.errors import ConfigError
from aserve.models.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_END_OF_TURN = ("<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>")

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {  # tokenizer.ggml.pre -> how text is cut before merging
    "default": _GPT2_SPLIT,
    "gpt-2": _GPT2_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_LLAMA3_KINDS = frozenset({"llama-bpe", "llama3", "llama-v3"})  # whole words skip merging; BOS unless said otherwise


def write_tokenizer(file: GGUFFile, target: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja."""
    metadata = file.metadata
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError(f"{file.path} has no tokenizer; give one with --tokenizer", param="tokenizer")
    if kind == "llama":
        body = _sentencepiece(file, tokens)
    elif kind == "gpt2":
        body = _byte_level(file, tokens)
    else:
        raise ConfigError(
            f"{file.path} has a tokenizer of kind {kind!r}; 'llama' and 'gpt2' are read: give one with --tokenizer",
            param="tokenizer",
        )
    names = {
        f"{ours}_token": tokens[index]
        for ours, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None and index < len(tokens)
    }
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or _pre(file) in _LLAMA3_KINDS))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(file, tokens, set(names.values())),
        **body,
    }
    document["post_processor"] = _template(
        names.get("bos_token") if add_bos else None, names.get("eos_token") if add_eos else None, tokens, kind
    )
    (target / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    settings = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get("context_length"),
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def end_token_ids(file: GGUFFile) -> list[int]:
    """The tokens that end a text: end of sequence, and end of turn where the chat template writes one."""
    metadata = file.metadata
    found = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template", "")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    found += [tokens.index(text) for text in _END_OF_TURN if text in template and text in tokens]
    return sorted({index for index in found if index is not None})


def _pre(file: GGUFFile) -> str:
    return str(file.metadata.get("tokenizer.ggml.pre", "default"))


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """SentencePiece BPE with byte fallback; Gemma's normalizer or Llama's, which prefixes a space."""
    gemma = file.architecture.startswith("gemma")
    if gemma:  # runs of spaces are listed as spaces, while text is normalized to U+2581 before it is matched
        tokens = [_SPACE * len(token) if token.strip(" ") == "" else token for token in tokens]
    prefix = not gemma and file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    metaspace = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "first" if prefix else "never",
        "split": False,
    }
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE} if gemma else None,
        "pre_tokenizer": split if gemma else metaspace,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            {token: index for index, token in enumerate(tokens)},
            _stated_merges(file) or _implied_merges(tokens, None if gemma else file.metadata["tokenizer.ggml.scores"]),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _byte_level(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """Byte-level BPE as GPT-2's, cut by the pattern that `tokenizer.ggml.pre` names."""
    pre = _pre(file)
    if pre not in _SPLITS:
        raise ConfigError(
            f"{file.path} splits text by {pre!r}, which is not known here: give a tokenizer with --tokenizer",
            param="tokenizer",
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "NFC"} if _SPLITS[pre] == _QWEN2_SPLIT else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(
            {token: index for index, token in enumerate(tokens)},
            _stated_merges(file) or [],
            ignore_merges=pre in _LLAMA3_KINDS,
        ),
    }


def _bpe(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def _stated_merges(file: GGUFFile) -> list[tuple[str, str]] | None:
    stated = file.metadata.get("tokenizer.ggml.merges")
    return [tuple(merge.split(" ", 1)) for merge in stated] if stated else None


def _implied_merges(tokens: list[str], scores: list[float] | None) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best result first: by score, or by place where scores is None.

    SentencePiece merges the pair whose result scores highest; a ranked list of pairs does the same. Of one result,
    the pair with the longer left part goes first.
    """
    known = set(tokens)
    ranked: list[tuple[float, int, str, str]] = []
    merges: list[tuple[str, str]] = []
    for place, token in enumerate(tokens):
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in known and (right := token[cut:]) in known:
                if scores is None:
                    merges.append((left, right))
                else:
                    ranked.append((-scores[place], -cut, left, right))
    if scores is None:
        return merges
    ranked.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in ranked]


def _added_tokens(file: GGUFFile, tokens: list[str], named: set[str]) -> list[dict[str, Any]]:
    """Tokens matched whole in the text: control tokens, which are special, and the ones their author defined."""
    types = file.metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL or token in named,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if (kind in (_CONTROL, _USER_DEFINED) or token in named) and token.strip(" ")  # runs of spaces are respelled
    ]


def _template(bos: str | None, eos: str | None, tokens: list[str], kind: str) -> dict[str, Any] | None:
    """What `add_special_tokens` adds around a text."""
    if bos is None and eos is None:
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False} if kind == "gpt2" else None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        special = [{"SpecialToken": {"id": name, "type_id": type_id}} for name in (bos, eos) if name is not None]
        middle: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        return special[: bos is not None] + middle + special[bos is not None :]

    used = {
        name: {"id": name, "ids": [tokens.index(name)], "tokens": [name]} for name in (bos, eos) if name is not None
    }
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": used,
    }
