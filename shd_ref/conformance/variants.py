"""The operations in small, with every choice open: right by default, and wrong in one way or another.

Independent of the reference's chapters and written for one purpose: to say what an implementation would answer that
had made a well-known mistake. It decides nothing; vectors and laws do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.compare import as_plain
from shd_ref.tolerances import degenerate_threshold

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Choices:
    """What an implementation decides; the defaults are right."""

    masked_row: float = 0.0
    mask_inverted: bool = False
    mask_used: bool = True
    temperature: str = "divides"  # multiplies, ignored
    mass_kept: bool = True
    value_heads: str = "blocks"  # cycled
    plan: str = "exact"  # overshoot, last, halves
    pool: str = "merged-first"  # in-place, untouched-first
    n: str = "derived"  # printed, opposite
    clip: bool = True
    weighs: str = "p"  # q
    numerator: str = "u"  # w
    rows_masked: bool = True
    sample_shared: bool = False
    degenerate: float | None = 0.5  # None: the formula all the same
    per: str = "asked"  # other
    hard: str = "nearest"  # always p, always q
    merged_outputs: str = "sum"  # mixed, mean, first
    softened: str = "before"  # after, never
    solved_on: str = "asked"  # other
    divergence: str = "asked"  # cross-entropy, reverse_kl, base 2, mse
    denominator: str = "batch"  # sample, all rows, none, samples, keys
    t_power: int = 0
    student_softened: bool = True
    log_constant: float = 0.0
    reduction: str = "asked"  # other
    beta_used: bool = True
    sign: int = 1
    gradient_divided_by_t: bool = True
    rounding: str = "nearest"  # floor, ceiling, even, zero-based, same


def compute(operation: str, inputs: Mapping[str, Any], choices: Choices | None = None) -> dict[str, Any]:
    """The operation's outputs by name under these choices; right ones by default.

    Raises:
        LookupError: an operation or an argument that this module does not know.
    """
    if operation not in _OPERATIONS:
        raise LookupError(f"{operation} is not known here")
    function, known = _OPERATIONS[operation]
    unknown = set(inputs) - known
    if unknown:
        raise LookupError(f"{operation}: arguments {', '.join(sorted(unknown))} are not known here")
    arguments = {name: _as_float64(value) for name, value in inputs.items()}
    with np.errstate(all="ignore"):
        outputs: dict[str, Any] = function(arguments, choices or Choices())
    return outputs


def _softmax(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    logits = given["attn_logits"]
    mask = given.get("attn_mask")
    if mask is not None and choices.mask_used:
        logits = np.where(mask != choices.mask_inverted, logits, -np.inf)
    tempered = _tempered(logits, given.get("temperature", 1.0), choices)
    return {"attn_probs": _row_softmax(tempered, choices.masked_row)}


def _tempered(logits: Array, temperature: float, choices: Choices) -> Array:
    factor = {"divides": 1.0 / temperature, "multiplies": temperature, "ignored": 1.0}[choices.temperature]
    return logits * factor


def _row_softmax(logits: Array, masked_row: float = 0.0) -> Array:
    peak = logits.max(axis=-1, keepdims=True)
    empty = np.isneginf(peak)
    exps = np.exp(logits - np.where(empty, 0.0, peak))
    fill = 1.0 / logits.shape[-1] if masked_row < 0 else masked_row
    probs: Array = np.where(empty, fill, exps / np.where(empty, 1.0, exps.sum(axis=-1, keepdims=True)))
    return probs


def _soften(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    maps = given["attn_probs"]
    if given["temperature"] == 1:
        return {"attn_probs": maps}
    softened = _row_softmax(_tempered(np.log(maps), given["temperature"], choices))
    return {"attn_probs": softened * _row_mass(maps, given, choices)}


def _row_mass(maps: Array, given: Mapping[str, Any], choices: Choices) -> Array | float:
    """What a row is scaled to after its softmax: its own sum where sinks take the rest."""
    at_most_one = given.get("row_sums", "one") == "at_most_one"
    mass: Array | float = maps.sum(-1, keepdims=True) if at_most_one and choices.mass_kept else 1.0
    return mass


def _value_outputs(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    values, projection = given["values"], given["output_projection"]
    kv_heads, width = values.shape[1], values.shape[3]
    heads = projection.shape[0] // width
    read = [i % kv_heads if choices.value_heads == "cycled" else i // (heads // kv_heads) for i in range(heads)]
    return {"value_outputs": values[:, read] @ projection.reshape(heads, width, -1)}


def _merge_plan(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    return {"plan": _rounds(given["num_teacher_heads"], given["num_student_heads"], given.get("kind"), choices)}


def _rounds(heads: int, students: int, kind: Any, choices: Choices) -> list[list[list[int]]]:
    if kind is not None and not isinstance(kind, str):
        return [[list(pair) for pair in one_round] for one_round in as_plain(kind)]
    if kind == "balanced":
        return _balanced_rounds(heads, students)
    if kind not in (None, "progressive"):
        raise LookupError(f"plan kind {kind!r} is not known here")
    rounds = []
    while heads > students:
        pairs = heads // 2 if choices.plan == "overshoot" else min(heads // 2, heads - students)
        first = heads - 2 * pairs if choices.plan == "last" else 0
        step, stride = (1, pairs) if choices.plan == "halves" else (2, 1)
        rounds.append([[first + step * i, first + step * i + stride] for i in range(pairs)])
        heads -= pairs
    return rounds


def _balanced_rounds(heads: int, students: int) -> list[list[list[int]]]:
    small, larger = divmod(heads, students)
    owner = [group for group in range(students) for _ in range(small + (group < larger))]
    rounds = []
    while len(owner) > students:
        one_round = []
        for group in range(students):
            parts = [position for position, of in enumerate(owner) if of == group]
            one_round += [parts[i : i + 2] for i in range(0, len(parts) - 1, 2)]
        rounds.append(one_round)
        owner = _next_pool(owner, one_round, lambda p, _: p, Choices())
    return rounds


def _next_pool(pool: Sequence[Any], one_round: Sequence[Sequence[int]], merge: Any, choices: Choices) -> list[Any]:
    merged = [merge(pool[p], pool[q]) for p, q in one_round]
    used = {position for pair in one_round for position in pair}
    untouched = [head for position, head in enumerate(pool) if position not in used]
    if choices.pool == "untouched-first":
        return untouched + merged
    if choices.pool == "in-place":
        firsts = {pair[0]: number for number, pair in enumerate(one_round)}
        seconds = {pair[1] for pair in one_round}
        return [merged[firsts[i]] if i in firsts else head for i, head in enumerate(pool) if i not in seconds]
    return merged + untouched


def _plan_groups(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    pool: list[Any] = [[head] for head in range(given["num_teacher_heads"])]
    for one_round in as_plain(given["plan"]):
        pool = _next_pool(pool, one_round, lambda p, q: p + q, choices)
    return {"groups": pool}


def _alpha_weights(p: Array, q: Array, x_p: Array, x_q: Array, given: Mapping[str, Any], choices: Choices) -> Array:
    """``(B, 1)`` or ``(B, L)``."""
    rule = given.get("rule", given.get("alpha_rule", "least_squares"))
    per = given.get("alpha_per", "map")
    if choices.per == "other":
        per = "row" if per == "map" else "map"
    u, w = (p - q) @ x_p, (p - q) @ x_q
    m = u + w
    # The mistake and the option of the same name swap roles: as_printed taken for least_squares and back.
    printed = (rule == "as_printed") != (choices.n == "printed")
    n = q @ x_p - p @ x_q if printed else -u
    if choices.n == "opposite":
        n = -n
    if choices.numerator == "w":
        n = -w
    counts = np.ones(p.shape[:2])
    if given.get("query_mask") is not None and choices.rows_masked:
        counts = given["query_mask"].astype(np.float64)
    top, bottom = -(n * m).sum(-1) * counts, (m * m).sum(-1) * counts
    scale = (((p @ (x_p + x_q)) ** 2).sum(-1) + ((q @ (x_p + x_q)) ** 2).sum(-1)) * counts
    if per == "map":
        top, bottom, scale = (t.sum(-1, keepdims=True) for t in (top, bottom, scale))
    if choices.sample_shared:
        top, bottom, scale = (np.broadcast_to(t.sum(0), t.shape) for t in (top, bottom, scale))
    alpha: Array = top / bottom
    if choices.degenerate is not None:
        alpha = np.where(bottom <= degenerate_threshold() * scale, choices.degenerate, alpha)
    if choices.clip:
        alpha = np.clip(alpha, 0.0, 1.0)
    return 1 - alpha if choices.weighs == "q" else alpha


def _solve_alpha(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    p, q, x_p, x_q = (given[name] for name in ("probs_p", "probs_q", "value_outputs_p", "value_outputs_q"))
    alpha = _alpha_weights(p, q, x_p, x_q, given, choices)
    asked = given.get("alpha_per", "map")
    return {"alpha": alpha[:, 0] if asked == "map" and alpha.shape[1] == 1 else alpha}


def _squeeze_heads(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    maps, outputs = given["teacher_probs"], given["value_outputs"]
    batch, heads = maps.shape[:2]
    strategy = given.get("strategy", "shd")
    if strategy not in ("shd", "constant", "hard"):
        raise LookupError(f"strategy {strategy!r} is not known here")
    temperature = given.get("temperature", 1.0)
    # Rows that do not count may sum to anything, and a temperature of 1 leaves them so.
    softened = (
        maps if temperature == 1 else _row_softmax(np.log(maps) / temperature) * _row_mass(maps, given, choices)
    )
    on_softened = (given.get("alpha_from", "teacher") == "softened") != (choices.solved_on == "other")
    mixed = softened if choices.softened == "before" else maps
    # Of every head in the pool: the map that alpha is solved on, its value output, its row of C.
    unit = np.eye(heads)
    pool: list[Any] = [
        (
            (softened if on_softened else maps)[:, t],
            outputs[:, t],
            np.broadcast_to(unit[t][None, :, None], (batch, heads, 1)),
        )
        for t in range(heads)
    ]
    per_row = given.get("alpha_per", "map") == "row"
    alphas: list[Array] = []
    for one_round in _rounds(heads, given["num_student_heads"], given.get("plan"), choices):
        solved: list[Array] = []

        def merge(p: Any, q: Any, solved: list[Array] = solved) -> Any:
            alpha = _alpha_weights(p[0], q[0], p[1], q[1], given, choices)
            if strategy == "constant":
                alpha = np.full_like(alpha, 0.5)
            elif strategy == "hard":
                fixed = {"always p": 1.0, "always q": 0.0}.get(choices.hard)
                alpha = np.where(alpha >= 0.5, 1.0, 0.0) if fixed is None else np.full_like(alpha, fixed)
            solved.append(alpha)
            a = alpha[:, :, None]
            output = {
                "sum": p[1] + q[1],
                "mixed": a * p[1] + (1 - a) * q[1] if alpha.shape[1] == 1 else p[1] + q[1],
                "mean": (p[1] + q[1]) / 2,
                "first": p[1],
            }[choices.merged_outputs]
            c = alpha[:, None, :]
            return a * p[0] + (1 - a) * q[0], output, c * p[2] + (1 - c) * q[2]

        pool = _next_pool(pool, one_round, merge, choices)
        alphas.append(np.stack([a if per_row else a[:, 0] for a in solved], axis=1))
    weights = maps.shape[2] if per_row else 1
    mixing = np.stack([np.broadcast_to(head[2], (batch, heads, weights)) for head in pool], axis=1)
    probs = (mixing.transpose(0, 1, 3, 2)[..., None] * mixed.transpose(0, 2, 1, 3)[:, None]).sum(3)
    if choices.softened == "after":
        probs = _row_softmax(np.log(probs) / temperature)
    return {"probs": probs, "mixing": mixing if per_row else mixing[..., 0], "alphas": alphas}


@dataclass(frozen=True)
class _Layer:
    """One layer of the loss: distributions P and Q with log Q, the mass and weight of every row, the temperature."""

    P: Array
    Q: Array
    log_q: Array
    rho: Array  # (B, H, L)
    weight: Array  # (B, H, L): beta over n; 0 on rows that do not count
    temperature: float


def _loss_layers(given: Mapping[str, Any], choices: Choices) -> list[_Layer]:
    teachers, students = given["supervision"], given["student_logits"]
    if given.get("support", "error") != "error":
        raise LookupError("support='intersect' is not known here")
    pairs = list(zip(teachers, students, strict=True)) if isinstance(teachers, list) else [(teachers, students)]
    maps = sum(teacher.shape[1] for teacher, _ in pairs)
    mean = (given.get("reduction", "sum") == "mean") != (choices.reduction == "other")
    sinks = given.get("row_sums", "one") == "at_most_one"
    temperature = given.get("temperature", 1.0)
    layers = []
    for teacher, logits in pairs:
        if given.get("attn_mask") is not None:
            logits = np.where(given["attn_mask"], logits, -np.inf)
        logits = logits / (temperature if choices.student_softened else 1.0)
        student = _row_softmax(logits)
        peak = logits.max(-1, keepdims=True)
        log_student = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
        if choices.log_constant:
            log_student = np.log(student + choices.log_constant)
        mass = teacher.sum(-1)
        counted = mass > 0
        if given.get("loss_mask") is not None and choices.rows_masked:
            counted = counted & given["loss_mask"][:, None, :]
        batch, _, rows, keys = teacher.shape
        number = counted.sum((0, 2), keepdims=True).astype(np.float64)
        size = {
            "batch": number,
            "sample": counted.sum(2, keepdims=True) * float(batch),
            "all rows": np.full_like(number, batch * rows),
            "none": np.ones_like(number),
            "samples": np.full_like(number, batch),
            "keys": number * keys,
        }[choices.denominator]
        factor = (given.get("beta", 1.0) if choices.beta_used else 1.0) * temperature**choices.t_power
        weight = counted / np.maximum(size, 1.0) * factor / (maps if mean else 1)
        scaled = teacher / np.where(mass > 0, mass, 1.0)[..., None] if sinks else teacher
        rho = mass if sinks and choices.mass_kept else np.ones_like(mass)
        layers.append(_Layer(scaled, student, log_student, rho, weight, temperature))
    return layers


def _shd_loss(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    total = 0.0
    asked = given.get("divergence", "kl")
    for layer in _loss_layers(given, choices):
        P, Q, log_Q = layer.P, layer.Q, layer.log_q
        log_P, log_R = np.log(P), np.log((P + Q) / 2)
        terms = {
            "kl": _weighted(P, log_P - log_Q),
            "reverse_kl": _weighted(Q, log_Q - log_P),
            "js": (_weighted(P, log_P - log_R) + _weighted(Q, log_Q - log_R)) / 2,
            "mse": (P - Q) ** 2,
            "cross-entropy": -_weighted(P, log_Q),
            "base 2": _weighted(P, log_P - log_Q) / np.log(2.0),
        }[asked if choices.divergence == "asked" else choices.divergence]
        # Rows that do not count may hold anything, infinities too.
        total += float(np.where(layer.weight > 0, terms.sum(-1) * layer.rho * layer.weight, 0.0).sum())
    return {"loss": total}


def _weighted(factor: Array, logarithms: Array) -> Array:
    """Their product, where a term whose factor is 0 is 0 (LOSS-12)."""
    product: Array = np.where(factor > 0, factor * logarithms, 0.0)
    return product


def _shd_loss_gradient(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    gradients = []
    divergence = given.get("divergence", "kl")
    for layer in _loss_layers(given, choices):
        P, Q = layer.P, layer.Q
        if divergence == "kl":
            slope = P.sum(-1, keepdims=True) * Q - P
        else:
            r, factor = {
                "reverse_kl": (np.log(Q) - np.log(P), 1.0),
                "js": (np.log(Q) - np.log((P + Q) / 2), 0.5),
                "mse": (Q - P, 2.0),
            }[divergence]
            held = np.where(Q > 0, Q * r, 0.0)
            slope = factor * (held - Q * held.sum(-1, keepdims=True))
        weight = (layer.weight * layer.rho)[..., None] * choices.sign
        gradient = np.where(weight != 0, slope * weight, 0.0)
        gradients.append(gradient / layer.temperature if choices.gradient_divided_by_t else gradient)
    return {"dz": gradients if isinstance(given["supervision"], list) else gradients[0]}


def _layer_map(given: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    if given.get("pairs") is not None:
        return {"pairs": sorted([list(pair) for pair in as_plain(given["pairs"])])}
    teachers, students = given["num_teacher_layers"], given["num_student_layers"]

    def teacher_of(s: int) -> int:  # zero-based
        choice: dict[str, int] = {
            "nearest": (2 * (s + 1) * teachers + students) // (2 * students) - 1,
            "floor": (s + 1) * teachers // students - 1,
            "ceiling": -(-(s + 1) * teachers // students) - 1,
            "even": round((s + 1) * teachers / students) - 1,
            "zero-based": int(s * teachers / students + 0.5),
            "same": s,
        }
        return choice[choices.rounding]

    return {"pairs": [[s, teacher_of(s)] for s in range(students)]}


_LOSS_ARGUMENTS = {
    "supervision", "student_logits", "beta", "loss_mask", "attn_mask", "temperature", "reduction",
    "divergence", "support", "row_sums",
}  # fmt: skip
_SOLVE_ARGUMENTS = {
    "probs_p", "probs_q", "value_outputs_p", "value_outputs_q", "query_mask", "rule", "alpha_per", "row_sums",
}  # fmt: skip
_SQUEEZE_ARGUMENTS = {
    "teacher_probs", "value_outputs", "num_student_heads", "plan", "strategy", "query_mask", "temperature",
    "alpha_rule", "alpha_per", "alpha_from", "row_sums",
}  # fmt: skip
_OPERATIONS: dict[str, tuple[Any, set[str]]] = {
    "softmax": (_softmax, {"attn_logits", "attn_mask", "temperature"}),
    "soften": (_soften, {"attn_probs", "temperature", "row_sums"}),
    "value_outputs": (_value_outputs, {"values", "output_projection"}),
    "merge_plan": (_merge_plan, {"num_teacher_heads", "num_student_heads", "kind"}),
    "plan_groups": (_plan_groups, {"plan", "num_teacher_heads"}),
    "solve_alpha": (_solve_alpha, _SOLVE_ARGUMENTS),
    "squeeze_heads": (_squeeze_heads, _SQUEEZE_ARGUMENTS),
    "shd_loss": (_shd_loss, _LOSS_ARGUMENTS),
    "shd_loss_gradient": (_shd_loss_gradient, _LOSS_ARGUMENTS),
    "layer_map": (_layer_map, {"num_teacher_layers", "num_student_layers", "pairs"}),
}


def _as_float64(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(item, np.ndarray) for item in value):
        return [_as_float64(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(np.float64)
    return value
