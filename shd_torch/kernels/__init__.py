"""SHD's loss without attention maps, as Triton kernels: divergence and gradients from queries and keys alone.

Functions of a checked request, without automatic differentiation: ``coded.py`` reads a cache's bytes, ``factored.py``
queries and keys, ``launch.py`` says what cannot be served. Imports ``supervision``; Triton only when a kernel runs.
"""

from shd_torch.kernels.coded import kl_coded
from shd_torch.kernels.factored import kl_factored
from shd_torch.kernels.launch import unsupported_reason
from shd_torch.kernels.operands import RowsKl

__all__ = ["RowsKl", "kl_coded", "kl_factored", "unsupported_reason"]
