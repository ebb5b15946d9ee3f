"""Executes StepPlans with a model over paged memory: executors.Runner for one process, on CPU or one GPU.

Everything is called on the model thread, in plan order, except `wait`. `launch` reads nothing back from the device: a
step's draws reach the host in one copy that `wait` waits for, so that the next plan can be launched before.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import aserve_kernels
from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.executors import StepError
from aserve.models import Model
from aserve.models.files import ModelFiles
from aserve.plan import StepPlan, StepResult, StepTimings, WorkerInfo
from aserve.worker import memory
from aserve.worker.first_token import check_first_token
from aserve.worker.inputs import SlotState
from aserve.worker.kv_cache import KVPools, block_bytes
from aserve.worker.prompt_logprobs import PromptLogprobs, PromptPart
from aserve.worker.sampler import DrawnLogprobs, Sampler
from aserve.worker.staging import Staging
from aserve_kernels import Kernels

if TYPE_CHECKING:
    from aserve.worker.graphs import StepGraphs

logger = logging.getLogger("aserve.worker")


@dataclass(slots=True)
class Pending:
    """A launched step: its draws on their way to the host."""

    plan: StepPlan
    drawn: Tensor | None  # int64 [2, >= S] on the host: tokens, finite flags
    logprobs: DrawnLogprobs | None
    prompt: list[PromptPart]
    timings: StepTimings
    started: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    staged: list[Tensor] = field(default_factory=list)  # buffers of its copies


class ModelRunner:
    """executors.Runner over the model in `files`. `load_model` replaces models.loader's."""

    def __init__(
        self, files: ModelFiles, config: EngineConfig, *, load_model: Callable[..., Model] | None = None
    ) -> None:
        self.files = files
        self.config = config
        self._load_model = load_model
        self._bad: deque[tuple[int, int]] = deque()  # (slot, length) whose KV may hold non-finite values
        self._last_done: torch.cuda.Event | None = None  # of the step waited for last
        self._lost = False  # the device has failed

    # executors.Runner

    @torch.inference_mode()
    def load(self) -> WorkerInfo:
        """Loads weights, profiles and sizes the pools. Raises ConfigError where they cannot fit."""
        began = time.perf_counter()
        config = self.config
        self.device = memory.resolve_device(config)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            torch.set_num_threads(memory.resolve_threads(config))
        self.kernels = _kernels(config, self.device)
        self.limits = memory.resolve_limits(config, self.device)
        with memory.stage("loading the weights", "use a smaller model, or a --dtype of 16 bits"):
            self.model = self._make_model()
        spec = self.model.spec
        sizes = self._make_pools()
        check_first_token(self.model, self.pools, self.device)
        self.staging = Staging(self.device)
        self.state = SlotState(
            max_num_seqs=self.limits.max_num_seqs,
            max_blocks=-(-sizes.max_model_len // config.block_size),
            block_size=config.block_size,
            vocab_size=spec.vocab_size,
            scratch_block=self.pools.scratch_block,
            device=self.device,
            staging=self.staging,
        )
        self.sampler = Sampler(self.kernels, spec.vocab_size, self.device, self.staging)
        self.prompt_logprobs = PromptLogprobs(self.model, self.sampler)
        with memory.stage("making the graphs", "lower --gpu-memory-utilization, or give --enforce-eager"):
            self.graphs = self._make_graphs(sizes.max_model_len) if cuda and not config.enforce_eager else None
        logger.info("# GPU blocks: %d, # CPU blocks: %d", sizes.num_gpu_blocks, sizes.num_cpu_blocks)
        logger.info("the longest request that fits has %d tokens", sizes.max_model_len)
        if cuda:  # a full collection that walks torch's and the model's objects would stop every thread for 0.2 s
            gc.collect()
            gc.freeze()
        return WorkerInfo(
            num_gpu_blocks=sizes.num_gpu_blocks,
            num_cpu_blocks=sizes.num_cpu_blocks,
            block_size=config.block_size,
            max_model_len=sizes.max_model_len,
            vocab_size=spec.vocab_size,
            depth=config.depth or (2 if cuda else 1),
            device=torch.cuda.get_device_name(self.device) if cuda else "cpu",
            dtype=str(spec.dtype).removeprefix("torch."),
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            block_bytes=block_bytes(spec, config.block_size),
            copy_rate=self.pools.measure_copy_rate(),
            startup_seconds=time.perf_counter() - began,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Starts a step. Raises StepError, naming the slots at fault where known; the step's slots are then lost
        until they are handed out again."""
        try:
            return self._launch(plan)
        except StepError:
            self.state.reset()
            raise
        except Exception as error:
            self.state.reset()
            short = memory.ran_out(error)
            if self.device.type == "cuda":
                if not isinstance(error, torch.OutOfMemoryError):
                    self._lost = True  # a CUDA fault poisons the context: the worker cannot go on
                    raise
                torch.cuda.empty_cache()
            raise StepError(f"step {plan.number} failed: {error}", memory=short) from error

    def wait(self, handle: object) -> StepResult:
        """The step's draws, once they are on the host. Waiting releases the GIL."""
        assert isinstance(handle, Pending)
        if handle.done is not None:
            with self._fatal():
                self._wait_for(handle)
        plan = handle.plan
        tokens: list[int] = []
        bad: tuple[int, ...] = ()
        if handle.drawn is not None:
            draws = plan.draws
            tokens, finite = handle.drawn[:, : len(draws)].tolist()
            if 0 in finite:
                bad = tuple(i for i, flag in enumerate(finite) if not flag)
                self._bad.extend((draws[i], int(self.state.host_position[draws[i]])) for i in bad)
        result = StepResult(
            number=plan.number,
            tokens=tokens,
            bad=bad,
            logprobs=handle.logprobs.read(tokens) if handle.logprobs is not None else {},
            prompt_logprobs={part.chunk: part.read() for part in handle.prompt},
            timings=handle.timings,
        )
        self.staging.give_back(handle.staged)
        return result

    def _wait_for(self, handle: Pending) -> None:
        """Until the device is done with the step; on the waiting thread."""
        done, started, timings = handle.done, handle.started, handle.timings
        assert done is not None and started is not None
        began = time.perf_counter()
        done.synchronize()
        timings.wait = time.perf_counter() - began
        timings.compute = started.elapsed_time(done) / 1000
        if self._last_done is not None:
            timings.gap = self._last_done.elapsed_time(started) / 1000
        self._last_done = done

    def idle(self) -> bool:
        """Captures a graph that will be needed; False where there is none to capture."""
        if self.graphs is None:
            return False
        with self._fatal():
            with torch.inference_mode():
                busy = self.graphs.idle()
            if busy:
                torch.cuda.synchronize(self.device)  # a request that comes now waits for this one alone
                self.staging.give_back(self.staging.hand_over())
        return busy

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """What fails within has failed on the device."""
        try:
            yield
        except Exception:
            self._lost = True
            raise

    def _make_model(self) -> Model:
        make = self._load_model
        if make is None:
            from aserve.models import loader

            make = loader.load_model
        own = self.files.config.get("text_config", self.files.config)
        dtype = memory.resolve_dtype(self.config, own.get("dtype") or own.get("torch_dtype"), self.device)
        return make(
            self.files,
            dtype=dtype,
            device=self.device,
            kernels=self.kernels,
            load_format=self.config.load_format,
            seed=self.config.seed,
            max_positions=self.config.max_model_len,
            model_impl=self.config.model_impl,
            trust_remote_code=self.config.trust_remote_code,
        )

    def _make_pools(self) -> memory.PoolSizes:
        """Sizes the pools by what a profile run leaves, or as asked, and makes them."""
        config, spec = self.config, self.model.spec
        cuda = self.device.type == "cuda"
        if config.num_gpu_blocks_override is not None or config.kv_cache_memory is not None or not cuda:
            available = config.kv_cache_memory or memory.GIB
        else:
            with memory.stage("measuring a step", "lower --max-num-batched-tokens or --max-num-seqs"):
                memory.run_largest_step(self.model, self.limits, config, self.device)
            available = memory.cuda_available_bytes(config, self.device)
        sizes = memory.size_pools(config, spec, available=available)
        each = block_bytes(spec, config.block_size)
        memory.check_host(kv_bytes=0 if cuda else sizes.num_gpu_blocks * each, swap_bytes=sizes.num_cpu_blocks * each)
        device_options = "--kv-cache-memory, --num-gpu-blocks-override or --gpu-memory-utilization"
        with memory.stage("making the KV pools", f"lower {device_options}, or --swap-space"):
            self.pools = KVPools(
                spec,
                self.kernels,
                num_gpu_blocks=sizes.num_gpu_blocks,
                num_cpu_blocks=sizes.num_cpu_blocks,
                block_size=config.block_size,
                device=self.device,
            )
        return sizes

    def close(self) -> None:
        """Frees the model and the pools; nothing where the device has failed, whose memory cannot be freed: torch would
        end the process."""
        if self._lost:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return
        for name in ("graphs", "model", "pools", "state", "sampler", "prompt_logprobs", "staging"):
            self.__dict__.pop(name, None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # one step

    def _launch(self, plan: StepPlan) -> Pending:
        timings = StepTimings(began=time.perf_counter())
        pending = Pending(plan, None, None, [], timings, self._record_event())
        self._scrub()
        self._check_tokens(plan)
        if plan.slots:
            self.sampler.update(plan.slots)
            self.prompt_logprobs.start(update.slot for update in plan.slots)
        if plan.swap_out:
            self.pools.swap_out(plan.swap_out)
        if plan.swap_in:
            self.pools.swap_in(plan.swap_in)
        if plan.copies:
            self.pools.copy(plan.copies)
        graphs = self.graphs if self.graphs is not None and self.graphs.takes(plan) else None
        if graphs is not None and graphs.draws(plan) and self._is_plain(plan):
            drawn = graphs.run(plan, timings)
            pending.drawn = None if drawn is None else self.staging.to_host(drawn)
        elif plan.num_tokens:
            self._compute(plan, graphs, pending)
        else:
            self.state.update(plan)
        if plan.num_tokens:
            self.state.advance_host(plan)
        pending.staged = self.staging.hand_over()
        pending.done = self._record_event()
        timings.launch = timings.compute = time.perf_counter() - timings.began - timings.inputs
        return pending

    def _compute(self, plan: StepPlan, graphs: StepGraphs | None, pending: Pending) -> None:
        """Forward, draw, and the draws' copy to the host."""
        timings = pending.timings
        if graphs is not None:
            hidden = graphs.forward(plan, timings)
        else:
            batch = self.state.apply(plan)
            timings.inputs = time.perf_counter() - timings.began
            ids, meta = self.state.assemble(batch)
            hidden = self.model.forward(ids, meta, self.pools.caches)
        if plan.chunks:
            pending.prompt = self.prompt_logprobs.compute(plan, hidden, self.state.host_prompt_len)
        draws = plan.draws
        if not draws:
            return
        where = self.state.draws_of(plan)
        if plan.chunks:
            hidden = hidden.index_select(0, where.rows)
        logits = self.model.logits(hidden)
        rows = self.state.sampling_rows(draws, where)
        logprobs = None
        if self.sampler.plain(draws) and not plan.masks:
            tokens = self.kernels.sample(logits, rows)
        else:
            tokens, logprobs = self.sampler.draw(logits, rows, draws, where.output_index, plan.masks)
        drawn = torch.stack((tokens, _finite(hidden, logits, tokens)))
        self.state.advance(where, tokens)
        pending.drawn = self.staging.to_host(drawn)
        pending.logprobs = logprobs and logprobs.to_host(self.staging)

    def _is_plain(self, plan: StepPlan) -> bool:
        """True where no draw or prompt of the step needs more than what is captured."""
        if plan.masks:
            return False
        return self.sampler.plain((*plan.decodes, *(slot for c in plan.chunks for slot in (c.slot, *c.draws))))

    def _make_graphs(self, max_model_len: int) -> StepGraphs | None:
        if self.config.attention_backend == "torch":
            return None
        from aserve.worker.graphs import StepGraphs  # needs Triton

        graphs = StepGraphs(
            self.model,
            self.kernels,
            self.pools.caches,
            self.state,
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=max_model_len,
            max_tokens=self.limits.max_num_batched_tokens,
        )
        if self.device.type == "cuda":
            graphs.warm()
        return graphs

    def _check_tokens(self, plan: StepPlan) -> None:
        vocab_size = self.state.vocab_size
        bad = [c.slot for c in plan.chunks if min(c.tokens, default=0) < 0 or max(c.tokens, default=0) >= vocab_size]
        if bad:
            raise StepError(f"a token is outside the vocabulary of {vocab_size}", tuple(bad))

    def _scrub(self) -> None:
        """Cleans the KV of sequences that drew from non-finite logits, before anyone else owns their blocks."""
        while self._bad:
            slot, length = self._bad.popleft()
            self.pools.scrub(self.state.blocks_of(slot, length))

    def _record_event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _kernels(config: EngineConfig, device: torch.device) -> Kernels:
    """The backend asked for; `auto` on CUDA is flash-attn where it is installed and the card is a Hopper."""
    backend = config.attention_backend
    if device.type == "cpu" or backend == "torch":
        return aserve_kernels.load("torch")
    if backend == "flash" or (backend == "auto" and torch.cuda.get_device_capability(device)[0] == 9):
        try:
            return aserve_kernels.load("flash")
        except ImportError as error:
            if backend == "flash":
                message = f"--attention-backend flash needs flash-attn-4 (pip install aserve[flash-attn]): {error}"
                raise ConfigError(message, param="attention_backend") from error
            logger.info("flash-attn-4 is not installed: prefill runs on the Triton kernels")
    return aserve_kernels.load("triton")


def _finite(hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
    """1 where a draw's logits were finite: a NaN or inf among them comes from the hidden state, or wins the draw."""
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    total = hidden.sum(dim=-1, dtype=torch.float32)
    return (total.isfinite() & (chosen < float("inf"))).long()
