"""The best convex weights of a whole group (spec chapter MIX, MIX-7): one small quadratic problem a group.

The pairwise rounds of ``shd`` are a greedy way to merge k heads; this is the optimum over all k weights at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shd_ref.attention import Array, Mask
from shd_ref.tolerances import degenerate_threshold


def simplex_mixing(
    probs: Array, outputs: Array, groups: Sequence[Sequence[int]], mask: Mask | None, alpha_per: str
) -> Array:
    """The k-way optimum of each group: min over the simplex of || sum_i c_i U_i ||^2 (MIX-7).

    As the weights sum to one, the group's error is a convex combination of ``U_i = A_i X - O`` with X the
    sum of the group's value outputs and O its attention output.
    """
    batch, num_heads, num_rows, _ = probs.shape
    mixing = np.zeros((batch, len(groups), num_heads, num_rows))
    weight = np.ones((batch, num_rows)) if mask is None else mask.astype(np.float64)
    for h, members in enumerate(groups):
        group = list(members)
        total = outputs[:, group].sum(axis=1, keepdims=True)
        merged = probs[:, group] @ total  # (B, k, L, D)
        errors = merged - (probs[:, group] @ outputs[:, group]).sum(axis=1, keepdims=True)
        gram = np.einsum("bild,bjld,bl->blij", errors, errors, weight)
        scale = np.einsum("bild,bild,bl->bl", merged, merged, weight)
        if alpha_per == "map":
            gram, scale = gram.sum(axis=1, keepdims=True), scale.sum(axis=1, keepdims=True)
        for b in range(batch):
            for i in range(gram.shape[1]):
                rows = slice(None) if alpha_per == "map" else slice(i, i + 1)
                mixing[b, h, group, rows] = _group_weights(gram[b, i], scale[b, i])[:, None]
    return mixing


def _group_weights(gram: Array, scale: float) -> Array:
    norms = np.diag(gram)
    farthest = float((norms[:, None] + norms[None, :] - 2 * gram).max())  # max ||U_i - U_j||^2
    if farthest <= degenerate_threshold() * scale:
        return np.full(len(gram), 1.0 / len(gram))
    return simplex_weights(gram)


def simplex_weights(gram: Array) -> Array:
    """The convex weights c that minimise ``c^T gram c``: the point of a hull nearest to zero (MIX-7).

    Wolfe's active-set method on the Gram matrix of the hull's points; exact in finitely many steps.

    Args:
        gram: ``(k, k)``, positive semi-definite.

    Returns:
        ``(k,)``, at least 0, summing to one.
    """
    k = len(gram)
    tolerance = 1e-14 * max(float(np.trace(gram)), np.finfo(np.float64).tiny)
    weights: Array = np.zeros(k)
    active = [int(np.argmin(np.diag(gram)))]
    weights[active[0]] = 1.0
    for _ in range(8 * k * k + 8):  # finite in theory; the bound only guards against rounding cycles
        slope = gram @ weights
        best = int(np.argmin(slope))
        if best in active or slope[best] >= weights @ slope - tolerance:
            break
        active.append(best)
        while True:
            affine = _affine_minimum(gram[np.ix_(active, active)])
            if (affine > 0.0).all():
                weights[:] = 0.0
                weights[active] = affine
                break
            current = weights[active]
            falling = affine <= 0.0
            drop = current[falling] - affine[falling]
            step = float(np.min(current[falling] / np.where(drop == 0.0, 1.0, drop)))
            weights[active] = np.maximum(current + min(step, 1.0) * (affine - current), 0.0)
            kept = [i for i in active if weights[i] > 1e-15]
            weights[[i for i in active if i not in kept]] = 0.0
            active = kept
    normalised: Array = weights / weights.sum()
    return normalised


def _affine_minimum(gram: Array) -> Array:
    """Weights summing to one, of any sign, that minimise the quadratic form."""
    k = len(gram)
    scale = max(float(np.trace(gram)) / k, np.finfo(np.float64).tiny)
    system = np.zeros((k + 1, k + 1))
    system[:k, :k] = gram / scale
    system[:k, k] = system[k, :k] = 1.0
    target = np.zeros(k + 1)
    target[k] = 1.0
    solution: Array = np.asarray(np.linalg.lstsq(system, target, rcond=None)[0][:k], dtype=np.float64)
    return solution
