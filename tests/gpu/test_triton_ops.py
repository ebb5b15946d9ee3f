"""Each Triton kernel against its torch twin, on a CUDA device or (TRITON_INTERPRET=1) interpreted on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import aserve_kernels
from aserve_kernels import AttentionMeta, SamplingRows
from aserve_kernels.ops import philox_uniform

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or the interpreter"),
    pytest.mark.filterwarnings("ignore"),  # the interpreter's own
]
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture(scope="module")
def triton_ops() -> aserve_kernels.Kernels:
    return aserve_kernels.load("triton")


@pytest.fixture(scope="module")
def torch_ops() -> aserve_kernels.Kernels:
    return aserve_kernels.load("torch")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(torch.seed() & 0xFFFF)


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Relative L2 error, against the twin's result in float32."""
    assert found.shape == wanted.shape
    assert torch.isfinite(found.float()).all()
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def pools(num_blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    key, value = (randn(num_blocks + 1, block_size, heads, dim, dtype=dtype) for _ in range(2))
    return key, value


def make_meta(
    query_lens: list[int], seq_lens: list[int], block_size: int, max_seq_len: int | None = None
) -> AttentionMeta:
    """Rows with scattered pages; entries past a row's pages point far outside the pool."""
    longest = max(seq_lens)
    max_blocks = -(-max(longest, max_seq_len or 0) // block_size) + 1
    needed = [-(-n // block_size) for n in seq_lens]
    pages = torch.randperm(sum(needed))
    table = torch.full((len(seq_lens), max_blocks), 0, dtype=torch.int32)
    at = 0
    for row, count in enumerate(needed):
        table[row, :count] = pages[at : at + count]
        at += count
    positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
    rows = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(query_lens))
    slot_mapping = table[rows, positions // block_size].long() * block_size + positions % block_size
    starts = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens).cumsum(0)
    num_decodes = next((i for i, q in enumerate(query_lens) if q > 1), len(query_lens))
    return AttentionMeta(
        num_decodes=num_decodes,
        positions=positions.to(DEVICE),
        slot_mapping=slot_mapping.to(DEVICE),
        query_starts=starts.to(DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        block_tables=table.to(DEVICE),
        max_query_len=max(query_lens),
        max_seq_len=max_seq_len or longest,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (5, 4096), (2, 7, 128), (1, 5120), (9, 80)])
def test_rms_norm_equals_its_twin(triton_ops, torch_ops, dtype, shape):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    assert_near(triton_ops.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x.float(), weight.float(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_the_residual(triton_ops, torch_ops, dtype):
    x, residual, weight = (randn(*s, dtype=dtype) for s in ((4, 1000), (4, 1000), (1000,)))
    twin_residual = residual.clone()
    wanted = torch_ops.add_rms_norm_(x, twin_residual, weight, 1e-6)
    found = triton_ops.add_rms_norm_(x, residual, weight, 1e-6)
    assert torch.equal(residual, twin_residual)
    assert_near(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (5, 4096), (1, 5120), (9, 80)])
def test_layer_norm_equals_its_twin(triton_ops, torch_ops, dtype, shape):
    x, weight, bias = randn(*shape, dtype=dtype) + 3, randn(shape[-1], dtype=dtype), randn(shape[-1], dtype=dtype)
    wanted = torch_ops.layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
    assert_near(triton_ops.layer_norm(x, weight, bias, 1e-5), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_layer_norm_updates_the_residual(triton_ops, torch_ops, dtype):
    x, residual = randn(4, 1000, dtype=dtype), randn(4, 1000, dtype=dtype)
    weight, bias = randn(1000, dtype=dtype), randn(1000, dtype=dtype)
    twin_residual = residual.clone()
    wanted = torch_ops.add_layer_norm_(x, twin_residual, weight, bias, 1e-6)
    found = triton_ops.add_layer_norm_(x, residual, weight, bias, 1e-6)
    assert torch.equal(residual, twin_residual)
    assert_near(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gated_mlp_equals_its_twin(triton_ops, torch_ops, dtype, activation):
    x = randn(3, 2 * 1100, dtype=dtype, scale=3.0)
    assert_near(triton_ops.gated_mlp(x, activation), torch_ops.gated_mlp(x.float(), activation), dtype)


@pytest.mark.skipif(INTERPRETED, reason="as many programs as the interpreter runs in an hour")
def test_more_rows_than_a_grid_axis_holds(triton_ops, torch_ops):
    """65,535 is the most of any axis but the first; a step of 8,192 tokens has 65,536 rows for eight experts each."""
    rows = 70_000
    x = randn(rows, 2 * 8, dtype=torch.bfloat16)
    assert_near(triton_ops.gated_mlp(x, "silu"), torch_ops.gated_mlp(x.float(), "silu"), torch.bfloat16)
    weight = randn(16, dtype=torch.bfloat16)
    found = triton_ops.rms_norm(x, weight, 1e-5)
    assert_near(found, torch_ops.rms_norm(x.float(), weight.float(), 1e-5), torch.bfloat16)
    qkv = randn(rows, 3 * 16)
    at = torch.arange(rows, device=DEVICE)
    cos_sin = torch.rand(rows, 16, device=DEVICE)
    found_pools, wanted_pools = pools(rows // 16, 16, 1, 16, torch.float32), pools(rows // 16, 16, 1, 16, torch.float32)
    found = triton_ops.rotary_kv_write_(qkv, at, at, cos_sin, *found_pools, 1, 1, 16, None, None, 1e-6)
    wanted = torch_ops.rotary_kv_write_(qkv, at, at, cos_sin, *wanted_pools, 1, 1, 16, None, None, 1e-6)
    assert_near(found, wanted, torch.float32)
    for pool, twin in zip(found_pools, wanted_pools, strict=True):
        assert_near(pool[: rows // 16], twin[: rows // 16], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(4, 2, 64, 64), (5, 5, 80, 32), (8, 1, 256, 256)])
@pytest.mark.parametrize("norm", [False, True])
def test_rotary_kv_write_equals_its_twin(triton_ops, torch_ops, dtype, heads, kv_heads, dim, rotary, norm):
    meta = make_meta([1, 1, 6], [9, 21, 30], 16)
    qkv = randn(8, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.rand(64, rotary // 2, device=DEVICE) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    weights = (randn(dim, dtype=dtype), randn(dim, dtype=dtype)) if norm else (None, None)
    found_pools, wanted_pools = pools(6, 16, kv_heads, dim, dtype), pools(6, 16, kv_heads, dim, torch.float32)
    for pool, twin in zip(found_pools, wanted_pools, strict=True):
        pool.zero_()
        twin.zero_()
    shape = (heads, kv_heads, dim)
    found = triton_ops.rotary_kv_write_(
        qkv, meta.positions, meta.slot_mapping, cos_sin, *found_pools, *shape, *weights, 1e-6
    )
    weights = tuple(None if w is None else w.float() for w in weights)
    wanted = torch_ops.rotary_kv_write_(
        qkv.float(), meta.positions, meta.slot_mapping, cos_sin, *wanted_pools, *shape, *weights, 1e-6
    )
    assert_near(found, wanted, dtype)
    for pool, twin in zip(found_pools, wanted_pools, strict=True):
        assert_near(pool, twin, dtype)


ROWS = {
    "decodes": ([1, 1, 1, 1], [1, 17, 300, 1030]),
    "one long decode": ([1], [700]),
    "chunks": ([5, 33, 70], [5, 50, 70]),
    "mixed": ([1, 1, 40, 1, 3], [65, 128, 41, 9, 333]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 64), (6, 2, 80), (3, 3, 128)])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(None, None, False), (40, None, False), (None, 20.0, False), (40, None, True)]
)
def test_paged_attention_equals_its_twin(
    triton_ops, torch_ops, dtype, rows, heads, kv_heads, dim, window, softcap, sinks
):
    meta = make_meta(*rows, 16, max_seq_len=2048)
    query = randn(sum(rows[0]), heads, dim, dtype=dtype)
    key, value = pools(-(-2048 // 16), 16, kv_heads, dim, dtype)
    options = (dim**-0.5, window, softcap, randn(heads, dtype=dtype) if sinks else None)
    for _ in range(2):  # the second launch finds the arrival counters as the first left them
        found = triton_ops.paged_attention(query, key, value, meta, *options)
    wanted = torch_ops.paged_attention(query.float(), key.float(), value.float(), meta, *options)
    assert_near(found, wanted, dtype)


def test_a_pages_unused_tail_may_hold_anything(triton_ops):
    meta = make_meta([1, 4], [20, 9], 16)
    key, value = pools(3, 16, 1, 64, torch.float32)
    clean = triton_ops.paged_attention(query := randn(5, 2, 64), key, value, meta, 0.1)
    used = torch.zeros(4, 16, dtype=torch.bool, device=DEVICE)
    for row, length in enumerate([20, 9]):
        for position in range(length):
            used[meta.block_tables[row, position // 16], position % 16] = True
    key[~used] = value[~used] = float("nan")
    assert torch.equal(triton_ops.paged_attention(query, key, value, meta, 0.1), clean)


def sampling_rows(count: int, **options: Tensor | bool) -> SamplingRows:
    return SamplingRows(
        temperature=options.pop("temperature", torch.full((count,), 0.8, device=DEVICE)),
        seeds=torch.randint(-(2**62), 2**62, (count,), device=DEVICE),
        choices=torch.arange(count, device=DEVICE) % 3,
        output_index=torch.randint(0, 1000, (count,), device=DEVICE),
        **options,
    )


@pytest.mark.parametrize("vocab", [50, 4099, 32000])
def test_greedy_takes_the_first_largest_logit(triton_ops, vocab):
    logits = randn(4, vocab).round(decimals=1)  # with ties
    rows = sampling_rows(4, temperature=torch.zeros(4, device=DEVICE), all_greedy=True)
    wanted = (logits == logits.max(dim=1, keepdim=True).values).int().argmax(dim=1)
    assert torch.equal(triton_ops.sample(logits, rows), wanted)


OPTIONS = {
    "plain": dict(),
    "top_k": dict(top_k=[1, 5, 1000000, 40, 3]),
    "top_p": dict(top_p=[0.1, 0.9, 1.0, 0.5, 0.01]),
    "min_p": dict(min_p=[0.1, 0.0, 0.9, 0.5, 0.01]),
    "wide": dict(top_k=[600, 3000, 40, 2500, 513], top_p=[0.9, 0.99, 0.9, 0.5, 1.0]),
    "all": dict(top_k=[20, 5, 7, 40, 300], top_p=[0.9, 0.9, 1.0, 0.5, 0.7], min_p=[0.0, 0.0, 0.2, 0.01, 0.01]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [61, 5000] if DEVICE == "cpu" else [61, 5000, 60_000])
@pytest.mark.parametrize("scale", [2.0, 0.1])  # flat logits have more kept words than the kernel's candidates
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_draws_equal_the_twins(triton_ops, torch_ops, vocab, scale, options, dtype):
    types = dict(top_k=torch.int64, top_p=torch.float32, min_p=torch.float32)
    given = {name: torch.tensor(values, dtype=types[name], device=DEVICE) for name, values in options.items()}
    if "top_k" in given:
        given["top_k"].clamp_(max=vocab)
    temperature = torch.tensor([1.0, 0.7, 0.0, 2.0, 0.1], device=DEVICE)
    for _ in range(1 if DEVICE == "cpu" else 20):
        logits = randn(5, vocab, scale=scale, dtype=dtype)
        rows = sampling_rows(5, temperature=temperature, **given)
        assert torch.equal(triton_ops.sample(logits, rows), torch_ops.sample(logits, rows))


def test_draws_follow_the_distribution(triton_ops):
    """A chi-squared test that cannot pass with a skewed tail: 6 tokens, 60,000 draws (1,500 interpreted)."""
    count = 1500 if DEVICE == "cpu" else 60000
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.03, 0.01], device=DEVICE)
    logits = probabilities.log().expand(count, 6).contiguous()
    rows = sampling_rows(count, temperature=torch.ones(count, device=DEVICE))
    tokens = triton_ops.sample(logits, rows)
    seen = torch.bincount(tokens, minlength=6).double()
    wanted = probabilities.double() * count
    assert ((seen - wanted) ** 2 / wanted).sum() < 25.0  # 5 degrees of freedom: p = 1.4e-4


def test_logits_that_are_not_finite_still_give_an_id(triton_ops):
    logits = torch.full((3, 100), float("nan"), device=DEVICE)
    logits[1] = float("-inf")
    logits[2, 7] = float("inf")
    limits = dict(top_p=torch.full((3,), 0.9, device=DEVICE), min_p=torch.full((3,), 0.1, device=DEVICE))
    top_k = torch.full((3,), 5, dtype=torch.int64, device=DEVICE)
    for options in (dict(all_greedy=True), {}, limits, dict(top_k=top_k), dict(top_k=top_k, **limits)):
        tokens = triton_ops.sample(logits, sampling_rows(3, **options))
        assert ((tokens >= 0) & (tokens < 100)).all()


def test_uniforms_are_the_documented_philox(triton_ops):
    """With equal logits the draw is the token of the largest uniform."""
    vocab = 1000
    rows = sampling_rows(6)
    tokens = triton_ops.sample(torch.zeros(6, vocab, device=DEVICE), rows)
    quad = torch.arange(vocab // 4, device=DEVICE)
    words = philox_uniform(rows.seeds[:, None], quad[None, :], rows.output_index[:, None], rows.choices[:, None])
    uniform = torch.stack(words, dim=-1).reshape(6, vocab)
    assert torch.equal(tokens, uniform.argmax(dim=1))


def test_blocks_move_in_every_cache(triton_ops, torch_ops):
    caches = [randn(9, 16, 2, 64, dtype=torch.bfloat16) for _ in range(3)]
    twins = [cache.clone() for cache in caches]
    pairs = torch.tensor([[0, 4], [2, 7]], device=DEVICE)
    triton_ops.copy_blocks_(caches, pairs)
    torch_ops.copy_blocks_(twins, pairs)
    blocks = torch.tensor([7, 1, 4], device=DEVICE)
    staged = triton_ops.gather_blocks(caches, blocks)
    assert torch.equal(staged, torch_ops.gather_blocks(twins, blocks))
    targets = torch.tensor([0, 8, 3], device=DEVICE)
    triton_ops.scatter_blocks_(caches, targets, staged)
    torch_ops.scatter_blocks_(twins, targets, staged)
    for cache, twin in zip(caches, twins, strict=True):
        assert torch.equal(cache, twin)


@pytest.mark.skipif(DEVICE == "cpu", reason="flash-attn-4 needs a Hopper card")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (3, 3, 128)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 20.0)])
def test_flash_attention_equals_its_twin(torch_ops, dtype, rows, heads, kv_heads, dim, window, softcap):
    pytest.importorskip("flash_attn.cute")
    flash_ops = aserve_kernels.load("flash")
    meta = make_meta(*rows, 16, max_seq_len=2048)
    query = randn(sum(rows[0]), heads, dim, dtype=dtype)
    key, value = pools(-(-2048 // 16), 16, kv_heads, dim, dtype)
    wanted = torch_ops.paged_attention(query.float(), key.float(), value.float(), meta, dim**-0.5, window, softcap)
    for num_decodes in (meta.num_decodes, 0):  # decodes in their own launch, then all rows in one
        meta.num_decodes = num_decodes
        meta.memo.clear()
        found = flash_ops.paged_attention(query, key, value, meta, dim**-0.5, window, softcap)
        assert_near(found, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32] if DEVICE == "cpu" else [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "size"), [(300, 256), (1024, 3000), (5000, 1024)])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 20] if DEVICE == "cpu" else [1, 2, 3, 8, 9, 32, 57, 64, 65])
@pytest.mark.parametrize(("with_bias", "vector"), [(False, False), (True, False), (False, True), (True, True)])
def test_small_linear_equals_the_librarys(dtype, outputs, size, num_tokens, with_bias, vector):
    from aserve_kernels.triton.linear import MAX_TOKENS, linear, small_linear

    x, weight = randn(num_tokens, size, dtype=dtype), randn(outputs, size, dtype=dtype, scale=size**-0.5)
    bias = randn(outputs, dtype=dtype) if with_bias else None
    wide_bias = None if bias is None else bias.float()
    wanted = torch.nn.functional.linear(x.float(), weight.float(), wide_bias)
    tile = dict(BLOCK_N=4, BLOCK_K=256) if vector else dict(BLOCK_N=16, BLOCK_K=64)
    if num_tokens <= (8 if vector else MAX_TOKENS):
        assert_near(small_linear(x, weight, bias, vector=vector, num_warps=4, num_stages=3, **tile), wanted, dtype)
    assert_near(linear(x, weight, bias), wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32] if DEVICE == "cpu" else [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9])
@pytest.mark.parametrize(("activation", "with_bias"), [("silu", False), ("gelu_tanh", True), ("gelu", False)])
@pytest.mark.parametrize("vector", [False, True])
def test_gated_linear_equals_its_parts(torch_ops, dtype, num_tokens, activation, with_bias, vector):
    from aserve_kernels.triton.linear import MAX_TOKENS, gated_linear, small_linear

    x, weight = randn(num_tokens, 512, dtype=dtype), randn(2 * 300, 512, dtype=dtype, scale=512**-0.5)
    bias = randn(600, dtype=dtype) if with_bias else None
    wide_bias = None if bias is None else bias.float()
    wanted = torch_ops.gated_mlp(torch.nn.functional.linear(x.float(), weight.float(), wide_bias), activation)
    tile = dict(BLOCK_N=4, BLOCK_K=256) if vector else dict(BLOCK_N=16, BLOCK_K=64)
    if num_tokens <= MAX_TOKENS:
        found = small_linear(x, weight, bias, activation, gated=True, vector=vector, num_warps=4, num_stages=3, **tile)
        assert_near(found, wanted, dtype)
    if DEVICE == "cuda":
        assert_near(gated_linear(x, weight, bias, activation), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 8] if DEVICE == "cpu" else [1, 8, 40, 200])
@pytest.mark.parametrize(("activation", "with_bias"), [("relu", True), ("gelu", True), ("gelu_tanh", False)])
def test_an_activated_linear_equals_its_parts(dtype, num_tokens, activation, with_bias):
    from aserve_kernels.linear import activate_
    from aserve_kernels.triton.linear import linear, small_linear

    x, weight = randn(num_tokens, 512, dtype=dtype), randn(300, 512, dtype=dtype, scale=512**-0.5)
    bias = randn(300, dtype=dtype) if with_bias else None
    wanted = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    wanted = activate_(wanted, activation)
    assert_near(linear(x, weight, bias, activation), wanted, dtype)
    for vector in (False, True) if num_tokens <= 8 and (dtype != torch.float32 or DEVICE == "cpu") else ():
        tile = dict(BLOCK_N=4, BLOCK_K=256) if vector else dict(BLOCK_N=16, BLOCK_K=64)
        found = small_linear(x, weight, bias, activation, vector=vector, num_warps=4, num_stages=3, **tile)
        assert_near(found, wanted, dtype)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs the tensor memory accelerator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [65, 128, 200, 256])
@pytest.mark.parametrize(("outputs", "size"), [(1024, 2048), (300, 520), (20000, 1024)])
@pytest.mark.parametrize(("activation", "with_bias"), [("silu", False), ("gelu", True)])
def test_wide_linear_equals_its_parts(torch_ops, dtype, num_tokens, outputs, size, activation, with_bias):
    from aserve_kernels.linear import activate_
    from aserve_kernels.triton import wide
    from aserve_kernels.triton.linear import gated_linear, linear

    x, weight = randn(num_tokens, size, dtype=dtype), randn(outputs, size, dtype=dtype, scale=size**-0.5)
    bias = randn(outputs, dtype=dtype) if with_bias else None
    product = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    gated = torch_ops.gated_mlp(product, activation)
    assert_near(linear(x, weight, bias), product, dtype)
    assert_near(gated_linear(x, weight, bias, activation), gated, dtype)
    tile = dict(tokens=64, outputs=32, depth=128, warps=4)
    assert_near(wide.linear(x, weight, bias, activation, gated=True, **tile), gated, dtype)
    assert_near(wide.linear(x, weight, bias, activation, **tile), activate_(product, activation), dtype)
