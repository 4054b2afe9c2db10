"""The operations in small, with every choice open: right by default, and wrong in one way or another.

Independent of the reference's chapters and written for one purpose: to say what an implementation would answer that
had made a well-known mistake. It decides nothing; vectors and laws do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance import variant_indexers
from shd_ref.conformance.adapter import OUTPUTS
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
    indexer: str = ""  # of variant_indexers.MISTAKES


def compute(operation: str, inputs: Mapping[str, Any], choices: Choices | None = None) -> dict[str, Any]:
    """Outputs by name under these choices, right ones by default; LookupError for what this module does not know."""
    choices = choices or Choices()
    table: dict[str, Callable[..., Any]] = {**_OPERATIONS}
    table |= {name: partial(_of_indexers, name) for name in variant_indexers.operations("")}
    if operation not in table:
        raise LookupError(f"{operation} is not known here")
    arguments = {name: _as_float64(value) for name, value in inputs.items()}
    try:
        with np.errstate(all="ignore"):
            answer = table[operation](choices, **arguments)
    except TypeError as error:
        raise LookupError(f"{operation}: {error}") from error
    return dict(zip(OUTPUTS[operation], answer if isinstance(answer, tuple) else (answer,), strict=False))


# --- maps -------------------------------------------------------------------------------------------------------


def _softmax(choices: Choices, attn_logits: Array, attn_mask: Any = None, temperature: float = 1.0) -> Array:
    if attn_mask is not None and choices.mask_used:
        attn_logits = np.where(attn_mask != choices.mask_inverted, attn_logits, -np.inf)
    logits = attn_logits / _temperature(temperature, choices)
    peak = logits.max(axis=-1, keepdims=True)
    empty = np.isneginf(peak)
    exps = np.exp(logits - np.where(empty, 0.0, peak))
    fill = 1.0 / logits.shape[-1] if choices.masked_row < 0 else choices.masked_row
    probs: Array = np.where(empty, fill, exps / np.where(empty, 1.0, exps.sum(axis=-1, keepdims=True)))
    return probs


def _temperature(temperature: float, choices: Choices) -> float:
    return {"divides": temperature, "multiplies": 1.0 / temperature, "ignored": 1.0}[choices.temperature]


def soften_maps(maps: Array, temperature: float, row_sums: str) -> Array:
    """TEMP-2, -5, -6, -7 in the plainest words."""
    if temperature == 1.0:
        return maps
    peak = maps.max(-1, keepdims=True)
    powers = (maps / np.where(peak > 0, peak, 1.0)) ** (1.0 / temperature)
    total = powers.sum(-1, keepdims=True)
    mass = maps.sum(-1, keepdims=True) if row_sums == "at_most_one" else 1.0
    softened: Array = mass * powers / np.where(total > 0, total, 1.0)
    return softened


def _soften(choices: Choices, attn_probs: Array, temperature: float, row_sums: str = "one") -> Array:
    return soften_maps(attn_probs, _temperature(temperature, choices), row_sums if choices.mass_kept else "one")


def _value_outputs(choices: Choices, values: Array, output_projection: Array) -> Array:
    kv_heads, width = values.shape[1], values.shape[3]
    heads = output_projection.shape[0] // width
    read = [i % kv_heads if choices.value_heads == "cycled" else i // (heads // kv_heads) for i in range(heads)]
    outputs: Array = values[:, read] @ output_projection.reshape(heads, width, -1)
    return outputs


# --- plans ------------------------------------------------------------------------------------------------------


def _merge_plan(choices: Choices, num_teacher_heads: int, num_student_heads: int, kind: Any = "progressive") -> Any:
    heads, rounds = num_teacher_heads, []
    if not isinstance(kind, str):
        return [[list(pair) for pair in one_round] for one_round in as_plain(kind)]
    if kind == "balanced":
        return _balanced_rounds(heads, num_student_heads)
    if kind != "progressive":
        raise LookupError(f"plan kind {kind!r} is not known here")
    while heads > num_student_heads:
        pairs = heads // 2 if choices.plan == "overshoot" else min(heads // 2, heads - num_student_heads)
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
        members = [[position for position, of in enumerate(owner) if of == group] for group in range(students)]
        rounds.append([heads[i : i + 2] for heads in members for i in range(0, len(heads) - 1, 2)])
        owner = next_pool(owner, rounds[-1], [owner[p] for p, _ in rounds[-1]])
    return rounds


def next_pool(
    pool: Sequence[Any], one_round: Sequence[Sequence[int]], merged: Sequence[Any], order: str = "merged-first"
) -> list[Any]:
    """The pool after a round whose pairs became these heads (PLAN-4), or in a wrong order."""
    used = {position for pair in one_round for position in pair}
    untouched = [head for position, head in enumerate(pool) if position not in used]
    if order == "untouched-first":
        return [*untouched, *merged]
    if order == "in-place":
        firsts = {pair[0]: number for number, pair in enumerate(one_round)}
        seconds = {pair[1] for pair in one_round}
        return [merged[firsts[i]] if i in firsts else head for i, head in enumerate(pool) if i not in seconds]
    return [*merged, *untouched]


def _plan_groups(choices: Choices, plan: Any, num_teacher_heads: int) -> list[list[int]]:
    pool: list[list[int]] = [[head] for head in range(num_teacher_heads)]
    for one_round in as_plain(plan):
        pool = next_pool(pool, one_round, [pool[p] + pool[q] for p, q in one_round], choices.pool)
    return pool


# --- merging ----------------------------------------------------------------------------------------------------


def _alpha_weights(
    choices: Choices, p: Array, q: Array, x_p: Array, x_q: Array, mask: Array | None, per: str, rule: str
) -> Array:
    """``(B, 1)`` or ``(B, L)``."""
    u, w = (p - q) @ x_p, (p - q) @ x_q
    m = u + w
    # The mistake and the option of the same name swap roles: as_printed taken for least_squares and back.
    printed = (rule == "as_printed") != (choices.n == "printed")
    n = q @ x_p - p @ x_q if printed else -u
    if choices.n == "opposite":
        n = -n
    if choices.numerator == "w":
        n = -w
    counts = mask.astype(np.float64) if mask is not None and choices.rows_masked else np.ones(p.shape[:2])
    top, bottom = -(n * m).sum(-1) * counts, (m * m).sum(-1) * counts
    scale = (((p @ (x_p + x_q)) ** 2).sum(-1) + ((q @ (x_p + x_q)) ** 2).sum(-1)) * counts
    if (per == "map") != (choices.per == "other"):
        top, bottom, scale = (t.sum(-1, keepdims=True) for t in (top, bottom, scale))
    if choices.sample_shared:
        top, bottom, scale = (np.broadcast_to(t.sum(0), t.shape) for t in (top, bottom, scale))
    alpha: Array = top / bottom
    if choices.degenerate is not None:
        alpha = np.where(bottom <= degenerate_threshold() * scale, choices.degenerate, alpha)
    if choices.clip:
        alpha = np.clip(alpha, 0.0, 1.0)
    return 1 - alpha if choices.weighs == "q" else alpha


def _solve_alpha(
    choices: Choices,
    probs_p: Array,
    probs_q: Array,
    value_outputs_p: Array,
    value_outputs_q: Array,
    query_mask: Array | None = None,
    rule: str = "least_squares",
    alpha_per: str = "map",
    row_sums: str = "one",
) -> Array:
    heads = probs_p, probs_q, value_outputs_p, value_outputs_q
    alpha = _alpha_weights(choices, *heads, query_mask, alpha_per, rule)
    return alpha[:, 0] if alpha_per == "map" and alpha.shape[1] == 1 else alpha


def _compose_mixing(choices: Choices, alphas: Sequence[Array], plan: Any, num_teacher_heads: int) -> Array:
    batch, *rows = np.delete(alphas[0].shape, 1)
    pool = [np.broadcast_to(unit, (batch, *rows, num_teacher_heads)) for unit in np.eye(num_teacher_heads)]
    for one_round, weights in zip(plan, alphas, strict=True):
        pairs = [(weights[:, n, ..., None], pool[p], pool[q]) for n, (p, q) in enumerate(one_round)]
        pool = next_pool(pool, one_round, [a * p + (1 - a) * q for a, p, q in pairs])
    mixing = np.stack(pool, axis=1)  # (B, H_s, H_t) or (B, H_s, L, H_t)
    return np.swapaxes(mixing, 2, 3) if rows else mixing


def _mix_heads(choices: Choices, teacher_probs: Array, mixing: Array) -> Array:
    by_row = mixing if mixing.ndim == 4 else mixing[..., None]
    probs: Array = (by_row[..., None] * teacher_probs[:, None]).sum(2)
    return probs


def _squeeze_heads(
    choices: Choices,
    teacher_probs: Array,
    value_outputs: Array,
    num_student_heads: int,
    plan: Any = "progressive",
    strategy: str = "shd",
    query_mask: Array | None = None,
    temperature: float = 1.0,
    alpha_rule: str = "least_squares",
    alpha_per: str = "map",
    alpha_from: str = "teacher",
    row_sums: str = "one",
) -> tuple[Array, Array, list[Array]]:
    maps = teacher_probs
    batch, heads = maps.shape[:2]
    if strategy not in ("shd", "constant", "hard"):
        raise LookupError(f"strategy {strategy!r} is not known here")
    # Rows that do not count may sum to anything, and a temperature of 1 leaves them so.
    softened = soften_maps(maps, temperature, row_sums if choices.mass_kept else "one")
    on_softened = (alpha_from == "softened") != (choices.solved_on == "other")
    mixed = softened if choices.softened == "before" else maps
    # Of every head in the pool: the map that alpha is solved on, its value output, its row of C.
    pool: list[Any] = [
        (
            (softened if on_softened else maps)[:, t],
            value_outputs[:, t],
            np.broadcast_to(unit[None, :, None], (batch, heads, 1)),
        )
        for t, unit in enumerate(np.eye(heads))
    ]
    per_row = alpha_per == "row"
    alphas: list[Array] = []
    for one_round in _merge_plan(choices, heads, num_student_heads, plan):
        solved, merged = [], []
        for p, q in ((pool[i], pool[j]) for i, j in one_round):
            alpha = _alpha_weights(choices, p[0], q[0], p[1], q[1], query_mask, alpha_per, alpha_rule)
            if strategy == "constant":
                alpha = np.full_like(alpha, 0.5)
            elif strategy == "hard":
                fixed = {"always p": 1.0, "always q": 0.0}.get(choices.hard)
                alpha = np.where(alpha >= 0.5, 1.0, 0.0) if fixed is None else np.full_like(alpha, fixed)
            a, c = alpha[:, :, None], alpha[:, None, :]
            output = {
                "sum": p[1] + q[1],
                "mixed": a * p[1] + (1 - a) * q[1] if alpha.shape[1] == 1 else p[1] + q[1],
                "mean": (p[1] + q[1]) / 2,
                "first": p[1],
            }[choices.merged_outputs]
            merged.append((a * p[0] + (1 - a) * q[0], output, c * p[2] + (1 - c) * q[2]))
            solved.append(alpha if per_row else alpha[:, 0])
        pool = next_pool(pool, one_round, merged, choices.pool)
        alphas.append(np.stack(solved, axis=1))
    weights = maps.shape[2] if per_row else 1
    mixing = np.stack([np.broadcast_to(head[2], (batch, heads, weights)) for head in pool], axis=1)
    probs = _mix_heads(choices, mixed, mixing)
    if choices.softened == "after":
        probs = soften_maps(probs, temperature, "one")
    return probs, mixing if per_row else mixing[..., 0], alphas


def _gram_tensor(
    choices: Choices,
    teacher_probs: Array,
    values: Array,
    output_projection: Array,
    query_mask: Array | None = None,
    alpha_per: str = "map",
    row_sums: str = "one",
) -> Array:
    return gram_of(teacher_probs, _value_outputs(choices, values, output_projection), query_mask, alpha_per)


def gram_of(maps: Array, outputs: Array, mask: Array | None = None, per: str = "map") -> Array:
    """The inner products of all ``A_i X_j`` (GRAM-1), over counted rows or of each."""
    products = np.einsum("bils,bjsd->bijld", maps, outputs)
    counted = products if mask is None else products * mask[:, None, None, :, None]
    terms = "bijld,bmnld->bijmn" + ("l" if per == "row" else "")
    gram: Array = np.einsum(terms, counted, products, optimize=True)
    return gram


def _solve_alpha_from_gram(choices: Choices, gram: Array, p: int, q: int) -> Array:
    """GRAM-2, -3, -7."""
    wide = gram if gram.ndim == 6 else gram[..., None]

    def product_of(j: int, k: int) -> Array:
        return np.asarray(wide[:, p, j, p, k] - wide[:, p, j, q, k] - wide[:, q, j, p, k] + wide[:, q, j, q, k])

    top = product_of(p, p) + product_of(p, q)
    bottom = top + product_of(p, q) + product_of(q, q)
    scale = sum(wide[:, i, j, i, k] for i, j, k in product((p, q), repeat=3))
    flat = (bottom <= degenerate_threshold() * scale) | (bottom <= 0)
    alpha = np.where(flat, 0.5, np.clip(top / np.where(flat, 1.0, bottom), 0.0, 1.0))
    return alpha if gram.ndim == 6 else alpha[:, 0]


def _merge_gram(choices: Choices, gram: Array, p: int, q: int, alpha: Array) -> Array:
    """GRAM-4 as one linear map for maps and one for value outputs."""
    heads = gram.shape[1]
    rest = np.eye(heads)[[h for h in range(heads) if h not in (p, q)]]
    by_row = alpha if alpha.ndim == 2 else alpha[:, None]  # (B, L or 1)
    mix = np.zeros((*by_row.shape, heads - 1, heads))
    mix[..., 1:, :] = rest
    mix[..., 0, p], mix[..., 0, q] = by_row, 1 - by_row
    add = np.concatenate(([np.eye(heads)[p] + np.eye(heads)[q]], rest))
    wide = gram if gram.ndim == 6 else gram[..., None]
    merged: Array = np.einsum("blIi,Jj,blKk,Nn,bijknl->bIJKNl", mix, add, mix, add, wide, optimize=True)
    return merged if gram.ndim == 6 else merged[..., 0]


# --- the loss ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """One layer of the loss: distributions P and Q with log Q, the mass and weight of every row, the temperature."""

    P: Array
    Q: Array
    log_q: Array
    weight: Array  # (B, H, L): beta rho over n, and over the maps for the mean; 0 on rows that do not count
    temperature: float


def _loss_layers(
    choices: Choices,
    supervision: Any,
    student_logits: Any,
    beta: float = 1.0,
    loss_mask: Array | None = None,
    attn_mask: Array | None = None,
    temperature: float = 1.0,
    reduction: str = "sum",
    support: str = "error",
    row_sums: str = "one",
) -> list[_Layer]:
    """Every layer (LOSS-4, -5, -10, -14, -16, -18)."""
    logits = as_layers(student_logits)
    mean = (reduction == "mean") != (choices.reduction == "other")
    factor = (beta if choices.beta_used else 1.0) * temperature**choices.t_power
    factor /= sum(z.shape[1] for z in logits) if mean else 1
    layers = []
    for maps, z in zip(as_layers(supervision), logits, strict=True):
        may = _may_attend(z, attn_mask)
        teacher = _keep(maps, may)[0] if support == "intersect" else maps
        log_q = _log_softmax(z, may, temperature if choices.student_softened else 1.0)
        student = np.exp(log_q)
        if choices.log_constant:
            log_q = np.log(student + choices.log_constant)
        mass = teacher.sum(-1)
        counted = mass > 0
        if loss_mask is not None and choices.rows_masked:
            counted = counted & loss_mask[:, None, :]
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
        weight = np.where(counted, factor / np.maximum(size, 1.0), 0.0)
        if row_sums == "at_most_one":
            teacher = teacher / np.where(mass > 0, mass, 1.0)[..., None]
            weight = weight * mass if choices.mass_kept else weight
        layers.append(_Layer(teacher, student, log_q, weight, temperature))
    return layers


def as_layers(value: Any) -> list[Array]:
    """One array is one layer."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _may_attend(logits: Array, mask: Any) -> Any:
    return ~np.isneginf(logits) & (True if mask is None else mask)


