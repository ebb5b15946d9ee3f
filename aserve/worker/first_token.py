"""One token through a loaded model, before it serves: weights that are broken are found at start, not by a request.

Called once by runner.py, over the scratch block that no sequence owns.
"""

from __future__ import annotations

import torch

from aserve.models import Model, check_finite
from aserve.worker.kv_cache import KVPools
from aserve_kernels import AttentionMeta


def check_first_token(model: Model, pools: KVPools, device: torch.device) -> None:
    """Raises ConfigError where the model's logits are not finite."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    meta = AttentionMeta(
        num_decodes=1,
        positions=zero,
        slot_mapping=zero + pools.scratch_block * pools.block_size,
        query_starts=torch.tensor([0, 1], dtype=torch.int32, device=device),
        seq_lens=torch.ones(1, dtype=torch.int32, device=device),
        block_tables=torch.full((1, 1), pools.scratch_block, dtype=torch.int32, device=device),
        max_query_len=1,
        max_seq_len=1,
    )
    check_finite(model.logits(model.forward(zero, meta, pools.caches)))
