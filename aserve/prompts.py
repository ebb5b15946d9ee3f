"""From what a caller sends to token ids: text, a conversation, or ids as they are.

Owned by engine.py. Short input is encoded at once, long input on a thread, few at a time, so that the event loop is
never held up and a flood of long prompts cannot take every core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from aserve.chat_template import Message
from aserve.errors import InvalidRequestError
from aserve.tokenizer import Tokenizer, too_long

T = TypeVar("T")
Prompt = str | Items[int]
_THREADS = 2


class OffLoop:
    """Runs blocking calls on threads, two at a time. Cancelling a caller leaves its call to end by itself."""

    def __init__(self) -> None:
        self._limit = anyio.CapacityLimiter(_THREADS)

    async def __call__(self, call: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(call, limiter=self._limit, abandon_on_cancel=True)


class PromptEncoder:
    """Encodes prompts of at most `max_tokens` tokens; `tokenizer` None takes token ids only.

    Raises InvalidRequestError for what is no text or no conversation, ContextLengthError for too much of it.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_tokens: int, off_loop: OffLoop) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._off_loop = off_loop

    async def encode(self, prompt: Prompt, add_special_tokens: bool) -> Items[int]:
        """Ids of a text, or the ids given."""
        if not isinstance(prompt, str):
            if len(prompt) > self._max_tokens:  # before its millions are looked at
                raise too_long(len(prompt), self._max_tokens, exact=True)
            if set(map(type, prompt)) - {int}:  # bool, too, is no token id
                raise InvalidRequestError("a prompt of token ids must hold integers only", param="prompt")
            return prompt
        tokenizer = self._need_tokenizer()
        call = partial(tokenizer.encode, prompt, add_special_tokens, max_tokens=self._max_tokens)
        return await self._off_loop(call) if tokenizer.is_long(len(prompt)) else call()

    async def encode_chat(
        self,
        messages: Items[Message],
        *,
        tools: Items[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Items[int]:
        """Ids of a conversation, written out by its template; the template's BOS is the only one."""
        tokenizer = self._need_tokenizer()
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message

        def call() -> list[int]:
            text = tokenizer.render_chat(
                messages,
                tools=tools,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            return tokenizer.encode(text, False, max_tokens=self._max_tokens)

        try:
            long = tokenizer.is_long(_num_chars(messages) + _num_chars(tools))
        except RecursionError:
            raise InvalidRequestError("the messages are nested too deeply", param="messages") from None
        # a template of the caller's has to be compiled first, and may loop
        return await self._off_loop(call) if long or chat_template is not None else call()

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer: send token ids", param="prompt")
        return self._tokenizer


def _num_chars(value: Any) -> int:
    """About how much text is in messages or tools."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, (list, tuple)) else 8
