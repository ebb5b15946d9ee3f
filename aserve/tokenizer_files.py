"""From a model's files to its Tokenizer: tokenizer.json, the older forms by transformers, and what stands beside them.

loading.py calls `load` once per engine, on a thread. transformers is imported only for a model that has no
tokenizer.json. Nothing here is kept once a tokenizer is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from aserve.errors import ConfigError
from aserve.tokenizer import Tokenizer, too_long

_NFC_SHRINK = 4  # code points that canonical composition joins into one, at most
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Fast:
    """A tokenizer.json, by the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool, limit: int | None) -> list[int]:
        if Tokenizer.is_long(len(text)):  # unlike encode, this releases the GIL
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if limit is not None and len(encoding) > limit:
            raise too_long(len(encoding), limit, exact=True)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token


class _Slow:
    """A tokenizer that only transformers can read."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)

    def encode(self, text: str, add_special_tokens: bool, limit: int | None) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if limit is not None and len(ids) > limit:
            raise too_long(len(ids), limit, exact=True)
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return token


def load(
    path: Path,
    *,
    generation_config: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    template: str | None = None,
    fallback_template: str | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """The tokenizer at `path`, a tokenizer.json or a directory.

    `template` takes the place of its own chat template, `fallback_template` is used where it has none. End ids are
    the tokenizer's and those of `generation_config`, or of the model's `config` where that has none. Raises
    ConfigError.
    """
    directory = path if path.is_dir() else path.parent
    options = _read_json(directory / "tokenizer_config.json")
    side_file = directory / "chat_template.jinja"
    if template is not None:
        templates: Any = template
    elif side_file.is_file():
        templates = side_file.read_text(encoding="utf-8")
    else:
        templates = options.get("chat_template") or fallback_template
    file = directory / "tokenizer.json" if path.is_dir() else path
    ends = end_ids(generation_config or {}, config or {})
    raw = None if file.is_file() else _from_transformers(directory, trust_remote_code)
    if raw is not None and not hasattr(raw, "backend_tokenizer"):
        own = _ids(raw.eos_token_id)
        return Tokenizer(
            _Slow(raw),
            eos_token_ids=own + ends,
            bos_token_id=raw.bos_token_id,
            special_tokens={name: str(value) for name, value in raw.special_tokens_map.items()},
            chat_templates=templates or raw.chat_template,
        )
    return from_backend(
        _read_tokenizer(file) if raw is None else raw.backend_tokenizer,
        options=options,
        eos_token_ids=ends,
        chat_templates=templates,
    )


def from_backend(
    tokenizer: Any,
    *,
    options: Mapping[str, Any] | None = None,
    eos_token_ids: Iterable[int] = (),
    chat_templates: str | Items[Mapping[str, str]] | None = None,
) -> Tokenizer:
    """A tokenizers.Tokenizer, with the `options` of a tokenizer_config.json. It is changed in place.

    Which special tokens encoding adds is tokenizer.json's word alone (add_bos_token is ignored), as in transformers.
    """
    options = options or {}
    specials = {name: text for name in _SPECIALS if (text := _token_text(options.get(name))) is not None}
    _declare_special(tokenizer, specials)
    eos, bos = (
        tokenizer.token_to_id(specials[name]) if name in specials else None for name in ("eos_token", "bos_token")
    )
    added = tokenizer.get_added_tokens_decoder()
    return Tokenizer(
        _Fast(tokenizer),
        eos_token_ids=[*([] if eos is None else [eos]), *eos_token_ids],
        bos_token_id=bos,
        special_tokens=specials,
        skip_ids=[token_id for token_id, token in added.items() if token.special],
        style=_part(tokenizer.decoder) or {"type": "Words"},
        chat_templates=chat_templates,
        longest_token=_longest_token(tokenizer),
    )


def end_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> list[int]:
    """The ids that end an output, by the model's own files."""
    return _ids(generation_config.get("eos_token_id")) or _ids(config.get("eos_token_id"))


def _read_tokenizer(file: Path) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ConfigError(f"cannot read the tokenizer {file}: {error}", param="tokenizer") from None


def _from_transformers(directory: Path, trust_remote_code: bool) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(  # nosec B615 # a directory
            directory, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(f"cannot load a tokenizer from {directory}: {error}", param="tokenizer") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param="tokenizer") from None
    return content if isinstance(content, dict) else {}


def _part(part: Any) -> dict[str, Any] | None:
    """The tokenizer.json form of a tokenizer's component: components pickle as it."""
    if part is None:
        return None
    content: dict[str, Any] = json.loads(part.__getstate__())
    return content


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _ids(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in found):
        raise ConfigError(f"the model's files have {value!r} for 'eos_token_id', which is no token id", param="model")
    return found


def _declare_special(tokenizer: Any, specials: Mapping[str, str]) -> None:
    """Tokens that tokenizer_config.json names are special even where tokenizer.json forgot to say so."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    forgotten = [text for text in specials.values() if text not in known and tokenizer.token_to_id(text) is not None]
    if forgotten:
        tokenizer.add_special_tokens(forgotten)


def _longest_token(tokenizer: Any) -> int | None:
    """How many characters of text one token can stand for, at most; None where that has no bound.

    A vocabulary bounds it unless unknown text collapses into one token or a normalizer drops characters. A byte-level
    token has a letter per byte, and a character has one byte or more.
    """
    model, normalizer, before = tokenizer.model, _part(tokenizer.normalizer), _part(tokenizer.pre_tokenizer)
    added = tokenizer.get_added_tokens_decoder().values()
    if type(model).__name__ != "BPE" or any(token.lstrip or token.rstrip for token in added):
        return None
    kinds = {step.get("type") for step in _flat(before, "pretokenizers")}
    if not (model.byte_fallback or "ByteLevel" in kinds):
        return None
    if not kinds <= {"ByteLevel", "Split", "Digits", "Metaspace"} or _drops_text(before):
        return None
    steps = _flat(normalizer, "normalizers")
    if any(step.get("type") not in ("NFC", "Prepend", "Replace") for step in steps):
        return None
    if any(step["type"] == "Replace" and step.get("pattern") != {"String": " "} for step in steps):
        return None
    longest = max((len(token) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return longest * (_NFC_SHRINK if any(step.get("type") == "NFC" for step in steps) else 1)


def _flat(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part[key]) if part.get("type") == "Sequence" else [part]


def _drops_text(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    return any(step.get("behavior") == "Removed" for step in _flat(pre_tokenizer, "pretokenizers"))
