"""What ``SHDTrainer`` logs beside the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class StepRecord:
    """Sums over the steps since the last log, of this process; kept on the device until they are logged."""

    def __init__(self) -> None:
        self.rows_in_step: dict[str, int] = {}  # that count in the running step's micro-batches, by what counts them
        self.wait_seconds = 0.0  # for data
        self._last_step: int | None = None
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._alphas: list[tuple[Tensor, Tensor | int]] = []  # clipped and all, of each batch

    def begin(self, step: int) -> None:
        """Note the step that the first sum belongs to: not 0 where a training is resumed."""
        self._last_step = step if self._last_step is None else self._last_step

    def add(self, parts: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """A micro-batch's parts of its step's losses, by the names they are logged under, and what weighs them."""
        for name, value in parts.items():
            term = value.detach()
            self._sums[name] = self._sums[name] + term if name in self._sums else term
        self._weights = dict(weights)

    def count_alphas(self, counts: Tensor | None, online: Sequence[Any], num_rows: int) -> None:
        """Merge weights of a micro-batch: ``(clipped, all)`` of a cache, and what live teachers report."""
        if counts is not None:
            self._alphas.append((counts[0], counts[1]))
        for supervision in online:
            for squeeze in supervision.squeezes:
                # (B, pairs), or (B, pairs, L) with rows of padding among them.
                numbers = (
                    num_rows * alpha.shape[1] if alpha.ndim == 3 else alpha.numel() for alpha in squeeze.alphas
                )
                self._alphas.append((squeeze.num_clipped, sum(numbers)))

    def means(self, step: int) -> dict[str, float]:
        """Means over the steps since the last call, which this one ends; ``clipped`` and ``alphas`` are numbers."""
        steps = max(step - (self._last_step or 0), 1)
        means = {name: float(value) / steps for name, value in self._sums.items()}
        means |= {name: float(weight) for name, weight in self._weights.items()}
        for index, name in enumerate(("clipped", "alphas")):
            means[name] = float(sum(int(pair[index]) for pair in self._alphas))
        means["wait_seconds"] = self.wait_seconds / steps
        rows = self.rows_in_step
        self.__init__()  # type: ignore[misc]
        self.rows_in_step, self._last_step = rows, step
        return means
