"""The runner executes hand-made plans with a tiny model; one-shot generation is the reference."""

from __future__ import annotations

import pytest
import torch

from aserve.config import EngineConfig
from aserve.errors import ConfigError
from aserve.executors import StepError
from aserve.models import ModelSpec
from aserve.plan import BlockCopy, BlockDelta, Chunk
from aserve.request import SamplingParams
from aserve.worker import memory
from tests.tiny_model import BLOCK, VOCAB, Driver, make_runner

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9)
PROMPTS = [tuple((i * 7 + j * 3) % VOCAB for j in range(5 + 4 * i)) for i in range(4)]


def solo(prompt: tuple[int, ...], params: SamplingParams, count: int, **fields: object) -> list[int]:
    return Driver(make_runner()).generate(0, prompt, params, count, **fields)


def test_load_reports_what_the_engine_needs() -> None:
    runner = make_runner(max_num_batched_tokens=33)
    info = runner.load()
    assert (info.num_gpu_blocks, info.block_size, info.vocab_size) == (40, BLOCK, VOCAB)
    assert (info.max_model_len, info.depth, info.device, info.dtype) == (128, 1, "cpu", "float32")
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (8, 33)
    runner.close()


def test_mixed_chunks_and_decodes_equal_one_shot_prefill() -> None:
    want = [solo(prompt, SEEDED, 6, seed=i) for i, prompt in enumerate(PROMPTS)]
    driver = Driver(make_runner())
    out: dict[int, list[int]] = {slot: [] for slot in range(4)}
    done = dict.fromkeys(range(4), 0)
    slots = [7, 2, 5, 0]
    started: set[int] = set()
    for step in range(40):
        decodes = tuple(slots[i] for i in range(4) if out[i] and len(out[i]) < 6)
        chunks, updates = [], []
        for i in range(min(4, step + 1)):  # one more prompt begins at each step, three tokens at a time
            rest = PROMPTS[i][done[i] : done[i] + 3]
            if not rest:
                continue
            if i not in started:
                started.add(i)
                updates.append(driver.start(slots[i], len(PROMPTS[i]), SEEDED, seed=i)[0])
            last = done[i] + len(rest) == len(PROMPTS[i])
            chunks.append(Chunk(slots[i], done[i], rest, (slots[i],) if last else ()))
            done[i] += len(rest)
        plan = driver.plan(decodes, tuple(chunks), tuple(updates))
        if not plan.num_tokens:
            break
        result = driver.runner.wait(driver.runner.launch(plan))
        for slot, token in zip(plan.draws, result.tokens, strict=True):
            out[slots.index(slot)].append(token)
    assert list(out.values()) == want


def test_the_next_step_can_be_launched_before_the_last_is_read() -> None:
    want = solo(PROMPTS[2], SEEDED, 8, seed=3)
    driver = Driver(make_runner())
    update, _ = driver.start(1, len(PROMPTS[2]), SEEDED, seed=3)
    handles = [driver.runner.launch(driver.plan(chunks=(Chunk(1, 0, PROMPTS[2], (1,)),), slots=(update,)))]
    handles += [driver.runner.launch(driver.plan((1,))) for _ in range(7)]
    assert [driver.runner.wait(handle).tokens[0] for handle in handles] == want


def test_a_draw_does_not_depend_on_its_neighbours_or_slot() -> None:
    want = solo(PROMPTS[1], SEEDED, 5, seed=9)
    driver = Driver(make_runner())
    updates = [driver.start(slot, len(PROMPTS[1]), SEEDED, seed=9 if slot == 6 else slot)[0] for slot in (3, 6, 1)]
    chunks = tuple(Chunk(slot, 0, PROMPTS[1], (slot,)) for slot in (3, 6, 1))
    tokens = [driver.run(chunks=chunks, slots=tuple(updates)).tokens[1]]
    tokens += [driver.run((6, 1, 3)).tokens[0] for _ in range(4)]
    assert tokens == want


