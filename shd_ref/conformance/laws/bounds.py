"""What ``diagnose`` answers, found by other means: a point of the hull that its slopes prove, and the span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from shd_ref.conformance.chain import best_simplex
from shd_ref.conformance.compare import as_plain
from shd_ref.conformance.laws.law import Array, Trial, as_array, exactly
from shd_ref.tolerances import degenerate_threshold

_ALL = ("shd", "constant", "hard", "mean", "simplex")
_FACES = 7  # keys of which all faces are tried at once; of more, row by row


def check_diagnosis(trial: Trial, inputs: Mapping[str, Any], say: str) -> None:
    """One call of ``diagnose``, against optima found here and against the implementation's own ``squeeze_heads``."""
    got = trial.call("diagnose", **inputs)
    maps, outputs = (inputs[name].astype(np.float64) for name in ("teacher_probs", "value_outputs"))
    mask = inputs.get("query_mask")
    weight = np.ones(maps.shape[::2]) if mask is None else mask.astype(np.float64)
    options = {name: value for name, value in inputs.items() if name != "strategies"}
    names = inputs.get("strategies") or _ALL
    exactly(sorted(got["strategies"]), sorted(names), f"the strategies {say}")
    squeezed = {name: trial.call("squeeze_heads", **options, strategy=name) for name in names}
    plan = as_plain(next(iter(squeezed.values()))["plan"])
    exactly(got["plan"], plan, f"the plan {say}")
    groups = _groups(plan, maps.shape[1])
    merged = np.stack([outputs[:, group].sum(1) for group in groups], axis=1)  # (B, H_s, S, D)
    target = np.stack([(maps[:, group] @ outputs[:, group]).sum(1) for group in groups], axis=1)  # (B, H_s, L, D)
    size = (target**2 * weight[:, None, :, None]).sum((1, 2, 3))
    allowed = np.broadcast_to((maps > 0).any(1, keepdims=True), (len(maps), len(groups), *maps.shape[2:]))
    squares = {
        "unconstrained": _relative(_to_span(merged, target), weight, size),
        "stochastic": _relative(
            _to_hull(merged, target, allowed, sink=inputs.get("row_sums") == "at_most_one"), weight, size
        ),
    }
    for name, square in squares.items():
        trial.agree(got[name], np.sqrt(square), "residual", f"the {name} optimum {say}", times=2)
    for name in names:
        report = got["strategies"][name]
        field = report.get if isinstance(report, Mapping) else partial(getattr, report)
        probs = as_array(squeezed[name]["probs"], "probs")
        square = _relative(((probs @ merged - target) ** 2).sum(-1), weight, size)
        trial.agree(
            field("head_residual"), np.sqrt(square), "residual", f"the head residual of {name} {say}", times=2
        )
        wanted = as_array(squeezed[name]["residual"], "residual")
        trial.agree(field("residual"), wanted, "residual", f"the residual of {name} {say}")
        for bound, least in squares.items():
            what = f"the ratio over_{bound} of {name} {say}"
            trial.agree(field(f"over_{bound}"), _ratio(square, least), "residual", what, times=8)


def _groups(plan: Any, heads: int) -> list[list[int]]:
    pool = [[head] for head in range(heads)]
    for one_round in plan:
        used = {head for pair in one_round for head in pair}
        pool = [pool[p] + pool[q] for p, q in one_round] + [g for i, g in enumerate(pool) if i not in used]
    return pool


def _relative(errors: Array, weight: Array, size: Array) -> Array:
    """Squared errors ``(B, H_s, L)`` over counted rows, relative to the squared outputs of the heads (ORACLE-1)."""
    total = (errors * weight[:, None]).sum((1, 2))
    square: Array = np.where(size > 0, total / np.where(size > 0, size, 1.0), np.where(total > 0, np.inf, 0.0))
    return square


def _ratio(square: Array, least: Array) -> Array:
    """ORACLE-6."""
    over, under = (np.where(x <= degenerate_threshold(), 0.0, x) for x in (square, least))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(over / under)
    return np.where(over == under, 1.0, ratio)


def _to_span(points: Array, target: Array) -> Array:
    """Squared distance of every row from the span of its head's value outputs ``(B, H_s, S, D)``."""
    basis, values, _ = np.linalg.svd(np.swapaxes(points, -1, -2), full_matrices=False)  # (B, H_s, D, k)
    basis = basis * (values > 1e-9 * values[..., :1])[..., None, :]
    rest = target - (target @ basis) @ np.swapaxes(basis, -1, -2)
    distance: Array = (rest**2).sum(-1)
    return distance


def _to_hull(points: Array, target: Array, allowed: Any, *, sink: bool) -> Array:
    """Squared distance of every row from the hull of its allowed keys."""
    moved = points[:, :, None] - target[:, :, :, None]  # (B, H_s, L, S, D)
    if sink:
        moved = np.concatenate([moved, -target[:, :, :, None]], axis=3)
        allowed = np.concatenate(
            [allowed, np.ones((*allowed.shape[:-1], 1), dtype=bool) & allowed.any(-1)[..., None]], -1
        )
    gram = moved @ np.swapaxes(moved, -1, -2)
    keys = gram.shape[-1]
    best: Array = (target**2).sum(-1)  # where no key is allowed, the row stays zero
    if keys > _FACES:
        for row in np.argwhere(allowed.any(-1)):
            place = tuple(row)
            kept = np.flatnonzero(allowed[place])
            inner = gram[place][np.ix_(kept, kept)]
            weights = best_simplex(inner)
            best[place] = ((weights @ moved[place][kept]) ** 2).sum()
        return best
    best = np.where(allowed.any(-1), np.inf, best)
    for count in range(1, keys + 1):
        for face in combinations(range(keys), count):
            best = np.minimum(best, _on_face(gram, moved, allowed, face))
    return best


def _on_face(gram: Array, points: Array, allowed: Any, face: Sequence[int]) -> Array:
    """The squared distance of the minimum on a face where it lies inside of it; infinite elsewhere."""
    # On a face the minimum has equal slopes: gram c = t 1 with sum(c) = 1, so c goes with gram^-1 1.
    count = len(face)
    inner = gram[..., face, :][..., face]
    scale = np.maximum(np.trace(inner, axis1=-2, axis2=-1), 1e-300)[..., None, None]
    system = np.zeros((*inner.shape[:-2], count + 1, count + 1))
    system[..., :count, :count] = inner / scale
    system[..., :count, count], system[..., count, :count] = -1.0, 1.0
    right = np.zeros((*inner.shape[:-2], count + 1, 1))
    right[..., count, 0] = 1.0
    try:
        weights = np.linalg.solve(system, right)[..., :count, 0]
    except np.linalg.LinAlgError:
        return np.full(gram.shape[:-2], np.inf)  # dependent points: a smaller face has the minimum
    usable = (weights >= 0).all(-1) & allowed[..., face].all(-1)
    reached = ((weights[..., None] * points[..., face, :]).sum(-2) ** 2).sum(-1)
    return np.where(usable, reached, np.inf)
