"""The CUDA kernels, one module per noun. triton_ops.py gathers them under the names of ops.Kernels.

Every launch here can be captured in a CUDA graph: grids depend on shapes and host-side bounds alone. float32 inputs
are computed in true float32 (no TF32).
"""
