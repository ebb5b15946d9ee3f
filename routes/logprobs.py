"""The two shapes of logprobs on the wire: parallel lists for completions, one object per token for chat.

Values are natural logs from the raw logits, before temperature, top-k, top-p and penalties, so the number of
alternatives is always the one asked for. JSON has no infinity: a value below FLOOR is sent as FLOOR.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aserve import TokenLogprobs

FLOOR = -9999.0


class Decoder(Protocol):
    """The part of a tokenizer that this file needs."""

    def token_bytes(self, token_id: int) -> bytes: ...


def token_text(decoder: Decoder | None, token_id: int) -> tuple[str, bytes]:
    """A token as clients see it, and its bytes: its text; `bytes:\\xNN...` for a part of a character; `token_id:N`
    where the server has no tokenizer."""
    if decoder is None:
        return f"token_id:{token_id}", b""
    raw = decoder.token_bytes(token_id)
    try:
        return raw.decode(), raw
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def completion_logprobs(
    decoder: Decoder | None, entries: Sequence[TokenLogprobs], *, offset: int, num_top: int
) -> dict[str, Any]:
    """The completions shape; `offset` is where the first token's text starts."""
    shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        text, raw = token_text(decoder, entry.token_id)
        logprob = max(entry.logprob, FLOOR)
        top = {token_text(decoder, token_id)[0]: max(value, FLOOR) for token_id, value in entry.top[:num_top]}
        shape["tokens"].append(text)
        shape["token_logprobs"].append(logprob)
        shape["top_logprobs"].append({**top, text: logprob})
        shape["text_offset"].append(offset)
        offset += len(raw.decode(errors="ignore"))
    return shape


def chat_logprobs(decoder: Decoder | None, entries: Sequence[TokenLogprobs], *, num_top: int) -> dict[str, Any]:
    """The chat shape: exactly `num_top` alternatives each, best first."""

    def item(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = token_text(decoder, token_id)
        return {"token": text, "logprob": max(logprob, FLOOR), "bytes": list(raw)}

    return {
        "content": [
            item(entry.token_id, entry.logprob) | {"top_logprobs": [item(*pair) for pair in entry.top[:num_top]]}
            for entry in entries
        ]
    }
