"""Text to token ids and back: a model's tokenizer, its special tokens and its chat template.

tokenizer_files.py makes one per engine. Everything here blocks, in proportion to the text: prompts.py calls it inline
for short input and on a thread for long. No asyncio, no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any, Protocol

from aserve import chat_template
from aserve.detokenizer import Detokenizer, TokenTable, WindowDetokenizer, from_table, table_style
from aserve.errors import ContextLengthError, InvalidRequestError

_INLINE_CHARS = 2048  # measured: about 1 ms of encoding while holding the GIL


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
                raise too_long(least, max_tokens, exact=False)
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
        # a table of its own: the whole vocabulary would stay in the other
        table = TokenTable(self._tables[0].style, self._backend.id_to_token)
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


def too_long(num_tokens: int, limit: int, *, exact: bool) -> ContextLengthError:
    """The error of a text that has so many tokens, or `exact` False at least so many."""
    count = f"{num_tokens}" if exact else f"at least {num_tokens}"
    return ContextLengthError(
        f"the prompt has {count} tokens, the context takes at most {limit}",
        param="prompt",
        num_prompt=num_tokens,
        num_output=None,
        limit=limit,
    )
