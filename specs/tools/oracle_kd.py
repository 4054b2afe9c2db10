"""The oracle of ``specs/kd.md``: targets, losses and gradients in decimals of 60 digits, from its sentences alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from exact import Nested, Number, decimal, dot, flatten, shape_of, unflatten
from oracle_heads import log_softmax_row

ZERO = Decimal(0)
NOTHING = float("-inf")  # the logarithm of no mass


def rows_of(nested: Nested) -> list[Any]:
    """The rows of an array: lists along its last axis."""
    if not isinstance(nested[0], list):
        return [nested]
    return [row for item in nested for row in rows_of(item)]


def leading(nested: Nested) -> list[int]:
    """The leading axes."""
    return shape_of(nested)[:-1]


def log_probs_of(row: Sequence[Number], temperature: Number) -> list[Decimal]:
    """``u / T - lse(u / T)``; without a mask no entry is None."""
    return [x for x in log_softmax_row(list(row), None, temperature) if x is not None]


def log_sum(logs: Sequence[Decimal]) -> Any:
    """``lse``; ``NOTHING`` over nothing."""
    total = sum((x.exp() for x in logs), ZERO)
    return total.ln() if logs else NOTHING


# --- targets ------------------------------------------------------------------------------------------------------


def mean_logits(
    logits: list[Nested],
    *,
    of: str = "logits",
    weights: Sequence[Any] | None = None,
    temperature: Number = Fraction(1),
) -> Nested:
    """KD-15."""
    shares = [decimal(w) for w in weights] if weights else [Decimal(1)] * len(logits)
    shares = [share / sum(shares) for share in shares]
    means = []
    for rows in zip(*map(rows_of, logits), strict=True):
        if of == "logits":
            means += [dot(shares, [decimal(u) for u in column]) for column in zip(*rows, strict=True)]
            continue
        probs = [[x.exp() for x in log_probs_of(row, temperature)] for row in rows]
        means += [decimal(temperature) * dot(shares, column).ln() for column in zip(*probs, strict=True)]
    return unflatten(means, shape_of(logits[0]))


def kd_targets_topk(
    teacher_logits: Nested, k: int, *, temperature: Number = Fraction(1), vocab_size: int | None = None
) -> dict[str, Any]:
    """KD-8, KD-9."""
    ids, logs, tails = [], [], []
    size = vocab_size or shape_of(teacher_logits)[-1]
    for row in rows_of(teacher_logits):
        log_p = log_probs_of(row[:size], temperature)
        chosen = largest(row[:size], k)
        assert k == size or min(row[j] for j in chosen) > max(row[j] for j in range(size) if j not in chosen), (
            "a tie at the edge: any choice is right"
        )
        ids += chosen
        logs += [log_p[j] for j in chosen]
        tails.append(log_sum([x for j, x in enumerate(log_p) if j not in chosen]))
    rows = leading(teacher_logits)
    return {
        "ids": unflatten(ids, [*rows, k]),
        "log_probs": unflatten(logs, [*rows, k]),
        "log_tail": unflatten(tails, rows),
        "temperature": temperature,
        "vocab_size": size,
    }


def kd_targets_sampled(
    teacher_logits: Nested,
    uniforms: Nested,
    *,
    keep: int = 0,
    power: Number = Fraction(1),
    temperature: Number = Fraction(1),
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """KD-12, KD-13."""
    ids, weights, entropies = [], [], []
    size = vocab_size or shape_of(teacher_logits)[-1]
    for row, points in zip(rows_of(teacher_logits), rows_of(uniforms), strict=True):
        log_p = log_probs_of(row[:size], temperature)
        kept = largest(row[:size], keep)
        ids += kept
        weights += [log_p[j].exp() for j in kept]
        others = [j for j in range(size) if j not in kept]
        shares = {j: (decimal(power) * log_p[j]).exp() for j in others}
        whole = sum(shares.values(), ZERO)
        for point in points:
            running = ZERO
            for j in others:
                running += shares[j] / whole
                assert abs(running - decimal(point)) > Decimal("1e-4"), "a draw at an edge: rounding decides"
                if running > decimal(point):
                    break
            ids.append(j)
            weights.append(log_p[j].exp() / (len(points) * shares[j] / whole))
        entropies.append(-sum((x.exp() * x for x in log_p), ZERO))
    slots, rows = [keep + shape_of(uniforms)[-1]], leading(teacher_logits)
    return {
        "ids": unflatten(ids, rows + slots),
        "weights": unflatten(weights, rows + slots),
        "entropy": unflatten(entropies, rows) if rows else entropies[0],
        "temperature": temperature,
        "vocab_size": size,
    }


def largest(row: Sequence[Number], k: int) -> list[int]:
    """The classes of the k largest logits, ascending."""
    return sorted(sorted(range(len(row)), key=lambda j: -row[j])[:k])


# --- losses -------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One row that counts: its number, its classes, and what multiplies its divergence."""

    number: int
    own: list[int]  # the classes of the vocabulary that are classes of the row
    others: list[int]  # those that make up the tail
    log_p: list[Any] | None  # over own, then the tail if there is one
    weights: list[tuple[int, Decimal]]  # of sampled targets
    entropy: Decimal
    log_q: list[Decimal]  # over the vocabulary
    factor: Decimal

    @property
    def class_log_q(self) -> list[Decimal]:
        """KD-16."""
        own = [self.log_q[j] for j in self.own]
        return own + ([log_sum([self.log_q[j] for j in self.others])] if self.others else [])


