"""What an indexer's selection keeps: the teacher's mass at the scorer's top-k, and at the best k keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.integers import check_integer
from shd_torch.checks import without_autocast
from shd_torch.indexer.request import IndexerRequest, Outside, Scorer, Teachers


class Span(NamedTuple):
    """Some positions: means over samples, and half of the 95% intervals of the mean and of the paired gap."""

    first: int
    last: int
    kept: float
    best: float
    kept_interval: float
    gap_interval: float  # of best - kept


@dataclass(frozen=True, eq=False)
class KeptMass:
    """The mass of each row's target at the selected keys and at its k best, both ``(B, L)``; NaN without a target."""

    kept: Tensor
    best: Tensor

    def spans(self, count: int = 8) -> list[Span]:
        """Means over equal spans of positions; intervals are over samples, NaN where there is one.

        Args:
            count: how many spans, at most one for each position.

        Raises:
            ShdError: ``argument-value``.
        """
        length = self.kept.shape[1]
        count = min(check_integer("count", count, 1, None, "IDX-10"), length)
        edges = [round(length * i / count) for i in range(count + 1)]
        spans = []
        for first, stop in pairwise(edges):
            kept, best = (part[:, first:stop].nanmean(1) for part in (self.kept, self.best))
            kept, best = kept[~kept.isnan()], best[~best.isnan()]
            means = float(kept.mean()), float(best.mean())
            spans.append(Span(first, stop - 1, *means, _half_width(kept), _half_width(best - kept)))
        return spans


@without_autocast
@torch.no_grad()
def probe_indexer(
    queries: Tensor,
    keys: Tensor,
    teacher: Teachers,
    *,
    top_k: int,
    scale: float,
    weights: Tensor | None = None,
    relu: bool = True,
    groups: int = 1,
    block_size: int = 1,
    segments: Tensor | None = None,
    outside: Outside = None,
) -> KeptMass:
    """How much of the teacher's attention the scorer's top-k keeps, against the best k keys of each row.

    Groups are averaged. Memory is linear in the length, as for ``indexer_kl``, whose arguments these are. ``top_k``
    are the blocks that each row selects.

    Returns:
        Two ``(B, L)`` from 0 to 1.

    Raises:
        ShdError: as ``indexer_kl``.

    Source: IDX-9, IDX-10.
    """
    top_k = check_integer("top_k", top_k, 1, None, "IDX-10")
    scorer = Scorer(queries, keys, weights, scale, relu, groups, check=True)
    request = IndexerRequest.of(
        scorer, teacher, outside=outside, block_size=block_size, top_k=top_k, segments=segments
    )
    batch, _, rows, _ = request.shape
    kept, best = (torch.full((batch, rows), torch.nan, dtype=request.dtype, device=queries.device) for _ in range(2))
    for tile in request.tiles():
        live = tile.target.sum(-1) > 0
        masses = [tile.target.masked_fill(~tile.chosen, 0.0).sum(-1)]
        masses.append(tile.target.topk(min(top_k, tile.target.shape[-1]), dim=-1).values.sum(-1))
        for whole, part in zip((kept, best), masses, strict=True):
            whole[tile.samples, tile.rows] = part.masked_fill(~live, torch.nan).nanmean(1)
    return KeptMass(kept, best)


def _half_width(values: Tensor) -> float:
    """Half of the 95% interval of a mean, by the normal distribution."""
    return 1.96 * float(values.std()) / math.sqrt(values.numel()) if values.numel() > 1 else math.nan
