"""POST /v1/chat/completions: a conversation in, the assistant's turn out.

app.py mounts it; endpoint.py drives it. The engine's chat template makes the prompt; where there is none
it refuses the request and says how to give one. turn.py takes tool calls and reasoning out of the text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aserve import Completion, Delta, SamplingParams, Stream
from routes.chunks import ChunkFrames, Job
from routes.endpoint import GenerationEndpoint, submit_all
from routes.logprobs import chat_logprobs, prompt_logprobs
from routes.records import Record
from routes.schemas import ChatBody
from routes.turn import ChatDelta, Turn

__all__ = ["ChatCompletions"]


class ChatCompletions(GenerationEndpoint[ChatBody]):
    """The endpoint."""

    kind = ChatBody

    async def submit(self, body: ChatBody, params: SamplingParams, record: Record) -> list[Stream]:
        continued = body.continue_final_message is True
        if body.tools and body.skip_special_tokens is None and self.options.turn_format.shows_special_tokens:
            params = replace(params, skip_special_tokens=False)
        opening = not continued if body.add_generation_prompt is None else body.add_generation_prompt
        stream = self.engine.submit_chat(
            body.conversation(),
            params,
            tools=body.tools if body.tool_choice != "none" else None,
            add_generation_prompt=opening,
            continue_final_message=continued,
            chat_template_kwargs=body.chat_template_kwargs,
            **(body.submit_arguments() | self.options.submit_arguments() | record.submit_arguments()),
        )
        return await submit_all([stream])

    def frames(self, job: Job[ChatBody], position: int) -> ChunkFrames:
        return ChatFrames(self, job, position)

    def answer(self, job: Job[ChatBody], completions: list[list[Completion]]) -> dict[str, Any]:
        choices = [self._choice(job, done) for done in completions[0]]
        answer = self.envelope(job, "chat.completion") | {"choices": choices, "usage": job.usage()}
        if job.body.prompt_logprobs is not None:
            found: Any = job.streams[0].prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprobs(self.engine.tokenizer, found)
        return answer

    def _choice(self, job: Job[ChatBody], done: Completion) -> dict[str, Any]:
        turn = self.turn(job)
        message: dict[str, Any] = {"role": "assistant", "content": done.text}
        if turn is not None:
            message = ChatDelta().add(turn.push(done.text, last=True)).message()
        if prefix := self.echoed(job):
            message["content"] = prefix + (message["content"] or "")
        return {
            "index": done.index,
            "message": message,
            "logprobs": self.logprobs(job, done.logprobs),
            "finish_reason": finish_reason(done.finish_reason, turn),
            "stop_reason": done.stop_reason,
        }

    def turn(self, job: Job[ChatBody]) -> Turn | None:
        """The parsers of one choice, None where its text is its content."""
        prompt = job.streams[0].prompt_token_ids
        structured = job.params.structured is not None
        return self.options.turn_format.turn(job.body.tool_use(), prompt, self.engine.tokenizer, structured=structured)

    def envelope(self, job: Job[ChatBody], kind: str) -> dict[str, Any]:
        """The fields of a response, and of every chunk of a streamed one, that do not change."""
        return {
            "id": f"chatcmpl-{job.streams[0].key}",
            "object": kind,
            "created": job.created,
            "model": job.model,
        }

    def echoed(self, job: Job[ChatBody]) -> str:
        """With echo, the text of the message that is continued, else ""."""
        if not (job.body.echo and job.body.continue_final_message):
            return ""
        return str(job.body.conversation()[-1]["content"] or "")

    def logprobs(self, job: Job[ChatBody], entries: Any) -> dict[str, Any] | None:
        """The logprobs object of a choice or a chunk, None where the client asked for none."""
        if job.params.logprobs is None:
            return None
        return chat_logprobs(self.engine.tokenizer, entries or (), num_top=job.params.logprobs)


def finish_reason(reason: str | None, turn: Turn | None) -> str | None:
    """OpenAI's: "tool_calls" where the turn ended with calls."""
    return "tool_calls" if reason == "stop" and turn is not None and turn.called else reason


class ChatFrames(ChunkFrames):
    """Chunks of object chat.completion.chunk; the first of each choice gives the role."""

    before = ',"delta":{"content":'
    after = '},"logprobs":null,"finish_reason":null}]'

    def __init__(self, endpoint: ChatCompletions, job: Job[ChatBody], position: int) -> None:
        super().__init__(job, position, endpoint.envelope(job, "chat.completion.chunk"))
        self._endpoint = endpoint
        turns = [endpoint.turn(job) for _ in range(job.params.n)]
        self._turns = [turn for turn in turns if turn is not None]  # empty: text is content
        self._plain = self._plain and not self._turns

    def opening(self) -> str:
        delta = {"role": "assistant", "content": self._endpoint.echoed(self.job)}
        choice = {"delta": delta, "logprobs": None, "finish_reason": None}
        return "".join(self.opening_event(choice, i) for i in range(self.job.params.n))

    def choice(self, delta: Delta) -> dict[str, Any] | None:
        fields = {"content": delta.text} if delta.text else {}
        turn = self._turns[delta.index] if self._turns else None
        if turn is not None:
            fields = ChatDelta().add(turn.push(delta.text, last=delta.finish_reason is not None)).fields()
        logprobs = self._endpoint.logprobs(self.job, delta.logprobs) if delta.token_ids else None
        if not fields and logprobs is None and delta.finish_reason is None:
            return None
        return {
            "delta": fields,
            "logprobs": logprobs,
            "finish_reason": finish_reason(delta.finish_reason, turn),
            "stop_reason": delta.stop_reason,
        }
