"""The reference and the binding side by side: the same NumPy arguments go to both."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

import shd_ref
from shd_ref.conformance import load_tolerances

DTYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def to_tensor(array: NDArray[Any], device: str = "cpu") -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(device, torch.bfloat16)
    return torch.from_numpy(np.array(array)).to(device)


def to_float64(tensor: torch.Tensor) -> NDArray[np.float64]:
    return tensor.detach().double().cpu().numpy()


def assert_agrees(actual: torch.Tensor, expected: NDArray[np.float64], dtype: str, quantity: str) -> None:
    """The published tolerance of the dtype, entry by entry."""
    np.testing.assert_allclose(
        to_float64(actual), expected, **load_tolerances()["agreement"][dtype][quantity], err_msg=quantity
    )


def teacher_case(
    batch: int, heads: int, rows: int, keys: int, width: int, dtype: str, seed: int = 0
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Random maps with masked keys and one fully masked row, and value outputs, both exactly of the dtype."""
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.standard_normal((batch, heads, rows, keys))
    attn_mask = rng.random((batch, 1, rows, keys)) > 0.2
    attn_mask[..., 0] = True
    attn_mask[-1, 0, rows - 1] = False
    probs = shd_ref.softmax(logits, attn_mask)
    outputs = rng.standard_normal((batch, heads, keys, width))
    return probs.astype(DTYPES[dtype]), outputs.astype(DTYPES[dtype])


def row_mask(batch: int, rows: int, seed: int = 1) -> NDArray[np.bool_]:
    """About a third of the rows do not count; every sample keeps its first."""
    mask = np.random.default_rng(seed).random((batch, rows)) > 0.3
    mask[:, 0] = True
    return mask
