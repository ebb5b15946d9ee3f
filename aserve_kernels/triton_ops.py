"""The CUDA backend: the names of ops.Kernels, from Triton kernels. float32 is computed in true float32."""

from aserve_kernels.triton.attention import paged_attention
from aserve_kernels.triton.blocks import copy_blocks_, gather_blocks, scatter_blocks_
from aserve_kernels.triton.norm import add_layer_norm_, add_rms_norm_, gated_mlp, layer_norm, rms_norm
from aserve_kernels.triton.rotary import rotary_kv_write_
from aserve_kernels.triton.sampling import sample

__all__ = [
    "add_layer_norm_",
    "add_rms_norm_",
    "copy_blocks_",
    "gated_mlp",
    "gather_blocks",
    "layer_norm",
    "paged_attention",
    "rms_norm",
    "rotary_kv_write_",
    "sample",
    "scatter_blocks_",
]
