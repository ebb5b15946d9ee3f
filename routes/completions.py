"""POST /v1/completions: text or token ids in, their continuation out; several prompts give choices prompt-major.

app.py mounts it; endpoint.py drives it. `echo` puts the prompt's text before each choice's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aserve import Completion, Delta, InvalidRequestError, SamplingParams, Stream
from routes.chunks import ChunkFrames, Job
from routes.endpoint import GenerationEndpoint, submit_all
from routes.logprobs import completion_logprobs, prompt_logprobs
from routes.records import Record
from routes.schemas import CompletionBody

__all__ = ["Completions"]


class Completions(GenerationEndpoint[CompletionBody]):
    """The endpoint."""

    kind = CompletionBody

    async def submit(self, body: CompletionBody, params: SamplingParams, record: Record) -> list[Stream]:
        arguments = body.submit_arguments() | self.options.submit_arguments() | record.submit_arguments()
        if body.add_special_tokens is not None:
            arguments["add_special_tokens"] = body.add_special_tokens
        return await submit_all(self.engine.submit(prompt, params, **arguments) for prompt in body.prompts())

    def frames(self, job: Job[CompletionBody], position: int) -> ChunkFrames:
        return CompletionFrames(self, job, position)

    def answer(self, job: Job[CompletionBody], completions: list[list[Completion]]) -> dict[str, Any]:
        choices = []
        for position, group in enumerate(completions):
            prefix = self.echoed(job, position)
            scored = self.echoed_entries(job, position)
            for done in group:
                choice = {
                    "index": position * job.params.n + done.index,
                    "text": prefix + done.text,
                    "logprobs": self.logprobs(job, [*scored, *(done.logprobs or ())], 0),
                    "finish_reason": done.finish_reason,
                    "stop_reason": done.stop_reason,
                }
                if job.body.prompt_logprobs is not None:
                    found: Any = job.streams[position].prompt_logprobs
                    choice["prompt_logprobs"] = prompt_logprobs(self.engine.tokenizer, found)
                choices.append(choice)
        return self.envelope(job) | {"choices": choices, "usage": job.usage()}

    def envelope(self, job: Job[CompletionBody]) -> dict[str, Any]:
        """The fields of a response, and of every chunk of a streamed one, that do not change."""
        return {
            "id": f"cmpl-{job.streams[0].key}",
            "object": "text_completion",
            "created": job.created,
            "model": job.model,
        }

    def echoed(self, job: Job[CompletionBody], position: int) -> str:
        """The prompt's text where the client wants it back, else ""."""
        if not job.body.echo:
            return ""
        prompt = job.body.prompts()[position]
        if isinstance(prompt, str):
            return prompt
        if self.engine.tokenizer is None:
            raise InvalidRequestError("echo needs a tokenizer, and this server has none", param="echo")
        return self.engine.tokenizer.decode(prompt)

    def echoed_entries(self, job: Job[CompletionBody], position: int) -> list[Any]:
        """With echo, the prompt's tokens and their logprobs, which the engine has from the first output on."""
        if not job.body.echo or job.params.logprobs is None:
            return []
        stream = job.streams[position]
        return [stream.prompt_token_ids[0], *stream.prompt_logprobs]

    def logprobs(self, job: Job[CompletionBody], entries: Sequence[Any], offset: int) -> dict[str, Any] | None:
        """The logprobs object of a choice or a chunk, None where the client asked for none."""
        if job.params.logprobs is None:
            return None
        return completion_logprobs(self.engine.tokenizer, entries, offset=offset, num_top=job.params.logprobs)


class CompletionFrames(ChunkFrames):
    """Chunks of object text_completion."""

    def __init__(self, endpoint: Completions, job: Job[CompletionBody], position: int) -> None:
        super().__init__(job, position, endpoint.envelope(job))
        self._endpoint = endpoint
        self._position = position
        self._ends = [0] * job.params.n  # characters so far, per choice

    def opening(self) -> str:
        text = self._endpoint.echoed(self.job, self._position)
        if not text:
            return ""
        entries = self._endpoint.echoed_entries(self.job, self._position)
        choices = range(self.job.params.n)
        return "".join([self.opening_event(self._choice(i, text, entries, None, None), i) for i in choices])

    def choice(self, delta: Delta) -> dict[str, Any]:
        entries = delta.logprobs or ()
        return self._choice(delta.index, delta.text, entries, delta.finish_reason, delta.stop_reason)

    def _choice(
        self, index: int, text: str, entries: Sequence[Any], finish_reason: str | None, stop_reason: Any
    ) -> dict[str, Any]:
        start = self._ends[index]
        self._ends[index] += len(text)
        return {
            "text": text,
            "logprobs": self._endpoint.logprobs(self.job, entries, start) if entries else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
