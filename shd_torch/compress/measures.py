"""How far scores, orders and labels agree: no student that knows nothing has more than about 0, the teacher has 1.

Also what people say of held-out samples: read with them, and checked before anything is run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shd_ref.errors import inputs_invalid
from shd_ref.teacher.sources import named_inputs, open_source
from shd_torch.compress.samples import QUERY, Row, length_of
from shd_torch.kd.embeddings import rank_correlation

_TOP: Final = 10  # places that NDCG counts


def correlate(first: Tensor, second: Tensor) -> list[float]:
    """Rank correlation of each column of ``(N, K)`` in which ``first`` differs between rows."""
    pairs = zip(first.T, second.T, strict=True)
    return [rank_correlation(a, b) for a, b in pairs if bool((a != a[0]).any())]


def compare_orders(teacher: Tensor, student: Tensor, queries: Tensor) -> dict[str, float]:
    """Means over queries whose pairs the teacher tells apart, of scores ``(N,)``; nothing where there are none.

    ``kendall``: of the pairs of pairs that it tells apart, the share in its order less the share in the other.
    ``ndcg``: its scores, discounted by place in the student's order and summed over ten places; 0 for a random order,
    1 for its own. No unit or zero of the scores matters.
    """
    kendall, ndcg = [], []
    for rows in _rows_of_queries(queries):
        expected, scores = teacher[rows].double(), student[rows]
        signs = torch.sign(expected[:, None] - expected)
        if bool(signs.any()):
            kendall.append(float((signs * torch.sign(scores[:, None] - scores)).sum() / signs.abs().sum()))
            best, random = _discounted(expected, expected), _discounted(expected, torch.zeros_like(expected))
            ndcg.append((_discounted(expected, scores) - random) / (best - random))
    return {"kendall": _mean(kendall), "ndcg": _mean(ndcg)} if kendall else {}


def _discounted(gains: Tensor, scores: Tensor) -> float:
    """The sum over the first places by score; places of equal scores share their gains."""
    _, ties, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    shared = (torch.zeros_like(gains[: len(counts)]).index_add(0, ties, gains) / counts)[ties]
    top = shared[scores.argsort(descending=True)[:_TOP]]
    return float((top / torch.arange(2, len(top) + 2).log2()).sum())


def rank_relevant(scores: Tensor, is_relevant: Tensor, queries: Tensor) -> dict[str, float]:
    """MAP and MRR over the queries with relevant texts and others; of equal scores the relevant come last.

    Otherwise a model that gives every text one score would rank as the file does.
    """
    precisions, firsts = [], []
    for rows in _rows_of_queries(queries):
        worst_first = rows[is_relevant[rows].int().argsort(stable=True)]
        ranked = worst_first[scores[worst_first].argsort(descending=True, stable=True)]
        places = is_relevant[ranked].nonzero()[:, 0] + 1
        if 0 < len(places) < len(rows):
            precisions.append(float((torch.arange(1, len(places) + 1) / places).mean()))
            firsts.append(1 / int(places[0]))
    return {"map": _mean(precisions), "mrr": _mean(firsts)} if precisions else {}


def compare_labels(teacher: Tensor, student: Tensor) -> dict[str, float]:
    """Of booleans ``(N, C)``, True = has the label; all but ``agreement`` are 0 where the teacher never differs.

    ``kappa``: agreement beyond that of independent draws at both rates, as a share of what is possible, over all
    labels together; ``worst``: the least of a label; ``agreement``: the share of equal labels.
    """
    varies = (teacher != teacher[0]).any(0)
    equal, rates = (teacher == student).double().mean(0), [side.double().mean(0) for side in (teacher, student)]
    chance = rates[0] * rates[1] + (1 - rates[0]) * (1 - rates[1])
    beyond, room = (equal - chance)[varies], (1 - chance)[varies]
    kappa, worst = (float(beyond.sum() / room.sum()), float((beyond / room).min())) if len(room) else (0.0, 0.0)
    return {"kappa": kappa, "worst": worst, "agreement": float(equal.mean())}


def _rows_of_queries(queries: Tensor) -> Iterator[Tensor]:
    return ((queries == number).nonzero()[:, 0] for number in torch.unique(queries))


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


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
        """A summary in the order of ``batches``, put in the order of the rows."""
        order = sorted(range(len(self.rows)), key=lambda row: length_of(self.rows[row]))
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
