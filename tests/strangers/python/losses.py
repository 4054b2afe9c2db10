"""Chapters LOSS and GRAD, and the layer map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from arrays import (
    Array,
    Row,
    dot,
    fail,
    flatten,
    indices,
    mask_logits,
    matmul,
    number,
    option,
    positive,
    probabilities,
    real,
    rescale,
    whole,
)


@dataclass
class Term:
    """One counted row: its teacher, its student, and where it stands."""

    index: tuple[int, int, int]
    rho: float
    P: Row
    Q: Row
    log_q: Row


@dataclass
class Loss:
    """Checked arguments: the counted rows of every layer, and the divergence."""

    shapes: list[tuple[int, ...]]
    terms: list[list[Term]]
    divergence: str
    temperature: float
    beta: float
    maps: int  # the divisor of `reduction`

    def rows_of_map(self, layer: int) -> dict[int, int]:
        """The number n of counted rows of each map (LOSS-4)."""
        n: dict[int, int] = {}
        for term in self.terms[layer]:
            n[term.index[1]] = n.get(term.index[1], 0) + 1
        return n


def as_layers(supervision: Any, others: list[Any], names: list[str]) -> tuple[list[Any], list[list[Any]], bool]:
    """One array or a list with one array a layer (LOSS-3)."""
    several = isinstance(supervision, list)
    for other, name in zip(others, names, strict=True):
        if isinstance(other, list) != several or (several and len(other) != len(supervision)):
            fail("argument-shape", f"supervision and {name} differ in their layers")
    if several and not supervision:
        fail("argument-shape", "no layer at all")
    if several:
        return supervision, others, True
    return [supervision], [[other] for other in others], False


def intersect_support(
    supervision: Any,
    student_logits: Any,
    *,
    loss_mask: Any = None,
    attn_mask: Any = None,
    row_sums: Any = "one",
) -> tuple[Array, Array]:
    """LOSS-15: `supervision` and `dropped`."""
    teacher, _ = probabilities(supervision, "supervision", 4, row_sums, loss_mask, "loss_mask")
    logits = real(student_logits, "student_logits", 4, minus_inf=True)
    if teacher.shape != logits.shape:
        fail("argument-shape", f"supervision {teacher.shape}, student_logits {logits.shape}")
    return intersect(teacher, mask_logits(logits, attn_mask))


def intersect(teacher: Array, logits: Array) -> tuple[Array, Array]:
    data: Row = []
    dropped: Row = []
    for index in teacher.positions():
        row = teacher.row(*index)
        kept = [p if z > -math.inf else 0.0 for p, z in zip(row, logits.row(*index), strict=True)]
        kept, lost = rescale(row, kept)
        data += kept
        dropped.append(lost)
    return Array(teacher.shape, data), Array(teacher.shape[:-1], dropped)


def prepare(
    supervision: list[Any],
    student_logits: list[Any],
    *,
    beta: Any = 1,
    loss_mask: Any = None,
    attn_mask: Any = None,
    temperature: Any = 1,
    reduction: Any = "sum",
    divergence: Any = "kl",
    support: Any = "error",
    row_sums: Any = "one",
) -> Loss:
    """All checks of chapter LOSS, and the rows that count."""
    beta, temperature = number(beta, "beta"), positive(temperature, "temperature")
    if beta < 0:
        fail("argument-value", f"beta is {beta}")
    option(reduction, ("sum", "mean"), "reduction")
    option(divergence, ("kl", "reverse_kl", "js", "mse"), "divergence")
    option(support, ("error", "intersect"), "support")
    option(row_sums, ("one", "at_most_one"), "row_sums")
    result = Loss([], [], divergence, temperature, beta, 1)
    heads = 0
    for layer, (teacher, logits) in enumerate(zip(supervision, student_logits, strict=True)):
        name = f"layer {layer}: supervision"
        teacher, counted = probabilities(teacher, name, 4, row_sums, loss_mask, "loss_mask")
        logits = real(logits, f"layer {layer}: student_logits", 4, minus_inf=True)
        if teacher.shape != logits.shape:
            fail("argument-shape", f"layer {layer}: {teacher.shape} against {logits.shape}")
        logits = mask_logits(logits, attn_mask)
        if support == "intersect":
            teacher, _ = intersect(teacher, logits)
        terms = []
        for b, h, i in teacher.positions():
            row, z = teacher.row(b, h, i), logits.row(b, h, i)
            if not counted[b][i] or not any(row):
                continue
            check_support(row, z, divergence, (layer, b, h, i))
            rho = math.fsum(row) if row_sums == "at_most_one" else 1.0
            top = max(z)
            shifted = [(entry - top) / temperature for entry in z]
            powers = [math.exp(entry) for entry in shifted]
            total = math.fsum(powers)
            log_total = math.log(total)
            terms.append(
                Term(
                    (b, h, i),
                    rho,
                    [p / rho for p in row] if row_sums == "at_most_one" else row,
                    [power / total for power in powers],
                    [entry - log_total for entry in shifted],
                )
            )
        result.shapes.append(teacher.shape)
        result.terms.append(terms)
        heads += teacher.shape[1]
    if reduction == "mean":
        result.maps = heads
    return result


def check_support(row: Row, z: Row, divergence: str, index: tuple[int, int, int, int]) -> None:
    """LOSS-6 and LOSS-13."""
    place = "layer {}, sample {}, head {}, row {}".format(*index)
    for j, (p, entry) in enumerate(zip(row, z, strict=True)):
        if p > 0 and entry == -math.inf:
            fail("support-mismatch", f"{place}, key {j}: teacher mass {p} on a key that the student may not attend")
        if divergence == "reverse_kl" and p == 0 and entry > -math.inf:
            fail("support-mismatch", f"{place}, key {j}: no teacher mass on a key that the student may attend")


def divergence_of(term: Term, name: str) -> float:
    """The table of LOSS-11; a term whose leading factor is 0 is 0 (LOSS-12)."""
    entries = zip(term.P, term.Q, term.log_q, strict=True)
    if name == "kl":
        return math.fsum(p * (math.log(p) - log_q) for p, _, log_q in entries if p > 0)
    if name == "reverse_kl":
        return math.fsum(q * (log_q - math.log(p)) for p, q, log_q in entries if q > 0)
    if name == "mse":
        return math.fsum((p - q) ** 2 for p, q, _ in entries)
    parts = []
    for p, q, log_q in entries:
        if p > 0:
            parts.append(p * (math.log(p) - log_middle(p, q)))
        if q > 0:
            parts.append(q * (log_q - log_middle(p, q)))
    return math.fsum(parts) / 2


def log_middle(p: float, q: float) -> float:
    """The logarithm of the mean of two probabilities."""
    return math.log(p + q) - math.log(2)


def shd_loss(supervision: Any, student_logits: Any, **options: Any) -> float:
    """LOSS-1 to LOSS-5, with the divergences of LOSS-11."""
    teachers, (logits,), _ = as_layers(supervision, [student_logits], ["student_logits"])
    loss = prepare(teachers, logits, **options)
    maps = []
    for layer, terms in enumerate(loss.terms):
        n = loss.rows_of_map(layer)
        maps += [term.rho * divergence_of(term, loss.divergence) / n[term.index[1]] for term in terms]
    return loss.beta * math.fsum(maps) / loss.maps


def gradient_row(term: Term, name: str) -> Row:
    """The table of GRAD-1 without the factor w."""
    P, Q = term.P, term.Q
    if name == "kl":
        s = math.fsum(P)
        return [term.rho * (s * q - p) for p, q in zip(P, Q, strict=True)]
    if name == "reverse_kl":
        r = [log_q - math.log(p) if q > 0 else 0.0 for p, q, log_q in zip(P, Q, term.log_q, strict=True)]
        factor = 1.0
    elif name == "js":
        r = [log_q - log_middle(p, q) if q > 0 else 0.0 for p, q, log_q in zip(P, Q, term.log_q, strict=True)]
        factor = 0.5
    else:
        r = [q - p for p, q in zip(P, Q, strict=True)]
        factor = 2.0
    mean = dot(Q, r)
    return [factor * term.rho * q * (entry - mean) if q > 0 else 0.0 for q, entry in zip(Q, r, strict=True)]


def gradients(loss: Loss) -> list[list[list[list[Row]]]]:
    """`dz` of every layer, as nested lists."""
    result = []
    for layer, shape in enumerate(loss.shapes):
        batch, heads, length, keys = shape
        dz = [[[[0.0] * keys for _ in range(length)] for _ in range(heads)] for _ in range(batch)]
        n = loss.rows_of_map(layer)
        for term in loss.terms[layer]:
            b, h, i = term.index
            w = loss.beta / (n[h] * loss.temperature * loss.maps)
            dz[b][h][i] = [w * entry for entry in gradient_row(term, loss.divergence)]
        result.append(dz)
    return result


def shd_loss_gradient(supervision: Any, student_logits: Any, **options: Any) -> Any:
    """GRAD-1 to GRAD-3, GRAD-9."""
    teachers, (logits,), several = as_layers(supervision, [student_logits], ["student_logits"])
    loss = prepare(teachers, logits, **options)
    layers = [
        Array(shape, flatten([dz[b][h][i] for b, h, i in indices(shape[:3])]))
        for shape, dz in zip(loss.shapes, gradients(loss), strict=True)
    ]
    return layers if several else layers[0]


def shd_loss_gradient_qk(supervision: Any, queries: Any, keys: Any, *, scale: Any, **options: Any) -> tuple[Any, Any]:
    """GRAD-4 to GRAD-6, GRAD-8: `dq` and `dk`."""
    teachers, (queries, keys), several = as_layers(supervision, [queries, keys], ["queries", "keys"])
    scale = number(scale, "scale")
    all_logits = []
    for layer, (q, k) in enumerate(zip(queries, keys, strict=True)):
        q = real(q, f"layer {layer}: queries", 4)
        k = real(k, f"layer {layer}: keys", 4)
        if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
            fail("argument-shape", f"layer {layer}: queries {q.shape} and keys {k.shape}")
        share = q.shape[1] // k.shape[1]
        data: Row = []
        for b, h in indices(q.shape[:2]):
            products = matmul(q.block(b, h), list(zip(*k.block(b, h // share), strict=True)))
            data += [scale * entry for row in products for entry in row]
        all_logits.append(Array((*q.shape[:3], k.shape[2]), data))
    loss = prepare(teachers, all_logits, **options)
    dqs, dks = [], []
    for q, k, dz in zip(queries, keys, gradients(loss), strict=True):
        share = q.shape[1] // k.shape[1]
        dq, dk = [], [0.0] * len(k.data)
        size = k.shape[2] * k.shape[3]
        for b, h in indices(q.shape[:2]):
            group = h // share
            dq += [scale * entry for row in matmul(dz[b][h], k.block(b, group)) for entry in row]
            part = flatten(matmul(list(zip(*dz[b][h], strict=True)), q.block(b, h)))
            start = (b * k.shape[1] + group) * size
            dk[start : start + size] = [
                old + scale * new for old, new in zip(dk[start : start + size], part, strict=True)
            ]
        dqs.append(Array(q.shape, dq))
        dks.append(Array(k.shape, dk))
    return (dqs, dks) if several else (dqs[0], dks[0])


def layer_map(num_teacher_layers: Any, num_student_layers: Any, pairs: Any = None) -> list[list[int]]:
    """LAYER-1 to LAYER-6."""
    for count in (num_teacher_layers, num_student_layers):
        if not whole(count) or count < 1:
            fail("layers-invalid", f"{count!r} layers")
    if pairs is None:
        if num_student_layers > num_teacher_layers:
            fail("layers-invalid", "more student layers than teacher layers")
        return [
            [s - 1, (2 * s * num_teacher_layers + num_student_layers) // (2 * num_student_layers) - 1]
            for s in range(1, num_student_layers + 1)
        ]
    if not isinstance(pairs, list | tuple) or not pairs:
        fail("layers-invalid", "no pair of layers")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(whole, pair)):
            fail("layers-invalid", f"{pair!r} is not a pair of layers")
        if not (0 <= pair[0] < num_student_layers and 0 <= pair[1] < num_teacher_layers):
            fail("layers-invalid", f"{pair!r} is out of range")
    if len({pair[0] for pair in pairs}) < len(pairs):
        fail("layers-invalid", "a student layer twice")
    return sorted(list(pair) for pair in pairs)