def counted_rows(
    targets: Any,
    student_logits: Nested,
    *,
    temperature: Number | None = None,
    t_squared: bool = True,
    loss_mask: Nested = None,
    reduction: str = "mean",
    vocab_size: int | None = None,
    **_: Any,
) -> Iterator[Row]:
    """Every row that counts (KD-2, KD-3, KD-5, KD-6, KD-7)."""
    record = targets if isinstance(targets, dict) else None
    if temperature is None:
        temperature = Fraction(record["temperature"]) if record else Fraction(1)
    size = vocab_size or shape_of(student_logits)[-1]
    students = [row[:size] for row in rows_of(student_logits)]
    counts = list(flatten(loss_mask)) if loss_mask is not None else [True] * len(students)
    divisor = {"mean": sum(counts), "sum": 1, "batch_mean": len(student_logits)}[reduction]
    for number, z in enumerate(students):
        if not counts[number]:
            continue
        own, others, weights, entropy = list(range(size)), [], [], ZERO
        log_p: list[Any] | None = None
        if record is None:
            log_p = log_probs_of(rows_of(targets)[number][:size], temperature)
        else:
            ids = [int(j) for j in rows_of(record["ids"])[number]]
            if "weights" in record:
                weights = list(zip(ids, map(decimal, rows_of(record["weights"])[number]), strict=True))
                entropy = decimal(list(flatten(record["entropy"]))[number])
            else:
                own, others = ids, [j for j in range(size) if j not in ids]
                tail = list(flatten(record["log_tail"]))[number]
                log_p = [decimal(x) for x in rows_of(record["log_probs"])[number]]
                log_p += [tail if tail == NOTHING else decimal(tail)] if others else []
        factor = (decimal(temperature) ** 2 if t_squared else Decimal(1)) / divisor
        yield Row(number, own, others, log_p, weights, entropy, log_probs_of(z, temperature), factor)


def name_of(divergence: str, mixing: Number) -> str:
    """KD-18."""
    return {0: "kl", 1: "reverse_kl"}.get(mixing, divergence) if divergence == "jsd" else divergence


def times_log(factor: Decimal, log: Any) -> Any:
    """A term whose leading factor is 0 is 0 (KD-17)."""
    if factor == 0:
        return ZERO
    assert log != NOTHING, "the divergence is infinite: support-mismatch"
    return factor * log


