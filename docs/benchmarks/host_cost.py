"""What the event loop spends per token: `python docs/benchmarks/host_cost.py [--streams 64 256] [--tokens 256]`.

The runner draws nothing and costs nothing, so what remains is aserve's own Python. The first columns time one part at
a time; "whole" is an Engine with every stream read by a task of its own, divided by the tokens that arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from aserve import Engine, SamplingParams, Tokenizer
from aserve.block_manager import BlockManager
from aserve.output import Output
from aserve.plan import StepPlan, StepResult, WorkerInfo
from aserve.policy import load_policy
from aserve.request import Request, Sequence
from aserve.scheduler import Scheduler
from aserve.stream import Mailbox
from aserve.tokenizer_files import from_backend

INFO = WorkerInfo(65536, 0, 16, 4096, 256, 1, "none", "float32", max_num_seqs=256, max_num_batched_tokens=8192)


class NullExecutor:
    """Answers every plan at the loop's next turn with one fixed token per draw."""

    async def start(self) -> WorkerInfo:
        return INFO

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        loop.call_soon(future.set_result, null_result(plan))
        return future

    async def stop(self) -> None:
        pass


def null_result(plan: StepPlan) -> StepResult:
    draws = len(plan.draws)
    return StepResult(plan.number, [65] * draws)


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.decoder = decoders.ByteLevel()
    return from_backend(backend)


def parts(num_streams: int, num_tokens: int, stop: tuple[str, ...]) -> dict[str, float]:
    """Microseconds per token of each part, medians over steps."""
    scheduler = Scheduler(
        blocks=BlockManager(INFO.num_gpu_blocks, 0, INFO.block_size),
        policy=load_policy("fair"),
        max_num_seqs=INFO.max_num_seqs,
        max_num_batched_tokens=INFO.max_num_batched_tokens,
        max_model_len=INFO.max_model_len,
    )
    text, loop = tokenizer(), asyncio.new_event_loop()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, stop=stop)
    boxes: dict[Sequence, Output] = {}
    for number in range(num_streams):
        prompt = tuple((number + i) % 256 for i in range(16))
        request = Request(number, str(number), prompt, params, number, num_tokens, 0.0)
        request.sequences = [Sequence(request, 0)]
        boxes[request.sequences[0]] = Output(
            request.sequences[0], Mailbox(loop, lambda request: None), text.detokenizer()
        )
        scheduler.add(request)
    times: dict[str, list[float]] = {name: [] for name in ("schedule", "commit", "detokenize", "deliver")}
    while (start := time.perf_counter()) and (plan := scheduler.schedule(start)) is not None:
        planned = time.perf_counter()
        result = null_result(plan)
        received = time.perf_counter()
        events = scheduler.commit(result, received)
        committed = time.perf_counter()
        deltas = [
            boxes[event.sequence].advance(event.token_id, event.logprobs)
            for event in events
            if event.token_id is not None
        ]
        made = time.perf_counter()
        for event, delta in zip(events, deltas, strict=True):
            boxes[event.sequence].box.push(delta)
            boxes[event.sequence].box.take()
        delivered = time.perf_counter()
        if not plan.chunks:
            spans = (planned - start, committed - received, made - committed, delivered - made)
            for name, span in zip(times, spans, strict=True):
                times[name].append(span / len(events) * 1e6)
    loop.close()
    return {name: statistics.median(spans) for name, spans in times.items()}


async def whole(num_streams: int, num_tokens: int, stop: tuple[str, ...]) -> float:
    """Microseconds of loop time per token, with a reading task per stream."""
    async with Engine(executor=NullExecutor(), tokenizer=tokenizer()) as engine:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, stop=stop)

        async def read(number: int) -> int:
            count = 0
            async for delta in engine.generate([(number + i) % 256 for i in range(16)], params):
                count += len(delta.token_ids)
            return count

        start = time.thread_time()
        counts = await asyncio.gather(*map(read, range(num_streams)))
        return (time.thread_time() - start) / sum(counts) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--uvloop", action="store_true", help="run the whole on uvloop, as the server does")
    options = parser.parse_args()
    run = asyncio.run
    if options.uvloop:
        import uvloop

        run = uvloop.run
    names = ("schedule", "commit", "detokenize", "deliver")
    print("us per token  " + "".join(f"{name:>12}" for name in (*names, "sum", "whole")))
    for num_streams in options.streams:
        for label, stop in (("", ()), (" + stop", ("\n\n", "User:"))):
            each = parts(num_streams, options.tokens, stop)
            total = run(whole(num_streams, options.tokens, stop))
            row = [*each.values(), sum(each.values()), total]
            print(f"{num_streams:4d}{label:10s}" + "".join(f"{value:12.2f}" for value in row))


if __name__ == "__main__":
    main()
