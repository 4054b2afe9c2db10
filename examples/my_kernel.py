"""Your own loss, judged: a wrong version fails with the likely mistake, a right one passes.

    python my_kernel.py

`forward_kl` below represents your kernel, in any framework. The judge calls it with NumPy arrays under the names of
specs/shd.md, here through an adapter that declares its options. The first version divides by all rows, like `mean()`
over padded batches; the judge names that mistake. It ends with

    conforms to shd_loss; lacks attn_mask, divergence, ...
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import shd_ref
from shd_ref.conformance import judge

JUDGED = "shd_loss"
"""Omit `only` to judge everything; the verdict names what this kernel lacks."""


def forward_kl(target: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, *, all_rows: bool) -> torch.Tensor:
    """KL(target || softmax(logits)) of each map, summed over maps (LOSS-1, LOSS-2, LOSS-4).

    Args:
        target: ``(B, H, L, S)`` merged maps.
        logits: ``(B, H, L, S)`` of the student, ``-inf`` where it may not attend.
        rows: ``(B, L)``, True where a row counts.
        all_rows: the mistake: the mean is over padding too.
    """
    log_q = logits.log_softmax(-1)
    terms = torch.where(target > 0, target * (target.clamp_min(1e-300).log() - log_q), 0).sum(-1)
    counted = rows[:, None] & (target > 0).any(-1)  # a row without mass does not count
    count = torch.full_like(terms[0, :, 0], rows.numel()) if all_rows else counted.sum((0, 2)).clamp_min(1)
    return (torch.where(counted, terms, 0).sum((0, 2)) / count).sum()


class Adapter:
    """Passes the judge's arrays to the kernel."""

    def __init__(self, all_rows: bool) -> None:
        self.all_rows = all_rows

    def run_operation(self, operation: str, inputs: dict[str, Any], dtype: str) -> float:
        """One call; an unsupported option is reported as missing, not as failed."""
        options = inputs.keys() - {"supervision", "student_logits", "beta", "loss_mask"}
        if operation != "shd_loss" or options or isinstance(inputs["supervision"], list):
            raise NotImplementedError(operation)
        shd_ref.shd_loss(**inputs)  # refuses bad arguments, which a kernel does not see
        target, logits = (np.array(inputs[name], np.float64) for name in ("supervision", "student_logits"))
        beta, mask = inputs.get("beta", 1.0), inputs.get("loss_mask")
        rows = np.ones((target.shape[0], target.shape[2]), bool) if mask is None else np.array(mask)
        loss = forward_kl(*map(torch.tensor, (target, logits, rows)), all_rows=self.all_rows)
        return float(beta * loss)


def main() -> None:
    """Judge both versions."""
    for name, all_rows in (("mean over all rows", True), ("mean over rows that count", False)):
        report = judge(Adapter(all_rows), dtype="float64", name=name, only=JUDGED)
        print(report.summary())


if __name__ == "__main__":
    main()
