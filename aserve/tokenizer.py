"""Text to token ids and back: a model's tokenizer, its special tokens and its chat template.

Loaded once per engine from the model's directory. Everything here blocks, in proportion to the text: engine.py calls
it inline for short input and on a thread for long. No asyncio, no torch; transformers is imported only for a model
that has no tokenizer.json.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, Protocol

from aserve import chat_template
from aserve.detokenizer import Detokenizer, TokenTable, WindowDetokenizer, from_table, table_style
from aserve.errors import ConfigError, ContextLengthError, InvalidRequestError

_INLINE_CHARS = 2048  # measured: about 1 ms of encoding while holding the GIL
_NFC_SHRINK = 4  # code points that canonical composition joins into one, at most
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Backend(Protocol):
    """What is needed of a tokenizers.Tokenizer, or of transformers' slower ones."""

    def encode(self, text: str, add_special_tokens: bool, limit: int | None) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    @property
    def vocab_size(self) -> int: ...


class Tokenizer:
    """A model's tokenizer. `eos_token_ids` are all ids that end an output, from its generation config too."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Iterable[int] = (),
        bos_token_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        skip_ids: Iterable[int] = (),
        style: Mapping[str, Any] | None = None,
        chat_templates: str | Items[Mapping[str, str]] | None = None,
        longest_token: int | None = None,
    ) -> None:
        self._backend = backend
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        self.vocab_size = backend.vocab_size
        self._special_tokens = dict(special_tokens or {})  # names and texts that templates may print
        self._chat_templates = chat_templates
        self.special_token_ids = frozenset(skip_ids)
        self._longest_token = longest_token  # characters one token can stand for; None where unbounded
        kind = table_style(style)
        token_of = backend.id_to_token
        self._tables = (
            None if kind is None else (TokenTable(kind, token_of), TokenTable(kind, token_of, self.special_token_ids))
        )

    # text to ids

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`.

        Raises ContextLengthError for more than `max_tokens`, before tokenizing where the length alone shows it, and
        InvalidRequestError for text that is not valid Unicode.
        """
        if max_tokens is not None and self._longest_token is not None:
            least = -(-len(text) // self._longest_token)
            if least > max_tokens:
                raise _too_long(least, max_tokens, exact=False)
        try:
            if not text.isascii():
                text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}", param="prompt"
            ) from None
        return self._backend.encode(text, add_special_tokens, max_tokens)

    @staticmethod
    def is_long(num_chars: int) -> bool:
        """True where encoding so much text would hold up an event loop."""
        return num_chars > _INLINE_CHARS

    # ids to text

    def decode(self, ids: Items[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids` as a whole."""
        return self._backend.decode(list(ids), skip_special_tokens)

    def detokenizer(self, prompt: Items[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """An incremental decoder for one output that follows `prompt`."""
        if self._tables is not None:
            return from_table(self._tables[skip_special_tokens], prompt)
        return WindowDetokenizer(lambda ids: self._backend.decode(ids, skip_special_tokens), prompt)

    def token_text(self, token_id: int) -> str:
        """One token alone, for logprobs: U+FFFD where it is part of a character."""
        if self._tables is None:
            return self._backend.decode([token_id], False)
        entry = self._tables[0][token_id]
        return entry if isinstance(entry, str) else entry.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, for logprobs."""
        if self._tables is None:
            return self._backend.decode([token_id], False).encode()
        entry = self._tables[0][token_id]
        return entry.encode() if isinstance(entry, str) else entry

    def vocabulary(self) -> list[bytes] | None:
        """The bytes of every token by id, b"" for an id that is none; None where they are not known one by one."""
        if self._tables is None or self._tables[0].style == "words":  # there, spaces belong to no token
            return None
        table = TokenTable(
            self._tables[0].style, self._backend.id_to_token
        )  # of its own: the whole would stay in memory
        entries = (table[token_id] for token_id in range(self.vocab_size))
        return [entry.encode() if isinstance(entry, str) else entry for entry in entries]

    # chat

    @property
    def has_chat_template(self) -> bool:
        """True where chat works without a template from the caller."""
        return chat_template.choose(self._chat_templates) is not None

    def warm(self) -> None:
        """Does once what would hold up the first request: imports, and compiling the template."""
        self.encode("")
        with contextlib.suppress(InvalidRequestError):  # a template may refuse this, and is told so when it matters
            self.render_chat([{"role": "user", "content": ""}])

    def render_chat(
        self,
        messages: Items[chat_template.Message],
        *,
        tools: Items[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. Encode it without special tokens: a template writes its own BOS.

        Raises InvalidRequestError where there is no template, or it refuses the messages.
        """
        template = template or chat_template.choose(self._chat_templates, tools=bool(tools))
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; supply one with --chat-template FILE|NAME "
                f"(built in: {', '.join(sorted(chat_template.BUILTIN))})",
                param="messages",
            )
        return chat_template.render(
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._special_tokens, **(variables or {})},
        )


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
            raise _too_long(len(encoding), limit, exact=True)
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
            raise _too_long(len(ids), limit, exact=True)
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
    if isinstance(value, list):
        return [int(item) for item in value]
    return [] if value is None else [int(value)]


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


def _too_long(num_tokens: int, limit: int, *, exact: bool) -> ContextLengthError:
    count = f"{num_tokens}" if exact else f"at least {num_tokens}"
    return ContextLengthError(
        f"the prompt has {count} tokens, the context takes at most {limit}",
        param="prompt",
        num_prompt=num_tokens,
        num_output=None,
        limit=limit,
    )
