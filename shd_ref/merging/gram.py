"""The gram tensor (spec chapter GRAM): every alpha of every round without a value output in memory.

``G[i, j, k, l] = <A_i X_j, A_k X_l>`` comes from attention outputs ``A_i V_j`` and the constants ``W_j W_l^T``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float, as_mask, check_probs
from shd_ref.errors import ShdError
from shd_ref.integers import as_index
from shd_ref.merging.alpha import check_alphas
from shd_ref.tolerances import degenerate_threshold


def gram_tensor(
    teacher_probs: ArrayLike,
    values: ArrayLike,
    output_projection: ArrayLike,
    *,
    query_mask: ArrayLike | None = None,
    row_sums: str = "one",
) -> Array:
    """``<A_i V_j W_j W_l^T, A_k V_l>`` for all heads i, j, k, l, over counted rows (GRAM-1).

    Args:
        teacher_probs: A ``(B, H_t, L, S)``.
        values: V ``(B, H_kv, S, d_v)`` with H_kv a divisor of H_t.
        output_projection: W_o ``(H_t * d_v, D)``.
        query_mask: boolean ``(B, L)``, True = the row counts; default all.
        row_sums: ``"one"`` or ``"at_most_one"``.

    Returns:
        ``(B, H_t, H_t, H_t, H_t)``.

    Raises:
        ShdError: ``argument-shape`` (GRAM-6), ``argument-value``, ``argument-dtype``, ``not-finite``,
            ``not-a-distribution``.

    Source: silent. Decision: D-22.
    """
    v, w = as_float(values, "values", ndim=4), as_float(output_projection, "output_projection", ndim=2)
    shape = np.shape(teacher_probs)
    if len(shape) != 4 or v.shape[::2] != shape[::3] or shape[1] % v.shape[1] or len(w) != shape[1] * v.shape[3]:
        rule = "teacher_probs (B, H_t, L, S), values (B, H_kv, S, d_v) and output_projection (H_t * d_v, D) must fit"
        raise ShdError("argument-shape", f"{rule}; got {shape}, {v.shape} and {w.shape}", "GRAM-6")
    mask = None if query_mask is None else as_mask(query_mask, "query_mask", shape[::2])
    probs = check_probs(teacher_probs, "teacher_probs", query_mask=mask, row_sums=row_sums)
    weight = np.ones(shape[::2]) if mask is None else mask.astype(np.float64)  # (B, L)
    v = np.repeat(v, shape[1] // v.shape[1], axis=1)  # (B, H_t, S, d_v)
    products = probs[:, :, None] @ v[:, None]  # A_i V_j (B, H_t, H_t, L, d_v)
    w = w.reshape(shape[1], v.shape[3], -1)
    constants = np.einsum("jvd,lwd->jlvw", w, w)  # W_j W_l^T
    # One l after another: all at once would hold H_t^3 outputs, 137 GB for 128 heads of 128 and 64 tokens.
    counted = products * weight[:, None, None, :, None]
    batch, heads = shape[:2]
    terms = []
    for number in range(heads):
        turned = (products @ constants[:, number]).reshape(batch, heads * heads, -1)
        other = counted[:, :, number].reshape(batch, heads, -1)
        terms.append((turned @ other.swapaxes(1, 2)).reshape(batch, heads, heads, heads))
    return np.stack(terms, axis=4)


def solve_alpha_from_gram(gram: ArrayLike, p: int, q: int) -> Array:
    """Alpha of the pool's heads p and q, clipped; 1/2 where degenerate (GRAM-2, GRAM-3, GRAM-7).

    Args:
        gram: from ``gram_tensor`` or ``merge_gram``.
        p: position of the first head, whose weight alpha is.
        q: position of the second.

    Returns:
        ``(B,)``.

    Raises:
        ShdError: ``argument-shape``, ``argument-value`` (GRAM-6), ``not-finite``.

    Source: Eq. 5-9. Deviation: D-1.
    """
    g = _check_pool(gram, p, q)
    pairs = ((p, p), (p, q), (q, q))
    pp, pq, qq = (g[:, p, j, p, k] - g[:, p, j, q, k] - g[:, q, j, p, k] + g[:, q, j, q, k] for j, k in pairs)
    scale = sum(g[:, i, j, i, k] for i in (p, q) for j in (p, q) for k in (p, q))
    denominator = pp + 2 * pq + qq  # ||M||^2
    # Where value outputs cancel, rounding leaves the scale below 0, and the quotient of two zeros (GRAM-7).
    degenerate = denominator <= degenerate_threshold() * np.maximum(scale, 0.0)
    alpha = np.clip((pp + pq) / np.where(degenerate, 1.0, denominator), 0.0, 1.0)
    return np.where(degenerate, 0.5, alpha)


def merge_gram(gram: ArrayLike, p: int, q: int, alpha: ArrayLike) -> Array:
    """The gram tensor of the pool after merging p and q: the merged head first, the others in order (GRAM-4).

    Args:
        gram: ``(B, H, H, H, H)``.
        p: position of the first head.
        q: position of the second.
        alpha: weight of the first, ``(B,)``.

    Returns:
        ``(B, H - 1, H - 1, H - 1, H - 1)``.

    Raises:
        ShdError: ``argument-shape``, ``argument-value``, ``mixing-invalid`` (GRAM-6), ``not-finite``.

    Source: Eq. 5 and 6, in inner products. Decisions: D-2, D-22.
    """
    g, a = _check_pool(gram, p, q), as_float(alpha, "alpha")
    if a.shape != g.shape[:1]:
        raise ShdError("argument-shape", f"alpha must have shape {g.shape[:1]}; got {a.shape}", "GRAM-6")
    check_alphas(a, "alpha", "GRAM-6")
    a = a[:, None, None, None]  # beside three axes of heads
    rest = [head for head in range(g.shape[1]) if head not in (p, q)]
    for axis in (1, 2, 3, 4):
        first, second = np.take(g, p, axis=axis), np.take(g, q, axis=axis)
        # Maps mix (axes of i and k), value outputs add (axes of j and l).
        merged = a * first + (1.0 - a) * second if axis in (1, 3) else first + second
        g = np.concatenate((np.expand_dims(merged, axis), np.take(g, rest, axis=axis)), axis=axis)
    return g


def _check_pool(gram: ArrayLike, p: int, q: int) -> Array:
    g = as_float(gram, "gram")
    if g.ndim != 5 or len(set(g.shape[1:])) != 1:
        raise ShdError("argument-shape", f"gram must be (B, H, H, H, H); got {g.shape}", "GRAM-6")
    try:
        valid = as_index(p) != as_index(q) and all(0 <= head < g.shape[1] for head in (p, q))
    except TypeError:
        valid = False
    if not valid:
        message = f"p and q must be two positions of 0..{g.shape[1] - 1}; got {p!r} and {q!r}"
        raise ShdError("argument-value", message, "GRAM-6")
    return g
