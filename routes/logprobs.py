"""The two shapes of logprobs on the wire: parallel lists for completions, one object per token for chat.

Values are natural logs from the raw logits, before temperature, top-k, top-p and penalties, so the number of
alternatives is always the one asked for. JSON has no infinity: a value below FLOOR is sent as FLOOR.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aserve import TokenLogprobs

FLOOR = -9999.0

Entry = TokenLogprobs | int  # an id alone is a prompt's first token, which nothing predicts


class Decoder(Protocol):
    """The part of a tokenizer that this file needs."""

    bos_token_id: int | None

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
    decoder: Decoder | None, entries: Sequence[Entry], *, offset: int, num_top: int
) -> dict[str, Any]:
    """The completions shape; `offset` is where the first token's text starts."""
    shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        token_id, logprob, top = (entry, None, None) if isinstance(entry, int) else entry
        text, raw = token_text(decoder, token_id)
        shape["tokens"].append(text)
        shape["token_logprobs"].append(None if logprob is None else max(logprob, FLOOR))
        best = None if top is None else _by_text(decoder, [*top[:num_top], (token_id, logprob)], token_id)
        shape["top_logprobs"].append(best)
        shape["text_offset"].append(offset)
        if decoder is not None and token_id != decoder.bos_token_id:  # which no text shows
            offset += len(raw.decode(errors="ignore"))
    return shape


def _by_text(decoder: Decoder | None, pairs: Sequence[tuple[int, Any]], chosen: int) -> dict[str, float]:
    """Logprobs by text. Several tokens may have one text: it is then the chosen one's, or the best one's."""
    names = {chosen: token_text(decoder, chosen)[0]}
    for token_id, _ in pairs:
        if token_id not in names:
            text = token_text(decoder, token_id)[0]
            names[token_id] = f"token_id:{token_id}" if text in names.values() else text
    return {names[token_id]: max(value, FLOOR) for token_id, value in pairs}


def prompt_logprobs(decoder: Decoder | None, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's shape for a prompt: per position, token id -> its logprob; the first position has none. `rank` is null
    for a prompt token that is not among the best."""
    positions: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(entry.top, 1)]
        if entry.token_id not in dict(entry.top):
            ranked.append((entry.token_id, entry.logprob, None))  # type: ignore[arg-type]
        positions.append(
            {
                str(i): {"logprob": max(value, FLOOR), "rank": rank, "decoded_token": token_text(decoder, i)[0]}
                for i, value, rank in ranked
            }
        )
    return positions


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
