"""SHD's loss without attention maps, as Triton kernels: divergence and gradients from queries and keys alone.

Functions of a checked request, without automatic differentiation: ``coded.py`` reads a cache's bytes, ``factored.py``
queries and keys, ``launch.py`` says what cannot be served. Imports ``supervision``; Triton only when a kernel runs.
"""

from shd_torch.kernels.divergence import CODECS, kl_rows
from shd_torch.kernels.launch import MIN_CAPABILITY, RowsKl, unsupported_reason

__all__ = ["CODECS", "MIN_CAPABILITY", "RowsKl", "kl_rows", "unsupported_reason"]
