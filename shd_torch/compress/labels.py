"""What people say of held-out samples: read with them, and checked before anything is run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shd_ref.errors import inputs_invalid
from shd_ref.teacher.sources import named_inputs, open_source
from shd_torch.compress.samples import QUERY, Row, length_of

if TYPE_CHECKING:
    from shd_torch.compress.task import Task


@dataclass(frozen=True)
class Labelled:
    """Held-out samples with their labels.

    Attributes:
        rows: all of the file, in its order; of pairs that are apart, first the first texts, then the second ones.
        column: that the labels are in.
        values: a number, or several, of each line of the file ``(N, ...)``.
    """

    rows: Sequence[Row]
    column: str
    values: NDArray[np.float64]

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.column.encode() + self.values.tobytes(), digest_size=16).hexdigest()

    def restore(self, summary: Tensor) -> Tensor:
        """What ``batches`` of the rows gave, in the order of the rows."""
        order = sorted(range(len(self.rows)), key=lambda at: length_of(self.rows[at]))
        return torch.empty_like(summary).index_copy(0, torch.tensor(order), summary)

    def numbers(self, count: int) -> Tensor:
        """``(N, count)``."""
        values = torch.from_numpy(self.values).reshape(len(self.values), -1)
        return self._fit(values, values.shape[1] == count, f"{count} finite numbers" if count > 1 else "a number")

    def classes(self, count: int) -> Tensor:
        """``(N,)``, each below ``count``."""
        values = self.numbers(1)[:, 0]
        fits = bool(((values >= 0) & (values < count) & (values == values.round())).all())
        return self._fit(values, fits, f"one of the model's classes, 0 to {count - 1} or its name")

    def flags(self, count: int) -> Tensor:
        """Booleans ``(N, count)``, True = has the label."""
        values = self.numbers(count)
        return self._fit(values, bool(((values == 0) | (values == 1)).all()), f"{count} numbers of 0 and 1") > 0

    def _fit(self, values: Tensor, fits: bool, rule: str) -> Tensor:
        if not (fits and bool(values.isfinite().all())):
            raise inputs_invalid(f"held_out must hold in column {self.column} {rule}; got {self.values.ravel()[:4]}")
        return values


def read_labels(path: Path, rows: Sequence[Row], task: Task, config: Any) -> Labelled | None:
    """The labels of a file, of which ``rows`` were read; None without a column that the task has a measure for.

    Raises:
        ShdError: ``inputs-invalid`` for labels that the measure cannot be computed with.
    """
    source = None if path.suffix == ".npy" else open_source(path)
    column = None if source is None else next((name for name in task.LABELS if name in source.columns), None)
    if source is None or column is None:
        return None
    names = getattr(config, "label2id", None) or {}
    with named_inputs("held_out"):
        raw = [row[column] for row in source.rows([column])]
        try:
            values = np.array([names[value] if isinstance(value, str) else value for value in raw], np.float64)
        except (KeyError, ValueError, TypeError) as error:
            rule = f"held_out must hold in column {column} numbers, as many in each line, or names of classes"
            raise inputs_invalid(f"{rule}; got {error}") from error
    labels, has_logits = Labelled(rows, column, values), task.LOGITS != "none"
    if not has_logits and len(rows) == len(values):  # single texts, of which an encoder says nothing
        return None
    # Outputs of a model that knows nothing: labels that they cannot be compared with are refused now.
    sizes = (int(config.num_labels),) if has_logits else (1, 2)
    output = torch.randn(len(rows), *sizes, generator=torch.Generator().manual_seed(0))
    batch = {"attention_mask": torch.ones(output.shape[:2])}
    if QUERY in rows[0]:
        batch[QUERY] = torch.tensor([int(row[QUERY]) for row in rows])
    if not task.grade(task.summarise(output, batch), labels):
        rule = "labels that differ between samples, and of a reranker between the texts of some query"
        raise inputs_invalid(f"held_out must hold in column {column} {rule}; got {np.unique(values)[:4]}")
    return labels
