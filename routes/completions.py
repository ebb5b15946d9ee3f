"""POST /v1/completions: text or token ids in, their continuation out; several prompts give choices prompt-major.

app.py mounts it; endpoint.py drives it. `echo` puts the prompt's text before each choice's.
"""

from __future__ import annotations

from typing import Any

from aserve import Completion, Delta, InvalidRequestError, SamplingParams, Stream
from routes.chunks import ChunkFrames, Job
from routes.endpoint import GenerationEndpoint, submit_all
from routes.logprobs import completion_logprobs
from routes.records import Record
from routes.schemas import CompletionBody

__all__ = ["Completions"]


class Completions(GenerationEndpoint[CompletionBody]):
    """The endpoint."""

    kind = CompletionBody

    async def submit(self, body: CompletionBody, params: SamplingParams, record: Record) -> list[Stream]:
        arguments = body.submit_arguments() | {"label": record.label}
        if body.add_special_tokens is not None:
            arguments["add_special_tokens"] = body.add_special_tokens
        return await submit_all(self.engine.submit(prompt, params, **arguments) for prompt in body.prompts())

    def frames(self, job: Job[CompletionBody], position: int) -> ChunkFrames:
        return CompletionFrames(self, job, position)

    def answer(self, job: Job[CompletionBody], completions: list[list[Completion]]) -> dict[str, Any]:
        choices = []
        for position, group in enumerate(completions):
            prefix = self.echoed(job, position)
            for done in group:
                choice = {
                    "index": position * job.params.n + done.index,
                    "text": prefix + done.text,
                    "logprobs": self.logprobs(job, done.logprobs, len(prefix)),
                    "finish_reason": done.finish_reason,
                    "stop_reason": done.stop_reason,
                }
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

    def logprobs(self, job: Job[CompletionBody], entries: Any, offset: int) -> dict[str, Any] | None:
        """The logprobs object of a choice or a chunk, None where the client asked for none."""
        if job.params.logprobs is None:
            return None
        return completion_logprobs(self.engine.tokenizer, entries or (), offset=offset, num_top=job.params.logprobs)


class CompletionFrames(ChunkFrames):
    """Chunks of object text_completion."""

    def __init__(self, endpoint: Completions, job: Job[CompletionBody], position: int) -> None:
        super().__init__(job, position, endpoint.envelope(job))
        self._endpoint = endpoint
        self._echo = endpoint.echoed(job, position)
        self._ends = dict.fromkeys(range(job.params.n), len(self._echo))  # choice -> characters so far

    def opening(self) -> str:
        if not self._echo:
            return ""
        return "".join(self.event(self.choice(Delta(i, self._echo, ())), i) for i in self._ends)

    def choice(self, delta: Delta) -> dict[str, Any]:
        start = self._ends[delta.index]
        self._ends[delta.index] += len(delta.text)
        return {
            "text": delta.text,
            "logprobs": self._endpoint.logprobs(self.job, delta.logprobs, start) if delta.token_ids else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
