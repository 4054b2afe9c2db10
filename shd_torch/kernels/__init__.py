"""SHD's loss without attention maps, as Triton kernels: divergence and gradients from queries and keys alone.

Functions of a checked request, without automatic differentiation. Imports ``supervision``; Triton only when a kernel
runs.
"""

from shd_torch.kernels.divergence import CODEC, MIN_CAPABILITY, RowsKl, kl_rows, unsupported_reason

__all__ = ["CODEC", "MIN_CAPABILITY", "RowsKl", "kl_rows", "unsupported_reason"]