def _log_softmax(logits: Array, may: Any, temperature: float) -> Array:
    allowed = np.where(may, logits, -np.inf)
    peak = allowed.max(-1, keepdims=True)
    lowered = (allowed - np.where(np.isneginf(peak), 0.0, peak)) / temperature
    total = np.exp(lowered).sum(-1, keepdims=True)
    return lowered - np.log(np.where(total > 0, total, 1.0))


def _shd_loss(choices: Choices, divergence: str = "kl", **inputs: Any) -> float:
    """LOSS-2, LOSS-11."""
    total = 0.0
    for layer in _loss_layers(choices, **inputs):
        P, Q, log_Q = layer.P, layer.Q, layer.log_q
        log_P, log_R = np.log(P), np.log((P + Q) / 2)
        terms = {
            "kl": _weighted(P, log_P - log_Q),
            "reverse_kl": _weighted(Q, log_Q - log_P),
            "js": (_weighted(P, log_P - log_R) + _weighted(Q, log_Q - log_R)) / 2,
            "mse": (P - Q) ** 2,
            "cross-entropy": -_weighted(P, log_Q),
            "base 2": _weighted(P, log_P - log_Q) / np.log(2.0),
        }[divergence if choices.divergence == "asked" else choices.divergence]
        # Rows that do not count may hold anything, infinities too.
        total += float(np.where(layer.weight > 0, terms.sum(-1) * layer.weight, 0.0).sum())
    return total


