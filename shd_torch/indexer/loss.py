"""``indexer_kl``: the loss of an indexer from queries and keys on both sides (spec chapter IDX), without any map.

``probe_indexer`` says what its selection keeps: the teacher's mass at the scorer's top-k, and at the best k keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shd_ref.integers import check_integer
from shd_torch.checks import check_mask, check_option, without_autocast
from shd_torch.indexer.request import REDUCTIONS, IndexerRequest, Outside, Scorer, Teachers, Tile, blocked_keys
from shd_torch.kl.gradient import KlResult, attach, refuse_transforms

_REMEDY = "indexer_scores and a loss on whole maps have derivatives of every order and mode"


@without_autocast
def indexer_kl(
    queries: Tensor,
    keys: Tensor,
    teacher: Teachers,
    *,
    scale: float,
    weights: Tensor | None = None,
    relu: bool = True,
    groups: int = 1,
    block_size: int = 1,
    top_k: int | None = None,
    restriction: str = "renormalised",
    reduction: str = "sum",
    loss_mask: Tensor | None = None,
    segments: Tensor | None = None,
    outside: Outside = None,
    check: bool = True,
) -> Tensor:
    """``KL(target || softmax(scores))`` of an indexer, dense or on its own top-k, in memory linear in the length.

    The target is the attention of all heads of the teacher as one distribution; it is formed for a few rows at a time
    and never for all heads at once. Gradients of queries, keys and weights are computed with the value, and the
    backward pass only scales them; other derivatives are rejected. Nothing flows into the teacher. Detach what the
    scorer's projections read if the model trains too. ``torch.autocast`` changes nothing here.

    Args:
        queries: the scorer's, ``(B, H_i, L, d_i)``, rotated as they are multiplied.
        keys: ``(B, H_k, C, d_i)``, one for each of the ``C = ceil(S / block_size)`` blocks; H_k divides H_i.
        teacher: ``Factored.teacher(q, k, is_causal=True)``, a layer of a factored cache, or a list of layers that one
            indexer serves. Its mixing plays no part; its rule says who may attend, on both sides, and its
            ``row_mass``, if any, weighs the heads (IDX-7).
        scale: factor of the scores, such as ``d_i ** -0.5``.
        weights: of the scorer's heads, ``(B, H_i, L)``; None for ones.
        relu: whether negative products count as 0.
        groups: G, blocks of heads on both sides with a target each; 1 is the mean of all heads.
        block_size: keys of a block.
        top_k: blocks that each row selects; None for the dense loss.
        restriction: ``"renormalised"`` (the source), ``"mask_first"``, ``"unnormalised"`` or ``"student_all"``.
        reduction: ``"sum"`` (the source), or the mean over ``"rows"`` or ``"samples"`` that count.
        loss_mask: boolean ``(B, L)``, True = the row counts.
        segments: integers ``(B, L)``, the packed sample of each position.
        outside: ``(B, H, L)``, log-sum-exp of logits in each head's denominator that the indexer does not score (a
            window, a sink), or one for each layer.
        check: validate values (device sync; a selection waits for the device anyway).

    Returns:
        A scalar in float32, or float64 if an argument is; nats.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.

    Source: arXiv 2512.02556, Eq. 1, 3, 4; IDX-1..16.
    """
    refuse_transforms(queries, keys, weights, name="indexer_kl", remedy=_REMEDY)
    check_option("reduction", reduction, REDUCTIONS, "IDX-13")
    scorer = Scorer(queries, keys, weights, scale, relu, groups, check=check)
    request = IndexerRequest.of(
        scorer,
        teacher,
        outside=outside,
        block_size=block_size,
        top_k=top_k,
        restriction=restriction,
        segments=segments,
        check=check,
    )
    if loss_mask is not None:
        check_mask(loss_mask, "loss_mask", (queries.shape[0], queries.shape[2]))
        loss_mask = loss_mask.to(queries.device)
    roots = [tensor for tensor in (queries, keys, weights) if tensor is not None]
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in roots)
    result = _run(request, restriction, reduction, loss_mask, wants_gradient)
    return attach(result, queries, keys, weights)


@torch.no_grad()
def _run(
    request: IndexerRequest, restriction: str, reduction: str, loss_mask: Tensor | None, wants_gradient: bool
) -> KlResult:
    """Value and gradients, tile by tile; every row that counts weighs the same, so the divisor comes last."""
    scorer, dtype = request.scorer, request.dtype
    device = scorer.queries.device
    value = torch.zeros((), dtype=dtype, device=device)
    tensors = (scorer.queries, scorer.keys, scorer.weights if wants_gradient else None)
    slopes = (
        [torch.zeros(t.shape, dtype=dtype, device=device) for t in tensors if t is not None] if wants_gradient else []
    )
    counts = torch.zeros(request.shape[:3], dtype=torch.bool, device=device)
    for tile in request.tiles():
        p, support = request.restrict(tile, restriction)
        counted = p.amax(-1) > 0
        if loss_mask is not None:
            counted &= loss_mask[tile.samples, None, tile.rows]
        counts[tile.samples, :, tile.rows] = counted
        mass = p.sum(-1, keepdim=True)
        logits = tile.scores.masked_fill(blocked_keys(support), -torch.inf)
        # Blocked keys are -inf, and 0 times that would be NaN; 0 times any other number, as the least of p, is 0.
        log_q = logits.log_softmax(-1).clamp_(min=torch.finfo(dtype).min)
        terms = p.clamp(min=torch.finfo(dtype).tiny).log_().sub_(log_q).mul_(p).sum(-1)
        value += terms.masked_fill_(~counted, 0.0).sum()
        if wants_gradient:
            slope = logits.softmax(-1).mul_(mass).sub_(p).mul_(scorer.scale * counted[..., None].to(dtype))
            _add_gradients(request, tile, slope, slopes)
    divisor = _divisor(counts, request.segments, reduction)
    dq, dk, dw = [slope / divisor for slope in slopes] + [None] * (3 - len(slopes))
    return KlResult(value / divisor, dq, dk, dw)


def _add_gradients(request: IndexerRequest, tile: Tile, slope: Tensor, slopes: list[Tensor]) -> None:
    """Add a tile's gradients, from the scores' ``(B, G, R, C)`` times the scale (IDX-14)."""
    scorer, x = request.scorer, tile.products
    batch, heads, _, blocks = x.shape
    by_head = slope[:, :, None].expand(-1, -1, heads // slope.shape[1], -1, -1).reshape(x.shape)
    if scorer.relu:
        by_head = torch.ops.aten.threshold_backward(by_head, x, 0)
    keys = scorer.keys[tile.samples, :, tile.blocks].to(x.dtype)
    queries = scorer.queries[tile.samples, :, tile.rows].to(x.dtype)
    by_head = by_head.reshape(batch, keys.shape[1], -1, blocks)
    dq = (by_head @ keys).reshape(queries.shape)
    if scorer.weights is not None:
        # Without the weights dq is sum dI f' k, and sum dI f(x) its product with the queries.
        slopes[2][tile.samples, :, tile.rows] = torch.linalg.vecdot(queries, dq)
        weights = scorer.weights[tile.samples, :, tile.rows, None].to(x.dtype)
        dq, queries = dq * weights, queries * weights
    slopes[0][tile.samples, :, tile.rows] = dq
    slopes[1][tile.samples, :, tile.blocks] += by_head.mT @ queries.reshape(batch, keys.shape[1], -1, dq.shape[3])


def _divisor(counts: Tensor, segments: Tensor | None, reduction: str) -> Tensor | float:
    """The divisor of the sum over rows that count (IDX-13)."""
    if reduction == "sum":
        return 1.0
    if reduction == "rows":
        return counts.sum().clamp_min(1)
    rows = counts.any(1)
    if segments is None:
        return rows.any(-1).sum().clamp_min(1)
    samples = torch.arange(rows.shape[0], device=rows.device)[:, None].expand_as(rows)
    pairs = zip(samples[rows].tolist(), segments[rows].tolist(), strict=True)
    return float(max(len(set(pairs)), 1))


class Span(NamedTuple):
    """Some positions: means over samples, and half of the 95% interval of the mean that is kept."""

    first: int
    last: int
    kept: float
    best: float
    kept_interval: float


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
            kept_means, best_means = (part[:, first:stop].nanmean(1) for part in (self.kept, self.best))
            kept_means, best_means = kept_means[~kept_means.isnan()], best_means[~best_means.isnan()]
            means = float(kept_means.mean()), float(best_means.mean())
            spans.append(Span(first, stop - 1, *means, _half_width(kept_means)))
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
    mass, best = (torch.full((batch, rows), torch.nan, dtype=request.dtype, device=queries.device) for _ in range(2))
    for tile in request.tiles():
        live = tile.target.sum(-1) > 0
        masses = [tile.target.masked_fill(~tile.chosen, 0.0).sum(-1)]
        masses.append(tile.target.topk(min(top_k, tile.target.shape[-1]), dim=-1).values.sum(-1))
        for result, part in zip((mass, best), masses, strict=True):
            result[tile.samples, tile.rows] = part.masked_fill(~live, torch.nan).nanmean(1)
    return KeptMass(mass, best)


def _half_width(values: Tensor) -> float:
    """Half of the 95% interval of a mean, by the normal distribution."""
    return 1.96 * float(values.std()) / math.sqrt(values.numel()) if values.numel() > 1 else math.nan
