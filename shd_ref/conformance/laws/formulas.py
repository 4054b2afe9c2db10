"""What the student's operations and ``diagnose`` must answer, found in plain formulas and by other means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from shd_ref.conformance.compare import as_plain
from shd_ref.conformance.laws.law import Array, Trial, as_array, exactly
from shd_ref.conformance.specification import agreement
from shd_ref.tolerances import degenerate_threshold


@dataclass(frozen=True)
class Rows:
    """One layer: its distributions P and Q, and what a row's divergence is multiplied by (0 where none counts)."""

    p: Array
    q: Array
    log_q: Array  # 0 where the student may not attend
    may: Array
    mass: Array  # rho (B, H, L)
    weight: Array  # beta over n, and over the maps for the mean (B, H, L)


def loss_of(inputs: Mapping[str, Any]) -> float:
    """The loss (LOSS-2, LOSS-11)."""
    return float(sum((rows.weight * rows.mass * _divergence(rows, inputs)).sum() for rows in layer_rows(inputs)))


def gradient_of(inputs: Mapping[str, Any]) -> list[Array]:
    """dz of every layer (GRAD-1)."""
    temperature = inputs.get("temperature", 1.0)
    return [_slope(rows, inputs) * (rows.weight * rows.mass / temperature)[..., None] for rows in layer_rows(inputs)]


