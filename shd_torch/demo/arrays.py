"""Arrays in memory as a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shd_ref.errors import ShdError


class ArrayDataset(Dataset[dict[str, Tensor]]):
    """Arrays with a common first axis as samples: mappings from name to tensor.

    Raises:
        ShdError: ``inputs-invalid`` for arrays of different lengths.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1:
            raise ShdError("inputs-invalid", f"arrays must share one first axis; got {sizes}")
        self.arrays = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.arrays.items()}