def test_choices_draw_from_one_prompt_row_and_fork_by_copy_on_write() -> None:
    prompt = PROMPTS[0]  # five tokens: one whole block and one that the choices would share
    want = [solo(prompt, SEEDED, 5, seed=4, choice=choice) for choice in range(2)]
    driver = Driver(make_runner())
    updates = [driver.start(slot, len(prompt), SEEDED, seed=4, choice=slot)[0] for slot in range(2)]
    first = driver.run(chunks=(Chunk(0, 0, prompt, (0, 1)),), slots=tuple(updates)).tokens
    shared = driver.tables[0]
    fork = driver.free.pop()
    driver.tables[1] = [shared[0], fork]
    tokens = [[token] for token in first]
    deltas = (BlockDelta(1, 0, (shared[0], fork)),)
    for step in range(4):
        copies = (BlockCopy(shared[1], fork),) if step == 0 else ()
        drawn = driver.run((0, 1), blocks=deltas if step == 0 else (), copies=copies).tokens
        for i in range(2):
            tokens[i].append(drawn[i])
    assert tokens == want


def test_a_sequence_swapped_out_and_in_goes_on_as_before() -> None:
    want = solo(PROMPTS[3], SEEDED, 8, seed=5)
    driver = Driver(make_runner(swap_space=0.01))
    update, _ = driver.start(0, len(PROMPTS[3]), SEEDED, seed=5)
    tokens = driver.run(chunks=(Chunk(0, 0, PROMPTS[3], (0,)),), slots=(update,)).tokens
    for _ in range(3):
        tokens += driver.run((0,)).tokens
    held = driver.tables[0]
    out = tuple(BlockCopy(block, host) for host, block in enumerate(held))
    driver.run(swap_out=out)
    with torch.inference_mode():
        for key, value in driver.runner.pools.caches:  # others use the blocks meanwhile
            key[held], value[held] = 9.0, 9.0
    fresh = [driver.free.pop() for _ in held]
    update, _ = driver.start(4, len(PROMPTS[3]), SEEDED, seed=5)
    driver.tables[4] = fresh
    length = len(PROMPTS[3]) + len(tokens)
    tokens += driver.run(
        chunks=(Chunk(4, length - 1, (tokens[-1],), (4,)),),
        slots=(update,),
        blocks=(BlockDelta(4, 0, tuple(fresh)),),
        swap_in=tuple(BlockCopy(host, block) for host, block in enumerate(fresh)),
    ).tokens
    while len(tokens) < 8:
        tokens += driver.run((4,)).tokens
    assert tokens == want


def test_non_finite_logits_are_reported_by_draw_and_their_blocks_are_clean_afterwards() -> None:
    runner = make_runner()
    driver = Driver(runner)
    want = solo(PROMPTS[1], GREEDY, 4)
    runner.model.poison = 90  # type: ignore[attr-defined]
    updates = tuple(driver.start(slot, 6, GREEDY)[0] for slot in (0, 1))
    prompt = (1, 2, 3, 4, 5, 6)
    chunks = (Chunk(0, 0, prompt, (0,)), Chunk(1, 0, (*prompt[:5], 90), (1,)))
    result = driver.run(chunks=chunks, slots=updates)
    assert result.bad == (1,)
    assert driver.run((0,)).bad == ()
    driver.free = [*driver.free, *driver.tables[1]]  # the next sequence gets the poisoned blocks
    assert driver.generate(2, PROMPTS[1], GREEDY, 4) == want


def test_a_token_outside_the_vocabulary_fails_the_step_and_names_its_slot() -> None:
    driver = Driver(make_runner())
    updates = tuple(driver.start(slot, 2, GREEDY)[0] for slot in (0, 3))
    plan = driver.plan(chunks=(Chunk(0, 0, (1, 2), (0,)), Chunk(3, 0, (1, VOCAB), (3,))), slots=updates)
    with pytest.raises(StepError) as caught:
        driver.runner.launch(plan)
    assert caught.value.slots == (3,)
    assert driver.generate(0, PROMPTS[0], GREEDY, 3) == solo(PROMPTS[0], GREEDY, 3)