def divergence_of(row: Row, divergence: str, mixing: Number) -> Decimal:
    """KD-17, KD-19."""
    name, m = name_of(divergence, mixing), decimal(mixing)
    if row.log_p is None:
        cross = -sum((w * row.log_q[j] for j, w in row.weights), ZERO)
        return cross - row.entropy if name == "kl" else cross
    total = ZERO
    for log_p, log_q in zip(row.log_p, row.class_log_q, strict=True):
        p, q = ZERO if log_p == NOTHING else log_p.exp(), log_q.exp()
        if name == "cross_entropy":
            total -= times_log(p, log_q)
        elif name == "kl":
            total += times_log(p, log_p) - times_log(p, log_q)
        elif name == "reverse_kl":
            total += times_log(q, log_q) - times_log(q, log_p)
        else:
            log_r = (m * p + (1 - m) * q).ln()
            total += m * (times_log(p, log_p) - times_log(p, log_r))
            total += (1 - m) * (times_log(q, log_q) - times_log(q, log_r))
    return total


def kd_loss(
    targets: Any, student_logits: Nested, *, divergence: str = "kl", mixing: Number = Fraction(1, 2), **options: Any
) -> Any:
    """KD-3; an exact 0 where no row counts (KD-4)."""
    rows = list(counted_rows(targets, student_logits, **options))
    total = sum((row.factor * divergence_of(row, divergence, mixing) for row in rows), ZERO)
    return total if rows else Fraction(0)


def kd_loss_gradient(
    targets: Any, student_logits: Nested, *, divergence: str = "kl", mixing: Number = Fraction(1, 2), **options: Any
) -> Nested:
    """KD-22, KD-23; what the text calls exactly 0 stays a fraction."""
    gradient: list[list[Any]] = [[Fraction(0)] * len(row) for row in rows_of(student_logits)]
    temperature = options.get("temperature") or (
        Fraction(targets["temperature"]) if isinstance(targets, dict) else Fraction(1)
    )
    for row in counted_rows(targets, student_logits, **options):
        w = row.factor / decimal(temperature)
        gradient[row.number][: len(row.log_q)] = [w * g for g in _row_slope(row, divergence, mixing)]
    return unflatten(list(flatten(gradient)), shape_of(student_logits))


def _row_slope(row: Row, divergence: str, mixing: Number) -> list[Decimal]:
    whole = [x.exp() for x in row.log_q]
    if row.log_p is None:
        mass = sum((w for _, w in row.weights), ZERO)
        return [mass * q - sum((w for i, w in row.weights if i == j), ZERO) for j, q in enumerate(whole)]
    name, m = name_of(divergence, mixing), decimal(mixing)
    P = [ZERO if x == NOTHING else x.exp() for x in row.log_p]
    Q = [x.exp() for x in row.class_log_q]
    if name in ("kl", "cross_entropy"):
        g = [sum(P, ZERO) * q - p for p, q in zip(P, Q, strict=True)]
    else:
        if name == "reverse_kl":
            r = [log_q - log_p for log_p, log_q in zip(row.log_p, row.class_log_q, strict=True)]
        else:
            mixed = [(m * p + (1 - m) * q).ln() for p, q in zip(P, Q, strict=True)]
            r = [(1 - m) * (log_q - log_r) for log_q, log_r in zip(row.class_log_q, mixed, strict=True)]
        mean = dot(Q, r)
        g = [q * (x - mean) for q, x in zip(Q, r, strict=True)]
    slope = dict(zip(row.own, g, strict=False))
    for j in row.others:
        slope[j] = g[-1] * whole[j] / Q[-1]
    return [slope[j] for j in range(len(whole))]


def head_logits(hidden: Nested, weight: Nested, bias: Nested | None) -> Nested:
    """``hidden W^T + bias`` (KD-25)."""
    made = [
        [dot(row, w) + (bias[j] if bias is not None else 0) for j, w in enumerate(weight)] for row in rows_of(hidden)
    ]
    return unflatten(list(flatten(made)), [*leading(hidden), len(weight)])


def linear_kd_loss(targets: Any, hidden: Nested, weight: Nested, bias: Nested | None = None, **options: Any) -> Any:
    """KD-25."""
    return kd_loss(targets, head_logits(hidden, weight, bias), **options)