def gradient_qk_of(inputs: Mapping[str, Any]) -> tuple[list[Array], list[Array]]:
    """dq and dk of every layer (GRAD-4, GRAD-5)."""
    scale = inputs["scale"]
    queries, keys = ([a.astype(np.float64) for a in as_list(inputs[name])] for name in ("queries", "keys"))
    read = [np.repeat(k, q.shape[1] // k.shape[1], axis=1) for q, k in zip(queries, keys, strict=True)]
    logits = [scale * np.einsum("bhid,bhjd->bhij", q, k) for q, k in zip(queries, read, strict=True)]
    options = {name: value for name, value in inputs.items() if name not in ("scale", "queries", "keys")}
    slopes = gradient_of({**options, "supervision": as_list(inputs["supervision"]), "student_logits": logits})
    dq = [scale * np.einsum("bhij,bhjd->bhid", dz, k) for dz, k in zip(slopes, read, strict=True)]
    head_gradients = [scale * np.einsum("bhij,bhid->bhjd", dz, q) for dz, q in zip(slopes, queries, strict=True)]
    dk = [
        gradient.reshape(*k.shape[:2], gradient.shape[1] // k.shape[1], *k.shape[2:]).sum(2)
        for gradient, k in zip(head_gradients, keys, strict=True)
    ]
    return dq, dk


def intersected(inputs: Mapping[str, Any]) -> tuple[Array, Array]:
    """The intersected maps and the mass that was dropped (LOSS-15)."""
    maps = inputs["supervision"].astype(np.float64)
    return _kept(maps, _may_attend(inputs["student_logits"], inputs.get("attn_mask")))


def aligned(inputs: Mapping[str, Any]) -> tuple[Array, Array]:
    """The aligned maps and the mass that was dropped (TOKEN-2)."""
    maps = inputs["attn_probs"].astype(np.float64)
    rows, columns = inputs.get("rows"), inputs.get("columns")
    maps = maps[:, :, list(range(maps.shape[2])) if rows is None else list(rows)]
    columns = list(range(maps.shape[3])) if columns is None else list(columns)
    kept, dropped = _kept(maps, np.isin(np.arange(maps.shape[3]), columns))
    return kept[..., columns], dropped


def layer_rows(inputs: Mapping[str, Any]) -> list[Rows]:
    """Every layer's rows (LOSS-4, -5, -10, -14, -16, -18)."""
    logits = as_list(inputs["student_logits"])
    maps = sum(z.shape[1] for z in logits) if inputs.get("reduction") == "mean" else 1
    rows = []
    for supervision, z in zip(as_list(inputs["supervision"]), logits, strict=True):
        may = _may_attend(z, inputs.get("attn_mask"))
        teacher = supervision.astype(np.float64)
        if inputs.get("support") == "intersect":
            teacher = _kept(teacher, may)[0]
        counted = teacher.sum(-1) > 0
        if inputs.get("loss_mask") is not None:
            counted &= inputs["loss_mask"][:, None, :]
        teacher = np.where(counted[..., None], teacher, 0.0)
        mass = teacher.sum(-1) if inputs.get("row_sums") == "at_most_one" else counted.astype(np.float64)
        number = np.maximum(counted.sum((0, 2)), 1)[None, :, None]
        log_q = _log_softmax(z.astype(np.float64), may, inputs.get("temperature", 1.0))
        rows.append(
            Rows(
                p=teacher / np.where(counted, mass, 1.0)[..., None],
                q=np.where(may, np.exp(log_q), 0.0),
                log_q=log_q,
                may=may,
                mass=mass,
                weight=np.where(counted, inputs.get("beta", 1.0) / (number * maps), 0.0),
            )
        )
    return rows


def as_list(value: Any) -> list[Array]:
    """One array is one layer."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _may_attend(logits: Array, mask: Array | None) -> Array:
    may: Array = ~np.isneginf(logits)
    return may if mask is None else may & mask


def _kept(maps: Array, keys: Array) -> tuple[Array, Array]:
    """Mass on these keys, scaled back to what each row had, and the mass elsewhere."""
    kept = np.where(keys, maps, 0.0)
    dropped: Array = np.where(keys, 0.0, maps).sum(-1)
    left = kept.sum(-1)
    factor = np.where(dropped > 0, maps.sum(-1) / np.where(left > 0, left, 1.0), 1.0)
    return kept * factor[..., None], dropped


def _log_softmax(logits: Array, may: Array, temperature: float) -> Array:
    allowed = np.where(may, logits, -np.inf)
    peak = allowed.max(-1, keepdims=True)
    lowered = (allowed - np.where(np.isneginf(peak), 0.0, peak)) / temperature
    total = np.exp(lowered).sum(-1, keepdims=True)
    return np.where(may, lowered - np.log(np.where(total > 0, total, 1.0)), 0.0)


def _log(probs: Array) -> Array:
    """The logarithm, and 0 where a factor of 0 stands before it (LOSS-12)."""
    logarithm: Array = np.log(np.where(probs > 0, probs, 1.0))
    return logarithm


def _divergence(rows: Rows, inputs: Mapping[str, Any]) -> Array:
    p, q, log_p, log_q = rows.p, rows.q, _log(rows.p), rows.log_q
    middle = _log((p + q) / 2)
    terms: Array = {
        "kl": p * (log_p - log_q),
        "reverse_kl": q * (log_q - log_p),
        "js": 0.5 * p * (log_p - middle) + 0.5 * q * (log_q - middle),
        "mse": (p - q) ** 2,
    }[inputs.get("divergence", "kl")]
    return np.asarray(terms.sum(-1))


def _slope(rows: Rows, inputs: Mapping[str, Any]) -> Array:
    p, q = rows.p, rows.q
    divergence = inputs.get("divergence", "kl")
    if divergence == "kl":
        return np.asarray(p.sum(-1, keepdims=True) * q - p)
    r = {"reverse_kl": rows.log_q - _log(p), "js": (rows.log_q - _log((p + q) / 2)) / 2, "mse": 2 * (q - p)}[
        divergence
    ]
    return np.asarray(q * (r - (q * r).sum(-1, keepdims=True)))


_ALL = ("shd", "constant", "hard", "mean")
_FACES = 6  # keys, and a sink, of which all faces are tried at once


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
    atol, _ = agreement(trial.subject.dtype, "residual")
    rounding = atol**2 * (outputs**2).sum((1, 2, 3))

    def relative(errors: Array, answer: Array) -> Array:
        """The squared head residual; the answer's own where 0 and infinite are both right (ORACLE-1)."""
        total = (errors * weight[:, None]).sum((1, 2))
        square = np.where(size > 0, total / np.where(size > 0, size, 1.0), np.where(total > 0, np.inf, 0.0))
        either = (size == 0) & (total <= rounding) & ((answer == 0) | np.isposinf(answer))
        return np.where(either, answer**2, square)

    allowed = np.broadcast_to((maps > 0).any(1, keepdims=True), (len(maps), len(groups), *maps.shape[2:]))
    errors = {
        "unconstrained": _to_span(merged, target),
        "stochastic": _to_hull(merged, target, allowed, sink=inputs.get("row_sums") == "at_most_one"),
    }
    squares = {name: relative(error, as_array(got[name], name)) for name, error in errors.items()}
    for name, square in squares.items():
        trial.agree(got[name], np.sqrt(square), "residual", f"the {name} optimum {say}", times=2)
    for name in names:
        report = got["strategies"][name]
        field = report.get if isinstance(report, Mapping) else partial(getattr, report)
        probs = as_array(squeezed[name]["probs"], "probs")
        head = as_array(field("head_residual"), "head_residual")
        square = relative(((probs @ merged - target) ** 2).sum(-1), head)
        trial.agree(head, np.sqrt(square), "residual", f"the head residual of {name} {say}", times=2)
        expected = as_array(squeezed[name]["residual"], "residual")
        trial.agree(field("residual"), expected, "residual", f"the residual of {name} {say}")
        for bound, least in squares.items():
            what = f"the ratio over_{bound} of {name} {say}"
            trial.agree(field(f"over_{bound}"), ratio_of(square, least), "residual", what, times=8)


def _groups(plan: Any, heads: int) -> list[list[int]]:
    pool = [[head] for head in range(heads)]
    for one_round in plan:
        used = {head for pair in one_round for head in pair}
        pool = [pool[p] + pool[q] for p, q in one_round] + [g for i, g in enumerate(pool) if i not in used]
    return pool


def ratio_of(square: Array, least: Array) -> Array:
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
    weights = _try_faces(gram, allowed) if gram.shape[-1] <= _FACES else np.zeros(allowed.shape)
    slopes = (gram @ weights[..., None])[..., 0]
    gap = (weights * slopes).sum(-1) - np.where(allowed, slopes, np.inf).min(-1)
    size = np.trace(gram, axis1=-2, axis2=-1)
    unproven = (gap > 1e-14 * size) | (weights.sum(-1) == 0)
    for row in np.argwhere(unproven & allowed.any(-1)):
        index = tuple(row)
        kept = np.flatnonzero(allowed[index])
        weights[index][kept] = _best_simplex(gram[index][np.ix_(kept, kept)])
    reached = ((weights[..., None] * moved).sum(-2) ** 2).sum(-1)
    best: Array = np.where(allowed.any(-1), reached, (target**2).sum(-1))  # a row without a key stays zero
    return best


def _try_faces(gram: Array, allowed: Array) -> Array:
    """For all rows at once the best of the minima of all faces that lie inside of them; what has none is zero."""
    keys = gram.shape[-1]
    best: Array = np.zeros(allowed.shape)
    least = np.full(allowed.shape[:-1], np.inf)
    for count in range(1, keys + 1):
        for face in combinations(range(keys), count):
            # On a face the minimum has equal slopes: gram c = t 1 with sum(c) = 1, so c goes with gram^-1 1.
            inner = gram[..., face, :][..., face]
            scale = np.maximum(np.trace(inner, axis1=-2, axis2=-1), 1e-300)[..., None, None]
            system = np.ones((*inner.shape[:-2], count + 1, count + 1))
            system[..., :count, :count] = inner / scale
            system[..., count, count] = 0.0
            right = np.zeros((*inner.shape[:-2], count + 1, 1))
            right[..., count, 0] = 1.0
            try:
                share = np.linalg.solve(system, right)[..., :count, 0]
            except np.linalg.LinAlgError:
                continue  # dependent points somewhere: smaller faces, or a proof by slopes, have the minimum
            share = share / share.sum(-1, keepdims=True)  # of points that nearly depend only the directions are right
            value = (share * (inner @ share[..., None])[..., 0]).sum(-1)
            better = (share >= 0).all(-1) & allowed[..., face].all(-1) & (value < least)
            spread = np.zeros(allowed.shape)
            spread[..., face] = share
            best, least = np.where(better[..., None], spread, best), np.where(better, value, least)
    return best


def _best_simplex(gram: Array) -> Array:
    """The weights of the smallest ``c^T gram c`` on the simplex, whose slopes prove that there are none smaller.

    Corners are taken in while one has a smaller slope than the weights have (Karush-Kuhn-Tucker), and left where the
    minimum of those in use has a weight below 0.

    Raises:
        ArithmeticError: rounding kept it from a proof.
    """
    weights: Array = np.zeros(len(gram))
    used = [int(np.diag(gram).argmin())]
    weights[used] = 1.0
    gap = np.inf
    for _ in range(8 * len(gram) + 8):
        slopes = gram @ weights
        corner = int(slopes.argmin())
        gap = float(weights @ slopes - slopes[corner]) / max(float(np.trace(gram)), 1e-300)
        if gap <= 1e-15 or (corner in used and gap <= 1e-12):
            break
        used = [*used, corner] if corner not in used else used
        while True:
            # On a face the minimum has equal slopes: inner c = t 1 with sum(c) = 1.
            system = np.ones((len(used) + 1, len(used) + 1))
            system[-1, -1] = 0.0
            size = max(float(np.diag(gram)[used].max()), 1e-300)
            system[:-1, :-1] = gram[np.ix_(used, used)] / size
            solution = np.linalg.lstsq(system, np.append(np.zeros(len(used)), 1.0), rcond=1e-15)[0][:-1]
            if solution.min() >= 0:
                break
            now = weights[used]
            falling = solution < 0
            steps = now[falling] / (now[falling] - solution[falling])
            solution = now + steps.min() * (solution - now)
            solution[np.flatnonzero(falling)[steps.argmin()]] = 0.0
            weights[:] = 0.0
            weights[used] = np.maximum(solution, 0.0)
            used = [i for i in used if weights[i] > 0]
        weights[:] = 0.0
        weights[used] = solution
    if gap > 1e-12:
        raise ArithmeticError("the judge found no proof that these weights are the best")
    best: Array = weights / weights.sum()
    return best