def test_a_failing_model_fails_the_step_and_the_runner_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_runner())
    update, _ = driver.start(0, 2, GREEDY)
    plan = driver.plan(chunks=(Chunk(0, 0, (1, 2), (0,)),), slots=(update,))
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.model, "logits", lambda hidden: hidden @ torch.zeros(1, 1))
        with pytest.raises(StepError, match="step 1 failed"):
            driver.runner.launch(plan)
    assert driver.generate(0, PROMPTS[0], GREEDY, 3) == solo(PROMPTS[0], GREEDY, 3)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_step_that_finds_no_memory_says_so(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(hidden: torch.Tensor) -> torch.Tensor:
        raise error

    driver = Driver(make_runner())
    update, _ = driver.start(0, 2, GREEDY)
    monkeypatch.setattr(driver.runner.model, "logits", fail)
    with pytest.raises(StepError) as caught:
        driver.runner.launch(driver.plan(chunks=(Chunk(0, 0, (1, 2), (0,)),), slots=(update,)))
    assert caught.value.memory


def test_a_plan_that_only_swaps_draws_nothing() -> None:
    driver = Driver(make_runner(swap_space=0.01))
    result = driver.run(swap_out=(BlockCopy(3, 0),))
    assert (result.tokens, result.bad) == ([], ())


SPEC = ModelSpec(2, 4, 2, 8, 32, VOCAB, 100, torch.float32)


def test_pool_sizes_follow_the_bytes_available(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(block_size=16, swap_space=0)
    per_block = 2 * 2 * 16 * 2 * 8 * 4
    sizes = memory.size_pools(config, SPEC, available=5 * per_block + 7)
    assert sizes == (5, 0, 80)
    assert "the context is 80 tokens, what the KV pool holds, and not the model's 100" in caplog.text
    caplog.clear()
    assert memory.size_pools(config, SPEC, available=50 * per_block).max_model_len == 100
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("options", "match"),
    [({}, "no memory for KV"), ({"max_model_len": 101}, "100 positions"), ({"max_model_len": 99}, "pool of 16 tokens")],
)
def test_sizes_that_cannot_work_are_refused(options: dict[str, int], match: str) -> None:
    blocks = 1 if options else None
    config = EngineConfig(block_size=16, num_gpu_blocks_override=blocks, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=match):
        memory.size_pools(config, SPEC, available=0)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nand a long explanation"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 1 TB"),
    ],
)
def test_out_of_memory_at_start_says_which_option_to_change(error: Exception) -> None:
    with (
        pytest.raises(ConfigError, match=r"out of memory while loading the weights.*--dtype") as caught,
        memory.stage("loading the weights", "use a --dtype of 16 bits"),
    ):
        raise error
    assert "\n" not in caught.value.message


def test_another_error_at_start_is_left_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mismatch"), memory.stage("loading", "nothing"):
        raise RuntimeError("size mismatch")


@pytest.mark.parametrize(
    ("kv_bytes", "swap_bytes", "option"), [(3, 2, "--kv-cache-memory"), (1, 9, "--swap-space"), (0, 5, "--swap-space")]
)
def test_pools_beyond_the_free_memory_are_refused(
    kv_bytes: int, swap_bytes: int, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_host_available", lambda: 4)
    with pytest.raises(ConfigError, match=f"do not fit.*lower {option}"):
        memory.check_host(kv_bytes=kv_bytes, swap_bytes=swap_bytes)
    memory.check_host(kv_bytes=2, swap_bytes=2)
    monkeypatch.setattr(memory, "_host_available", lambda: None)
    memory.check_host(kv_bytes=kv_bytes, swap_bytes=swap_bytes)


def test_the_log_tells_the_pools_and_the_longest_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="aserve"):
        make_runner(swap_space=0.0)
    assert "# GPU blocks: 40, # CPU blocks: 0" in caplog.messages
    assert "the longest request that fits has 128 tokens" in caplog.messages


def test_a_host_pool_larger_than_the_machine_fails_at_start() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        make_runner(num_gpu_blocks_override=None, kv_cache_memory=1 << 60, swap_space=0.0)


def test_a_runner_whose_device_failed_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing pinned memory of a device that has failed ends the process, in a destructor."""
    held: list[object] = []
    monkeypatch.setattr("aserve.worker.runner.ctypes.pythonapi.Py_IncRef", lambda boxed: held.append(boxed.value))
    runner = make_runner()
    driver = Driver(runner)
    update, _ = driver.start(0, 3, GREEDY)
    pending = runner.launch(driver.plan((), (Chunk(0, 0, (1, 2, 3), (0,)),), (update,)))

    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("unspecified launch failure")

    pending.started = pending.done = Failed()  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="launch failure"):
        runner.wait(pending)
    runner.close()
    assert held == [runner]
    assert runner.model is not None
