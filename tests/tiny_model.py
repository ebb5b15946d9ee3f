"""A two-layer model made by hand over the torch kernels: the smallest real user of paged memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aserve.config import EngineConfig
from aserve.models import KVCache, ModelSpec
from aserve.plan import BlockDelta, Chunk, SlotUpdate, StepPlan, StepResult
from aserve.request import SamplingParams
from aserve.worker.runner import ModelRunner
from aserve_kernels import AttentionMeta, Kernels
from aserve_kernels.linear import PackedLinear

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, LAYERS = 97, 32, 4, 2, 8, 2
BLOCK = 4


class TinyModel:
    """Pre-norm attention and a gated MLP; the second layer has a window. `poison` makes that token's rows NaN."""

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        self.spec = ModelSpec(
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            max_position_embeddings=128,
            dtype=dtype,
        )
        self.kernels = kernels
        self.poison: int | None = None
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype).to(device or "cpu")

        self.embed = weight(VOCAB, HIDDEN) * 6
        self.norm = torch.ones(HIDDEN, dtype=dtype, device=device)
        self.layers = [
            (
                PackedLinear(weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)),
                PackedLinear(weight(HIDDEN, HEADS * DIM)),
                PackedLinear(weight(2 * 64, HIDDEN)),
                PackedLinear(weight(HIDDEN, 64)),
            )
            for _ in range(LAYERS)
        ]
        self.head = PackedLinear(self.embed.clone())
        angles = torch.arange(128).unsqueeze(1) * 10000 ** (-torch.arange(0, DIM, 2) / DIM)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device or "cpu")

    def forward(self, token_ids: Tensor, meta: AttentionMeta, caches: list[KVCache]) -> Tensor:
        ops = self.kernels
        x = self.embed[token_ids]
        if self.poison is not None:
            x = x.masked_fill((token_ids == self.poison).unsqueeze(1), float("nan"))
        for i, (qkv, out, up, down) in enumerate(self.layers):
            key, value = caches[i]
            q = ops.rotary_kv_write_(
                qkv(ops.rms_norm(x, self.norm, 1e-6)),
                meta.positions,
                meta.slot_mapping,
                self.cos_sin,
                key,
                value,
                HEADS,
                KV_HEADS,
                DIM,
                None,
                None,
                1e-6,
            )
            x = x + out(ops.paged_attention(q, key, value, meta, DIM**-0.5, window=9 if i else None))
            x = x + down(ops.gated_mlp(up(ops.rms_norm(x, self.norm, 1e-6)), "silu"))
        return ops.rms_norm(x, self.norm, 1e-6)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Files:
    """What the runner reads of ModelFiles."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}


def make_runner(dtype: str = "float32", **options: Any) -> ModelRunner:
    """A loaded runner of TinyModel with 40 blocks of 4 tokens."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "block_size": BLOCK,
        "num_gpu_blocks_override": 40,
        "max_num_seqs": 8,
        "num_threads": 1,
    }
    config = EngineConfig(dtype=dtype, **(defaults | options))  # type: ignore[arg-type]

    def load_model(files: Any, *, dtype: torch.dtype, device: torch.device, kernels: Kernels, **_: Any) -> TinyModel:
        return TinyModel(kernels, dtype, device)

    runner = ModelRunner(Files(), config, load_model=load_model)  # type: ignore[arg-type]
    runner.load()
    return runner


@dataclass
class Driver:
    """Builds plans by hand: a slot per sequence, blocks handed out in a scrambled order."""

    runner: ModelRunner
    number: int = 0
    free: list[int] = field(default_factory=lambda: [(i * 17) % 40 for i in range(40)])
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # positions with KV once the planned steps are done

    def start(
        self, slot: int, prompt_len: int, params: SamplingParams, **fields: Any
    ) -> tuple[SlotUpdate, list[BlockDelta]]:
        """The slot's update, and no blocks yet."""
        self.tables[slot] = []
        self.lengths[slot] = 0
        update = {"seed": 0, "choice": 0, "end_token_ids": ()} | fields
        return SlotUpdate(slot=slot, params=params, num_prompt_tokens=prompt_len, **update), []

    def grow(self, slot: int, length: int) -> list[BlockDelta]:
        """Blocks so that `length` positions fit."""
        table = self.tables[slot]
        missing = -(-length // BLOCK) - len(table)
        if missing <= 0:
            return []
        blocks = [self.free.pop() for _ in range(missing)]
        table += blocks
        return [BlockDelta(slot, len(table) - missing, tuple(blocks))]

    def plan(
        self,
        decodes: tuple[int, ...] = (),
        chunks: tuple[Chunk, ...] = (),
        slots: tuple[SlotUpdate, ...] = (),
        **fields: Any,
    ) -> StepPlan:
        """A plan with the block deltas that its rows need."""
        blocks: list[BlockDelta] = list(fields.pop("blocks", ()))
        for slot in decodes:
            self.lengths[slot] += 1
            blocks += self.grow(slot, self.lengths[slot])
        for chunk in chunks:
            blocks += self.grow(chunk.slot, chunk.start + len(chunk.tokens))
            for slot in {chunk.slot, *chunk.draws}:
                self.lengths[slot] = chunk.start + len(chunk.tokens)
        self.number += 1
        return StepPlan(self.number, decodes, chunks, slots, tuple(blocks), **fields)

    def run(self, *args: Any, **fields: Any) -> StepResult:
        """Plans, launches and waits."""
        return self.runner.wait(self.runner.launch(self.plan(*args, **fields)))

    def generate(
        self, slot: int, prompt: tuple[int, ...], params: SamplingParams, count: int, **fields: Any
    ) -> list[int]:
        """`count` tokens of a sequence that has the engine to itself, prefilled in one chunk."""
        update, _ = self.start(slot, len(prompt), params, **fields)
        tokens = self.run(chunks=(Chunk(slot, 0, prompt, (slot,)),), slots=(update,)).tokens
        while len(tokens) < count:
            tokens += self.run((slot,)).tokens
        self.free += self.tables.pop(slot)
        return tokens
