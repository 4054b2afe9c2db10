"""Chapter PLAN and the composition of mixing matrices (MIX-3, MIX-13)."""

from __future__ import annotations

import math
from typing import Any

from arrays import ROW_SUM, Array, Row, fail, indices, option, probabilities, real, whole

Plan = list[list[tuple[int, int]]]


def check_count(value: Any, name: str) -> int:
    """PLAN-1."""
    if not whole(value) or value < 1:
        fail("argument-value", f"{name} is {value!r}")
    return value


def merge_plan(num_teacher_heads: Any, num_student_heads: Any, kind: Any = "progressive") -> Plan:
    """PLAN-1 to PLAN-5, PLAN-8."""
    check_count(num_teacher_heads, "num_teacher_heads")
    check_count(num_student_heads, "num_student_heads")
    if isinstance(kind, list | tuple):
        left = check_count(num_student_heads, "num_student_heads")
        heads = check_count(num_teacher_heads, "num_teacher_heads")
        if left > heads:
            fail("heads-exceed", f"{left} student heads for {heads} teacher heads")
        return check_plan(kind, heads, left)
    option(kind, ("progressive", "balanced"), "kind")
    if num_student_heads > num_teacher_heads:
        fail("heads-exceed", f"{num_student_heads} student heads, {num_teacher_heads} teacher heads")
    plan: Plan = []
    if kind == "progressive":
        heads = num_teacher_heads
        while heads > num_student_heads:
            m = min(heads // 2, heads - num_student_heads)
            plan.append([(2 * i, 2 * i + 1) for i in range(m)])
            heads -= m
        return plan
    size, larger = divmod(num_teacher_heads, num_student_heads)
    pool = [g for g in range(num_student_heads) for _ in range(size + (g < larger))]
    while len(pool) > num_student_heads:
        pairs = []
        for group in range(num_student_heads):
            parts = [at for at, owner in enumerate(pool) if owner == group]
            pairs += list(zip(parts[::2], parts[1::2], strict=False))
        plan.append(pairs)
        pool = next_pool(pool, pairs, [pool[p] for p, _ in pairs])
    return plan


def next_pool(pool: list[Any], pairs: list[tuple[int, int]], merged: list[Any]) -> list[Any]:
    """PLAN-4: the merged heads, then those that were not used."""
    used = {position for pair in pairs for position in pair}
    return merged + [head for at, head in enumerate(pool) if at not in used]


def check_plan(plan: Any, num_teacher_heads: int, num_student_heads: int | None = None) -> Plan:
    """PLAN-7."""
    if not isinstance(plan, list | tuple):
        fail("plan-invalid", "a plan is a list of rounds")
    heads = num_teacher_heads
    result: Plan = []
    for pairs in plan:
        if not isinstance(pairs, list | tuple) or not pairs:
            fail("plan-invalid", "a round is a list of at least one pair")
        used = set()
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                fail("plan-invalid", f"{pair!r} is not a pair")
            for position in pair:
                if not whole(position) or not 0 <= position < heads or position in used:
                    fail("plan-invalid", f"position {position!r} in a pool of {heads}")
                used.add(position)
        result.append([(p, q) for p, q in pairs])
        heads -= len(pairs)
    if num_student_heads is not None and heads != num_student_heads:
        fail("plan-invalid", f"the plan leaves {heads} heads, not {num_student_heads}")
    return result


def plan_groups(plan: Any, num_teacher_heads: Any) -> list[list[int]]:
    """PLAN-6."""
    pool = [[t] for t in range(check_count(num_teacher_heads, "num_teacher_heads"))]
    for pairs in check_plan(plan, num_teacher_heads):
        pool = next_pool(pool, pairs, [pool[p] + pool[q] for p, q in pairs])
    return pool


def compose_mixing(alphas: Any, plan: Any, num_teacher_heads: Any) -> Array:
    """MIX-13."""
    check_count(num_teacher_heads, "num_teacher_heads")
    plan = check_plan(plan, num_teacher_heads)
    if not isinstance(alphas, list) or len(alphas) != len(plan):
        fail("argument-shape", "alphas needs one array a round")
    alphas = [real(alpha, "alphas") for alpha in alphas]
    for alpha, pairs in zip(alphas, plan, strict=True):
        shape = alpha.shape
        first = alphas[0].shape
        if len(shape) not in (2, 3) or shape[1] != len(pairs) or shape[:1] + shape[2:] != first[:1] + first[2:]:
            fail("argument-shape", f"alphas of a round of {len(pairs)} pairs: {shape}")
        if not all(0 <= a <= 1 for a in alpha.data):
            fail("mixing-invalid", "an alpha outside [0, 1] makes a negative weight")
    if not alphas:
        fail("argument-shape", "the empty plan has no alphas to tell the batch")
    lead = alphas[0].shape
    return compose(alphas, plan, num_teacher_heads, lead[0], lead[2] if len(lead) == 3 else None)


def compose(alphas: list[Array], plan: Plan, heads: int, batch: int, length: int | None) -> Array:
    """C ``(B, H_s, H_t)``, with a last axis L where `length` is given (MIX-12)."""
    samples = []
    for b in range(batch):
        rows = []
        for i in range(length or 1):
            pool: list[Row] = [[float(t == h) for t in range(heads)] for h in range(heads)]
            for alpha, pairs in zip(alphas, plan, strict=True):
                merged = []
                for number, (p, q) in enumerate(pairs):
                    at = b * len(pairs) + number
                    a = alpha.data[at if length is None else at * length + i]
                    merged.append([a * x + (1 - a) * y for x, y in zip(pool[p], pool[q], strict=True)])
                pool = next_pool(pool, pairs, merged)
            rows.append(pool)
        samples.append(rows)
    left = len(samples[0][0])
    data = [
        samples[b][i][h][t]
        for b in range(batch)
        for h in range(left)
        for t in range(heads)
        for i in range(length or 1)
    ]
    return Array((batch, left, heads) + (() if length is None else (length,)), data)


def mix_heads(teacher_probs: Any, mixing: Any) -> Array:
    """MIX-3. The maps may have sinks: the operation has no `row_sums`, and mixes what `squeeze_heads` softens."""
    probs, _ = probabilities(teacher_probs, "teacher_probs", 4, "at_most_one")
    mixing = real(mixing, "mixing")
    batch, heads, length, _ = probs.shape
    axes = mixing.shape
    if len(axes) not in (3, 4) or axes[0] != batch or axes[2] != heads or axes[3:] not in ((), (length,)):
        fail("argument-shape", f"mixing {axes} for maps {probs.shape}")
    slack = ROW_SUM.get(mixing.dtype, ROW_SUM["float64"])
    if any(c < 0 for c in mixing.data):
        fail("mixing-invalid", "a negative weight")
    inner = axes[3] if len(axes) == 4 else 1
    for start in range(0, len(mixing.data), heads * inner):
        for i in range(inner):
            total = math.fsum(mixing.data[start + i : start + heads * inner : inner])
            if abs(total - 1) > slack:
                fail("mixing-invalid", f"weights that sum to {total}")
    return mix(probs, mixing)


def mix(probs: Array, mixing: Array) -> Array:
    batch, heads, length, keys = probs.shape
    students = mixing.shape[1]
    inner = length if len(mixing.shape) == 4 else 1
    data: Row = []
    for b, h in indices((batch, students)):
        start = (b * students + h) * heads * inner
        for i in range(length):
            row = [0.0] * keys
            for t in range(heads):
                c = mixing.data[start + t * inner + (i if inner == length else 0)]
                if c:
                    row = [x + c * y for x, y in zip(row, probs.row(b, t, i), strict=True)]
            data += row
    return Array((batch, students, length, keys), data)
