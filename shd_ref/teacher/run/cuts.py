"""Short cuts of long samples, on which a check costs little: maps grow with the square of the length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.run.inputs import Batch, ModelInputs

CUT: Final = 128
"""Positions of a cut."""
_FRONT: Final = 16
"""Of these, padding in front at most."""


def cut_batch(inputs: ModelInputs, batch: Batch) -> Batch | None:
    """The same samples, cut to a stretch of positions that begins where the first two of them differ.

    A shorter sample ends in padding, in proportion to what it ends in as a whole.

    Args:
        inputs: of the batch.
        batch: of whole samples.

    Returns:
        The batch, which the graph need not run on; None where samples are as short as a cut, or of a fixed length.
    """
    cut: dict[str, NDArray[Any]] = {}
    for names, mask in inputs.sequences:
        longest = max((batch.arrays[name].shape[1] for name in names), default=0)
        if longest > CUT:
            arrays = {name: batch.arrays[name] for name in names if batch.arrays[name].shape[1] == longest}
            cut |= _cut(arrays, mask)
    return replace(batch, arrays=inputs.with_supplied(batch.arrays | cut)) if cut else None


def _cut(arrays: Mapping[str, NDArray[Any]], mask: str | None) -> dict[str, NDArray[Any]]:
    """A stretch of one sequence: arrays ``(B, L, ...)``, and which of them is the mask."""
    rows, longest = next(iter(arrays.values())).shape[:2]
    real = arrays[mask] != 0 if mask is not None and mask in arrays else np.ones((rows, longest), dtype=np.bool_)
    lengths = longest - real[:, ::-1].argmax(axis=1)
    differ = [(array[0] != array[min(1, rows - 1)]).reshape(longest, -1).any(axis=1) for array in arrays.values()]
    start = max(int(np.any(differ, axis=0).argmax()), int(real.argmax(axis=1).max()) - _FRONT)
    start = max(0, min(start, int(lengths.min()) - CUT // 2))  # of a sample that another one continues, its end
    size = min(CUT, longest - start)
    kept = np.maximum(1, size * (lengths - start) // (longest - start))
    counted = np.arange(size) < kept[:, None]
    cut = {}
    for name, array in arrays.items():
        cut[name] = array[:, start : start + size].copy()
        cut[name][~counted] = 0
    return cut
