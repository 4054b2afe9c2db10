"""What an indexer's selection keeps: the teacher's mass at the scorer's top-k, and at the best k keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.errors import ShdError
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

    Groups are averaged. Memory is linear in the length, as for ``indexer_kl``, whose arguments these are.

    Args:
        queries: the scorer's, ``(B, H_i, L, d_i)``.
        keys: ``(B, H_k, C, d_i)``.
        teacher: as for ``indexer_kl``.
        top_k: blocks that each row selects.
        scale: factor of the scores.
        weights: ``(B, H_i, L)``; None for ones.
        relu: whether negative products count as 0.
        groups: blocks of heads with a target each.
        block_size: keys of a block.
        segments: integers ``(B, L)``, the packed sample of each position.
        outside: log-sum-exp of logits that the indexer does not score.

    Returns:
        Two ``(B, L)`` from 0 to 1.

    Raises:
        ShdError: as ``indexer_kl``.

    Source: IDX-9, IDX-10.
    """
    top_k = check_integer("top_k", top_k, 1, None, "IDX-10")
    scorer = Scorer.of(queries, keys, weights, scale=scale, relu=relu, groups=groups, check=True)
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


def draw_kept_mass(layers: Mapping[str, KeptMass], count: int = 16) -> str:
    """A picture (SVG) of the mass that each layer's selection keeps by position, with 95% intervals.

    The scorer's is blue, that of the best k keys grey.

    Args:
        layers: results of ``probe_indexer`` by the layer's name.
        count: spans of positions.

    Raises:
        ShdError: ``argument-value``: no layer.
    """
    if not layers:
        raise ShdError("argument-value", "layers must name at least one layer; got none")
    width, height, margin = 220, 120, 34
    parts = [
        f'<text x="{margin - 12}" y="{margin + 8}">1</text>\n<text x="{margin - 12}" y="{margin + height}">0</text>',
        f'<text x="{margin}" y="{height + 2 * margin - 4}">mass kept of the teacher\'s attention by '
        '<tspan fill="#2166ac">the scorer\'s top-k</tspan> and <tspan fill="#888">the best k keys</tspan></text>',
    ]
    for number, (name, mass) in enumerate(layers.items()):
        spans = [span for span in mass.spans(count) if not math.isnan(span.kept)]  # where a row has a key
        left = margin + number * (width + margin)

        def place(span: Span, value: float, left: int = left, last: int = mass.kept.shape[1]) -> str:
            x = left + width * (span.first + span.last + 1) / 2 / last
            return f"{x:.1f},{margin + height * (1.0 - min(max(value, 0.0), 1.0)):.1f}"

        band = [(span, 0.0 if math.isnan(span.kept_interval) else span.kept_interval) for span in spans]
        edge = [place(s, s.kept - half) for s, half in band] + [place(s, s.kept + half) for s, half in reversed(band)]
        title = name.replace("&", "&amp;").replace("<", "&lt;")
        parts += [
            f'<text x="{left}" y="{margin - 10}">{title}</text>',
            f'<text x="{left}" y="{margin + height + 14}">position 0</text>',
            f'<text x="{left + width}" y="{margin + height + 14}" text-anchor="end">{mass.kept.shape[1] - 1}</text>',
            f'<rect x="{left}" y="{margin}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>',
            f'<polygon points="{" ".join(edge)}" fill="#2166ac" opacity="0.25"/>',
            *(
                f'<polyline points="{" ".join(place(s, v) for s, v in line)}" fill="none" stroke="{colour}"/>'
                for colour, line in (
                    ("#888", [(s, s.best) for s in spans]),
                    ("#2166ac", [(s, s.kept) for s in spans]),
                )
            ),
        ]
    size = f'width="{margin + len(layers) * (width + margin)}" height="{height + 2 * margin}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n{body}\n</svg>\n'
    )


def _half_width(values: Tensor) -> float:
    """Half of the 95% interval of a mean, by the normal distribution."""
    return 1.96 * float(values.std()) / math.sqrt(values.numel()) if values.numel() > 1 else math.nan
