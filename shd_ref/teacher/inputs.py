"""Model inputs from an npz file: checked against the graph, trimmed, keyed and batched without changing results."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from shd_ref.cache import sample_key, trim_sample
from shd_ref.errors import ShdError

Arrays = Mapping[str, NDArray[Any]]
MASK_NAMES: tuple[str, ...] = ("attention_mask", "input_mask")
"""Inputs taken for the attention mask when none is named."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph; an axis is an int where the graph fixes it."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


def input_specs(model: onnx.ModelProto) -> tuple[InputSpec, ...]:
    """The inputs that a caller must feed: those of the graph that no initialiser fills."""
    filled = {tensor.name for tensor in model.graph.initializer}
    specs = []
    for value in model.graph.input:
        if value.name in filled:
            continue
        tensor = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        axes = [axis.dim_value if axis.HasField("dim_value") else axis.dim_param or None for axis in tensor.shape.dim]
        specs.append(InputSpec(value.name, str(np.dtype(dtype)), tuple(axes)))
    return tuple(specs)


@dataclass(frozen=True)
class Batch:
    """Samples that run together: their data-set indices and arrays with a batch axis."""

    indices: tuple[int, ...]
    arrays: dict[str, NDArray[Any]]


class ModelInputs:
    """A data set of model inputs, one row a sample.

    Args:
        arrays: by graph input name, all with the same first axis N; others (labels, say) are ignored.
        specs: the graph's inputs.
        mask: name of the attention mask ``(N, L)``, nonzero = a real token; by default an input with one of
            ``MASK_NAMES``, if the graph has one.

    Attributes:
        names: inputs that are fed, sorted.
        mask: name of the attention mask, or None.
        ignored: names of arrays that the graph does not take.

    Raises:
        ShdError: ``inputs-invalid``, naming the input, what the graph wants and what was found.
    """

    def __init__(self, arrays: Arrays, specs: Iterable[InputSpec], mask: str | None = None) -> None:
        wanted = {spec.name: spec for spec in specs}
        missing = sorted(wanted.keys() - arrays.keys())
        if missing:
            raise ShdError(
                "inputs-invalid",
                f"inputs must hold {', '.join(sorted(wanted))}; missing {', '.join(missing)}, "
                f"found {', '.join(sorted(arrays)) or 'nothing'}",
            )
        self.names = tuple(sorted(wanted))
        self.ignored = tuple(sorted(arrays.keys() - wanted.keys()))
        self.mask = _choose_mask(wanted, mask)
        self._arrays = {name: _as_dtype(np.asarray(arrays[name]), wanted[name]) for name in self.names}
        counts = {name: len(array) for name, array in self._arrays.items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            raise ShdError("inputs-invalid", f"inputs must share one first axis of at least 1 sample; got {counts}")
        self._specs = wanted
        # Sequence axes that the graph leaves free may be cut to the longest sample of a batch.
        free = [s for s in wanted.values() if len(s.shape) > 1 and self._carries_sequence(s.name)]
        self._may_cut = self.mask is not None and all(not isinstance(s.shape[1], int) for s in free)
        batch_axes = {s.shape[0] for s in wanted.values() if s.shape and isinstance(s.shape[0], int)}
        self.fixed_batch: int | None = batch_axes.pop() if batch_axes else None

    def __len__(self) -> int:
        return len(self._arrays[self.names[0]])

    def sample(self, index: int) -> tuple[dict[str, NDArray[Any]], int | None]:
        """One sample as its key sees it, without padding, and its length (None without a mask)."""
        arrays = {name: self._arrays[name][index] for name in self.names}
        if self.mask is None:
            return arrays, None
        return trim_sample(arrays, self.mask)

    def keys(self) -> Iterator[str]:
        """The sample key of every sample, in order."""
        for index in range(len(self)):
            yield sample_key(self.sample(index)[0])

    def lengths(self) -> list[int | None]:
        """The length of every sample, in order (None without a mask)."""
        return [self.sample(index)[1] for index in range(len(self))]

    def batches(self, indices: Iterable[int], batch_size: int) -> Iterator[Batch]:
        """The samples in batches of similar length, longest first; deterministic for the same indices."""
        size = self.fixed_batch or batch_size
        lengths = {index: self.sample(index)[1] or 0 for index in indices}
        # Longest first, because an inference arena grows to its largest batch and never shrinks.
        ordered = sorted(lengths, key=lambda index: (-lengths[index], index))
        for start in range(0, len(ordered), size):
            chosen = ordered[start : start + size]
            # A graph with a fixed batch axis gets its last batch filled up by repeating a sample.
            rows = chosen + chosen[-1:] * (size - len(chosen)) if self.fixed_batch else chosen
            longest = max(lengths[index] for index in chosen)
            yield Batch(tuple(chosen), {name: self._rows(name, rows, longest) for name in self.names})

    def _rows(self, name: str, rows: list[int], longest: int) -> NDArray[Any]:
        array = self._arrays[name][rows]
        return array[:, :longest] if self._may_cut and self._carries_sequence(name) else array

    def _carries_sequence(self, name: str) -> bool:
        if self.mask is None:
            return False
        array, mask = self._arrays[name], self._arrays[self.mask]
        return array.ndim > 1 and array.shape[1] == mask.shape[1]


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file; pickled objects are refused.

    Raises:
        ShdError: ``inputs-invalid`` for a file that is absent, no npz archive, or holds objects.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ShdError(
            "inputs-invalid",
            f"inputs {path} must be a readable .npz file of plain arrays (numpy.savez): {error}",
        ) from error


def _choose_mask(wanted: Mapping[str, InputSpec], mask: str | None) -> str | None:
    if mask is None:
        return next((name for name in MASK_NAMES if name in wanted), None)
    if mask not in wanted:
        raise ShdError("inputs-invalid", f"mask must be one of the graph's inputs {sorted(wanted)}; got {mask!r}")
    return mask


def _as_dtype(array: NDArray[Any], spec: InputSpec) -> NDArray[Any]:
    """The array in the graph's dtype where no value changes its meaning; otherwise an error."""
    wanted = np.dtype(spec.dtype)
    if array.dtype == wanted:
        return array
    both_integer = array.dtype.kind in "iub" and wanted.kind in "iub"
    both_float = array.dtype.kind == "f" and wanted.kind == "f"
    converted = array.astype(wanted) if both_integer or both_float else None
    if converted is None or (both_integer and not np.array_equal(converted, array)):
        raise ShdError("inputs-invalid", f"input {spec.name!r} must be {wanted}; got {array.dtype}: convert it")
    return converted
