"""How far one run of a teacher is from another, summed over batches: outputs, and the loss on targets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.run.inputs import Batch
from shd_ref.teacher.sources import IndexedSource, Source
from shd_ref.teacher.study.intervals import Scores

RowMask = NDArray[np.bool_]


class RelativeError:
    """``|| y~ - y || / || y ||`` over the rows of all batches that count."""

    def __init__(self) -> None:
        self._error = self._norm = 0.0

    def add(self, got: NDArray[Any], wanted: NDArray[Any], row_mask: RowMask | None = None) -> None:
        """Count one batch of arrays ``(B, L, ...)``, or ``(B, ...)`` without a mask."""
        rows = counted_rows(wanted, row_mask)
        self._error += float(((got[rows].astype(np.float64) - wanted[rows]) ** 2).sum())
        self._norm += float((wanted[rows].astype(np.float64) ** 2).sum())

    @property
    def value(self) -> float:
        """0 where both norms vanish."""
        if self._norm == 0.0:
            return 0.0 if self._error == 0.0 else float("inf")
        return float(np.sqrt(self._error / self._norm))


class CosineDistance:
    """Mean over samples of 1 - cosine of their outputs; ``(B, L, D)`` is first averaged over counted rows."""

    def __init__(self) -> None:
        self._distances: list[float] = []

    def add(self, got: NDArray[Any], wanted: NDArray[Any], row_mask: RowMask | None = None) -> None:
        """Count one batch."""
        a, b = (_pooled(array, row_mask) for array in (got, wanted))
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosine = (a * b).sum(axis=1) / np.where(norms == 0.0, 1.0, norms)
        equal_zeros = ~a.any(axis=1) & ~b.any(axis=1)
        self._distances += np.where(equal_zeros, 0.0, np.maximum(1.0 - cosine, 0.0)).tolist()

    @property
    def scores(self) -> Scores:
        """Of every sample, in the order they were counted; at least 0."""
        return Scores(np.array(self._distances), np.ones(len(self._distances)))


@dataclass(frozen=True)
class Targets:
    """What the teacher should have said; from it, its own loss.

    Attributes:
        name: of the column.
        by_sample: for every sample a class label, or a class for each position ``(L,)``; negative ones do not count.
        next_token: the column is the model's own input, so position i is judged by the token at i + 1.
    """

    name: str
    by_sample: Mapping[int, NDArray[np.int64]]
    next_token: bool

    def of_batch(self, batch: Batch, row_mask: RowMask | None, logits: NDArray[Any]) -> NDArray[np.int64]:
        """The target of every row of the logits; -1 where none counts.

        Raises:
            ShdError: ``inputs-invalid`` where they do not fit the output.
        """
        targets: NDArray[np.int64] = np.full(logits.shape[:-1], -1, dtype=np.int64)
        for place, index in enumerate(batch.indices):
            target = self.by_sample[index]
            if target.ndim != targets.ndim - 1:
                raise ShdError(
                    "inputs-invalid",
                    f"targets {self.name!r} must hold a class for every row {logits.shape[:-1]} of the output; got "
                    f"{target.shape} a sample: choose another --output, or other targets",
                )
            if target.ndim:
                targets[place, : len(target)] = target[: targets.shape[-1]]  # the rest is padding
            else:
                targets[place] = target
        if row_mask is not None and row_mask.shape == targets.shape:
            targets = np.where(row_mask, targets, -1)
        if self.next_token:
            targets = np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], -1)], axis=1)
        if targets.max(initial=-1) >= logits.shape[-1]:
            raise ShdError(
                "inputs-invalid",
                f"targets {self.name!r} must be below the output's {logits.shape[-1]} classes; got {targets.max()}",
            )
        return targets


def read_targets(source: Source, name: str, samples: Collection[int], *, next_token: bool) -> Targets:
    """The targets of some samples.

    Args:
        source: the data set.
        name: its column of classes: one a sample, or one a position.
        samples: their indices.
        next_token: see ``Targets``.

    Raises:
        ShdError: ``inputs-invalid`` for a column that is absent or holds something else.
    """
    if name not in source.columns:
        raise source.refuse(f"must hold the targets {name}; found {', '.join(source.columns)}")
    if isinstance(source, IndexedSource):
        rows = {index: source.row(index, [name])[name] for index in samples}
    else:
        wanted = set(samples)
        rows = {index: row[name] for index, row in enumerate(source.rows([name])) if index in wanted}
    for index, row in rows.items():
        if isinstance(row, str) or row.dtype.kind not in "iu" or row.ndim > 1:
            raise source.refuse(f"{name} must hold integers, one a sample or one a position, to be targets", index)
    return Targets(name, {index: row.astype(np.int64) for index, row in rows.items()}, next_token)


class CrossEntropy:
    """Mean cross entropy of logits on targets, in nats."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._counts: list[int] = []

    def add(self, logits: NDArray[Any], targets: NDArray[np.int64]) -> None:
        """Count one batch; negative targets are left out."""
        for row_logits, row_targets in zip(logits, targets, strict=True):  # one sample: vocabularies are large
            wide = np.atleast_2d(row_logits).astype(np.float64)
            wanted = np.atleast_1d(row_targets)
            wide, wanted = wide[wanted >= 0], wanted[wanted >= 0]
            top = wide.max(axis=1, keepdims=True, initial=-np.inf)
            log_sum = np.log(np.exp(wide - top).sum(axis=1)) + top[:, 0]
            self._sums.append(float((log_sum - wide[np.arange(len(wanted)), wanted]).sum()))
            self._counts.append(len(wanted))

    @property
    def scores(self) -> Scores:
        """Of every sample, in the order they were counted, a count for each target; NaN where no target counted."""
        return Scores(np.array(self._sums), np.array(self._counts, dtype=np.float64))


def counted_rows(array: NDArray[Any], row_mask: RowMask | None) -> Any:
    """What to index an array ``(B, L, ...)`` with for its counted rows: everything where the mask does not fit."""
    fits = row_mask is not None and array.ndim > 2 and array.shape[:2] == row_mask.shape
    return row_mask if fits else slice(None)


def _pooled(array: NDArray[Any], row_mask: RowMask | None) -> NDArray[np.float64]:
    wide = array.astype(np.float64)
    if wide.ndim < 3:
        return wide.reshape(len(wide), -1)
    wide = wide.reshape(*wide.shape[:2], -1)
    weight = np.ones(wide.shape[:2])
    if row_mask is not None and row_mask.shape == weight.shape:
        weight = row_mask.astype(np.float64)
    mean: NDArray[np.float64] = np.einsum("bl,bld->bd", weight, wide) / np.maximum(weight.sum(1), 1.0)[:, None]
    return mean
