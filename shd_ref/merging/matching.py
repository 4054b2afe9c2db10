"""Matched plans (spec chapter PLAN, PLAN-9 to -13): pairs chosen once, on calibration data. Needs networkx."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import Array, Mask
from shd_ref.errors import ShdError, import_package
from shd_ref.integers import check_option
from shd_ref.merging.alpha import merge_error, solve_pair
from shd_ref.merging.mixing import Head, check_teacher, make_pool, merge_round
from shd_ref.merging.plans import MergePlan, Pair, check_counts
from shd_ref.tolerances import tie_width

MATCHED_BY: tuple[str, ...] = ("residual", "similarity")


def matched_plan(
    calibration: Sequence[Sequence[ArrayLike | None]],
    num_student_heads: int,
    by: str = "residual",
    *,
    row_sums: str = "one",
) -> MergePlan:
    """The plan whose pairs fit best on calibration data: a maximum-weight matching a round (PLAN-9..13).

    Args:
        calibration: items ``(teacher_probs, value_outputs)`` or ``(teacher_probs, value_outputs, query_mask)``, as
            ``squeeze_heads`` takes them, all of one layer of one teacher. Batches may differ in B, L and S.
        num_student_heads: H_s, from 1 to H_t.
        by: ``"residual"`` (least squared error of the merged attention output) or ``"similarity"`` (least squared
            distance of the maps).
        row_sums: ``"one"`` or ``"at_most_one"``.

    Returns:
        Explicit rounds for ``squeeze_heads(..., plan=...)``; pairs in order of their first head.

    Raises:
        ShdError: ``dependency-missing``, ``heads-exceed``, ``argument-value``, ``argument-shape``, and the codes of
            ``squeeze_heads`` for each item.

    Source: the ablation on head matching. Decision: D-18.
    """
    return _match(*read_calibration(calibration, row_sums), None, num_student_heads, by)


def match_pairs(scores: Array, num_pairs: int) -> tuple[Pair, ...]:
    """Disjoint pairs with the largest sum of scores above the diagonal, the first of several (PLAN-9, PLAN-10)."""
    message = "matched_plan needs networkx; got none: pip install '.[oracles]' (in a checkout)"
    networkx = import_package("networkx", message, "ERR-5")
    heads = len(scores)
    graph = networkx.Graph()
    rows, columns = np.triu_indices(heads, 1)
    # Whole numbers, with which the search is exact. Below the score's last bit there is one bit per pair, the first
    # pair's highest: of equally good sets the one whose list comes first is best.
    last = len(rows) - 1
    for number, score in enumerate(settle_scores(scores[rows, columns])):
        weight = (score << len(rows)) + (1 << (last - number))
        graph.add_edge(int(rows[number]), int(columns[number]), weight=weight)
    # One extra vertex for each head that stays alone: a perfect matching then holds num_pairs pairs of heads.
    extra = range(heads, 2 * heads - 2 * num_pairs)
    graph.add_weighted_edges_from((head, vertex, 0) for head in range(heads) for vertex in extra)
    matching = networkx.max_weight_matching(graph, maxcardinality=True)
    pairs = [(min(pair), max(pair)) for pair in matching]
    return tuple(sorted((int(p), int(q)) for p, q in pairs if q < heads))


def settle_scores(scores: Array) -> list[int]:
    """Scores as whole multiples of 2^-40 of the largest magnitude, equal where only rounding may differ (PLAN-9)."""
    largest = float(np.abs(scores).max(initial=0.0)) or 1.0
    units = [0] * len(scores)
    run_start = np.inf
    for number in np.argsort(-scores, kind="stable"):
        if run_start - scores[number] > tie_width() * largest:
            run_start = float(scores[number])
        units[number] = round(run_start / largest * 2**40)  # far finer than a tie: no two runs round to one number
    return units


def score_pair(head_p: Head, head_q: Head, mask: Mask | None, by: str) -> float:
    """How well two heads merge, summed over samples; never above 0 (PLAN-12)."""
    (a_p, x_p), (a_q, x_q) = head_p, head_q
    if by == "similarity":
        distance = ((a_p - a_q) ** 2).sum(axis=-1)  # (B, L)
        return -float(distance.sum() if mask is None else distance[mask].sum())
    alpha = solve_pair(a_p, a_q, x_p, x_q, query_mask=mask, rule="least_squares").clipped
    return -float(merge_error(a_p, a_q, x_p, x_q, alpha, query_mask=mask).sum())


def read_calibration(
    calibration: Sequence[Sequence[ArrayLike | None]], row_sums: str
) -> tuple[list[list[Head]], list[Mask | None]]:
    """Every item as a pool of heads with its mask (PLAN-11)."""
    pools: list[list[Head]] = []
    masks: list[Mask | None] = []
    for number, item in enumerate(calibration):
        if not isinstance(item, list | tuple) or len(item) not in (2, 3) or item[0] is None or item[1] is None:
            rule = "calibration must hold items (teacher_probs, value_outputs), or with query_mask at the end"
            raise ShdError("argument-shape", f"{rule}; got {type(item).__name__} as item {number}", "PLAN-11")
        probs, outputs, mask = check_teacher(item[0], item[1], item[2] if len(item) == 3 else None, row_sums=row_sums)
        pools.append(make_pool(probs, outputs))
        masks.append(mask)
    if not pools:
        raise ShdError("argument-value", "calibration must hold at least one item; got none", "PLAN-11")
    counts = [len(pool) for pool in pools]
    if len(set(counts)) > 1:
        message = f"calibration must hold maps of one number of heads; got {counts}"
        raise ShdError("argument-shape", message, "PLAN-11")
    return pools, masks


def match_factored(
    calibration: Sequence[tuple[ArrayLike, NDArray[Any], ArrayLike | None]],
    projection: ArrayLike,
    num_student_heads: int,
    by: str = "residual",
    *,
    row_sums: str = "one",
) -> MergePlan:
    """``matched_plan`` from items (maps, V, mask) and W_o; products are kept in a basis of two heads' rows."""
    items = []
    for probs, values, mask in calibration:
        items.append((probs, np.repeat(values, np.shape(probs)[1] // values.shape[1], axis=1), mask))
    pools, masks = read_calibration(items, row_sums)  # heads of maps and values
    stacked = np.asarray(projection, dtype=np.float64)
    weights = list(stacked.reshape(len(pools[0]), -1, stacked.shape[-1]))  # (d_v, D) of each head
    return _match(pools, masks, weights, num_student_heads, by)


def _match(
    pools: list[list[Head]], masks: list[Mask | None], weights: list[Array] | None, num_student_heads: int, by: str
) -> MergePlan:
    """Merge round by round; with ``weights`` the pools hold values instead of value outputs."""
    check_option("by", by, MATCHED_BY, "PLAN-12")
    count = len(pools[0])
    check_counts(count, num_student_heads)
    rounds: list[tuple[Pair, ...]] = []
    while count > num_student_heads:
        scores = np.zeros((count, count))
        for p, q in itertools.combinations(range(count), 2):
            basis = None if weights is None else _common_basis(weights[p], weights[q])
            for pool, mask in zip(pools, masks, strict=True):
                scores[p, q] += score_pair(*_express(pool[p], pool[q], basis), mask, by)
        pairs = match_pairs(scores, min(count // 2, count - num_student_heads))
        alone = sorted(set(range(count)) - {head for pair in pairs for head in pair})
        bases = [None if weights is None else _common_basis(weights[p], weights[q]) for p, q in pairs]
        pools = [
            [_merge(pool[p], pool[q], basis, mask) for (p, q), basis in zip(pairs, bases, strict=True)]
            + [pool[head] for head in alone]
            for pool, mask in zip(pools, masks, strict=True)
        ]
        if weights is not None:
            weights = [np.concatenate([weights[p], weights[q]]) for p, q in pairs] + [weights[head] for head in alone]
        rounds.append(pairs)
        count = len(pools[0])
    return tuple(rounds)


def _common_basis(first: Array, second: Array) -> Array:
    """Weights of two heads, ``(m_1, D)`` above ``(m_2, D)``, in an orthonormal basis of their span.

    Value outputs keep their inner products, all that scores and alphas read, with m_1 + m_2 columns in place of D.
    """
    rows = np.concatenate([first, second])
    return rows if len(rows) >= rows.shape[1] else np.asarray(np.linalg.qr(rows.T, mode="r")).T


def _express(first: Head, second: Head, basis: Array | None) -> tuple[Head, Head]:
    """Maps with value outputs: as they are, or as values times their rows of the basis."""
    if basis is None:
        return first, second
    (a_p, v_p), (a_q, v_q) = first, second
    split = v_p.shape[-1]
    return (a_p, v_p @ basis[:split]), (a_q, v_q @ basis[split:])


def _merge(first: Head, second: Head, basis: Array | None, mask: Mask | None) -> Head:
    """The merged head; with a basis it keeps the values of both, side by side as their weights are stacked."""
    (head,), _ = merge_round(_express(first, second, basis), [(0, 1)], query_mask=mask)
    return head if basis is None else (head[0], np.concatenate([first[1], second[1]], axis=-1))