def _weighted(factor: Array, logarithms: Array) -> Array:
    """Their product, where a term whose factor is 0 is 0 (LOSS-12)."""
    product: Array = np.where(factor > 0, factor * logarithms, 0.0)
    return product


def _shd_loss_gradient(choices: Choices, divergence: str = "kl", **inputs: Any) -> Any:
    """GRAD-1."""
    gradients = []
    for layer in _loss_layers(choices, **inputs):
        P, Q = layer.P, layer.Q
        if divergence == "kl":
            slope = P.sum(-1, keepdims=True) * Q - P
        else:
            r, factor = {
                "reverse_kl": (layer.log_q - np.log(P), 1.0),
                "js": (layer.log_q - np.log((P + Q) / 2), 0.5),
                "mse": (Q - P, 2.0),
            }[divergence]
            held = np.where(Q > 0, Q * r, 0.0)
            slope = factor * (held - Q * held.sum(-1, keepdims=True))
        weight = layer.weight[..., None] * choices.sign
        gradient = np.where(weight != 0, slope * weight, 0.0)
        gradients.append(gradient / layer.temperature if choices.gradient_divided_by_t else gradient)
    return gradients if isinstance(inputs["supervision"], list) else gradients[0]


def _shd_loss_gradient_qk(choices: Choices, queries: Any, keys: Any, scale: float, **inputs: Any) -> tuple[Any, Any]:
    """GRAD-4, GRAD-5."""
    q, own = as_layers(queries), as_layers(keys)
    k = [np.repeat(key, query.shape[1] // key.shape[1], axis=1) for query, key in zip(q, own, strict=True)]
    logits = [scale * np.einsum("bhid,bhjd->bhij", *layer) for layer in zip(q, k, strict=True)]
    inputs["supervision"] = as_layers(inputs["supervision"])
    slopes = _shd_loss_gradient(choices, student_logits=logits, **inputs)
    dq = [scale * np.einsum("bhij,bhjd->bhid", *layer) for layer in zip(slopes, k, strict=True)]
    by_head = [scale * np.einsum("bhij,bhid->bhjd", *layer) for layer in zip(slopes, q, strict=True)]
    dk = [
        gradient.reshape(*key.shape[:2], -1, *key.shape[2:]).sum(2)
        for gradient, key in zip(by_head, own, strict=True)
    ]
    return (dq, dk) if isinstance(queries, list) else (dq[0], dk[0])


# --- support, tokens and layers ---------------------------------------------------------------------------------


def _keep(maps: Array, keys: Any) -> tuple[Array, Array]:
    """Mass on these keys, scaled back to what each row had, and the mass elsewhere."""
    kept = np.where(keys, maps, 0.0)
    dropped: Array = np.where(keys, 0.0, maps).sum(-1)
    left = kept.sum(-1)
    factor = np.where(dropped > 0, maps.sum(-1) / np.where(left > 0, left, 1.0), 1.0)
    return kept * factor[..., None], dropped


def _intersect_support(
    choices: Choices, supervision: Array, student_logits: Array, attn_mask: Array | None = None, **_: Any
) -> tuple[Array, Array]:
    """LOSS-15; neither a mask of rows nor what they sum to changes it."""
    return _keep(supervision, _may_attend(student_logits, attn_mask))


def _align_tokens(
    choices: Choices, attn_probs: Array, rows: Any = None, columns: Any = None, **_: Any
) -> tuple[Array, Array]:
    """TOKEN-2; neither a mask of rows nor what they sum to changes it."""
    maps = attn_probs if rows is None else attn_probs[:, :, list(rows)]
    columns = list(range(maps.shape[3])) if columns is None else list(columns)
    kept, dropped = _keep(maps, np.isin(np.arange(maps.shape[3]), columns))
    return kept[..., columns], dropped


def _layer_map(choices: Choices, num_teacher_layers: int, num_student_layers: int, pairs: Any = None) -> Any:
    teachers, students = num_teacher_layers, num_student_layers
    if pairs is not None:
        return sorted([list(pair) for pair in as_plain(pairs)])

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

    return [[s, teacher_of(s)] for s in range(students)]


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "softmax": _softmax,
    "soften": _soften,
    "value_outputs": _value_outputs,
    "merge_plan": _merge_plan,
    "plan_groups": _plan_groups,
    "solve_alpha": _solve_alpha,
    "compose_mixing": _compose_mixing,
    "mix_heads": _mix_heads,
    "squeeze_heads": _squeeze_heads,
    "gram_tensor": _gram_tensor,
    "solve_alpha_from_gram": _solve_alpha_from_gram,
    "merge_gram": _merge_gram,
    "shd_loss": _shd_loss,
    "shd_loss_gradient": _shd_loss_gradient,
    "shd_loss_gradient_qk": _shd_loss_gradient_qk,
    "intersect_support": _intersect_support,
    "align_tokens": _align_tokens,
    "layer_map": _layer_map,
}


def _of_indexers(operation: str, choices: Choices, **inputs: Any) -> Any:
    return variant_indexers.operations(choices.indexer)[operation](**inputs)


def _as_float64(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(item, np.ndarray) for item in value):
        return [_as_float64(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(np.float64)
    return value