def linear_kd_loss_gradient(
    targets: Any, hidden: Nested, weight: Nested, bias: Nested | None = None, **options: Any
) -> dict[str, Any]:
    """KD-25."""
    dz = rows_of(kd_loss_gradient(targets, head_logits(hidden, weight, bias), **options))
    h = [[decimal(x) for x in row] for row in rows_of(hidden)]
    w = [[decimal(x) for x in row] for row in weight]
    dz = [[decimal(x) for x in row] for row in dz]
    dhidden = [[dot(g, list(column)) for column in zip(*w, strict=True)] for g in dz]
    dweight = [[dot([g[j] for g in dz], [row[d] for row in h]) for d in range(len(h[0]))] for j in range(len(w))]
    dbias = [sum((g[j] for g in dz), ZERO) for j in range(len(w))]
    return {"dhidden": unflatten(list(flatten(dhidden)), shape_of(hidden)), "dweight": dweight, "dbias": dbias}


# --- hidden states ------------------------------------------------------------------------------------------------


def hidden_loss(student_hidden: Any, teacher_hidden: Any, **options: Any) -> Any:
    """HID-2 to HID-5."""
    terms = [
        weight * _distance(s, t, options.get("distance", "mse"))
        for _, _, s, t, weight in _hidden_rows(student_hidden, teacher_hidden, **options)
    ]
    return sum(terms, ZERO) if terms else Fraction(0)


def hidden_loss_gradient(student_hidden: Any, teacher_hidden: Any, **options: Any) -> list[Nested]:
    """HID-6: one array a layer."""
    layers = student_hidden if isinstance(student_hidden, list) and _is_layers(student_hidden) else [student_hidden]
    gradients: list[list[list[Any]]] = [[[Fraction(0)] * len(row) for row in rows_of(layer)] for layer in layers]
    for number, place, s, t, weight in _hidden_rows(student_hidden, teacher_hidden, **options):
        slope = _hidden_slope(s, t, options.get("distance", "mse"))
        gradients[number][place] = [weight * x if isinstance(x, Decimal) else x for x in slope]
    return [unflatten(list(flatten(g)), shape_of(layer)) for g, layer in zip(gradients, layers, strict=True)]


class Layers(list[Any]):
    """Arrays, one a layer; a plain list is one array."""


def _is_layers(value: Any) -> bool:
    return isinstance(value, Layers)


def _hidden_rows(
    student: Any, teacher: Any, *, loss_mask: Nested = None, reduction: str = "sum", **_: Any
) -> Iterator[tuple[int, int, list[Decimal], list[Decimal], Decimal]]:
    pairs = list(zip(student, teacher, strict=True)) if _is_layers(student) else [(student, teacher)]
    for number, (left, right) in enumerate(pairs):
        rows = list(zip(rows_of(left), rows_of(right), strict=True))
        counts = list(flatten(loss_mask)) if loss_mask is not None else [True] * len(rows)
        for place, (s, t) in enumerate(rows):
            if counts[place]:
                weight = Decimal(1) / sum(counts) / (len(pairs) if reduction == "mean" else 1)
                yield number, place, [decimal(x) for x in s], [decimal(x) for x in t], weight


def _unit(vector: list[Decimal]) -> list[Decimal]:
    norm = dot(vector, vector).sqrt()
    return [x / norm for x in vector] if norm else vector


def _distance(s: list[Decimal], t: list[Decimal], distance: str) -> Decimal:
    if distance == "mse":
        return sum(((x - y) ** 2 for x, y in zip(s, t, strict=True)), ZERO) / len(s)
    left, right = _unit(s), _unit(t)
    if distance == "cosine":
        return Decimal(1) - decimal(dot(left, right))
    return sum(((x - y) ** 2 for x, y in zip(left, right, strict=True)), ZERO)


def _hidden_slope(s: list[Decimal], t: list[Decimal], distance: str) -> list[Any]:
    if distance == "mse":
        return [2 * (x - y) / len(s) for x, y in zip(s, t, strict=True)]
    norm = dot(s, s).sqrt()
    if not norm:
        return [Fraction(0)] * len(s)
    left, right = _unit(s), _unit(t)
    cosine, factor = dot(left, right), 2 if distance == "normalized_mse" else 1
    return [factor * (cosine * x - y) / norm for x, y in zip(left, right, strict=True)]
