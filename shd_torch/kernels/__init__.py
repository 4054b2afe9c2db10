"""SHD's loss without attention maps, as Triton kernels: divergence and gradients from queries and keys alone.

Functions of a checked request, without automatic differentiation. Importing this package does not import Triton.
"""

from shd_torch.kernels.coded import kl_coded
from shd_torch.kernels.factored import kl_factored
from shd_torch.kernels.launch import unsupported_reason
from shd_torch.kernels.operands import RowsKl

__all__ = ["RowsKl", "kl_coded", "kl_factored", "unsupported_reason"]
