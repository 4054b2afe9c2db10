"""The oracle, first half: maps, plans, alpha, mixing, layers. Every function says which sentences it reads.

Independent of every implementation: written from the sentences of ``specs/shd.md``, in plain loops over fractions.
Inputs are right; what must be refused is listed by hand in the cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from typing import Any

from exact import (
    HALF,
    INFINITY,
    MINUS_INFINITY,
    Nested,
    Number,
    add,
    broadcast,
    combine,
    decimal,
    dot,
    flatten,
    map_numbers,
    multiply,
    shape_of,
    solve_linear,
    square_root,
    stack_last,
    subtract,
)

STRATEGIES = ("shd", "constant", "hard", "mean")  # MIX-2
DEGENERATE = Fraction(1, 10**10)  # specs/tolerances.json, constants.degenerate

Plan = list[list[list[int]]]


# --- MAP and TEMP -------------------------------------------------------------------------------------------------


def softmax(attn_logits: Nested, attn_mask: Nested = None, *, temperature: Number = Fraction(1)) -> Nested:
    """MAP-1, MAP-2, MAP-10, TEMP-2."""
    shape = shape_of(attn_logits)
    if attn_mask is not None:
        attn_mask = broadcast(attn_mask, shape)
    if len(shape) > 1:
        masks = attn_mask if attn_mask is not None else [None] * shape[0]
        return [softmax(z, m, temperature=temperature) for z, m in zip(attn_logits, masks, strict=True)]
    return [e.exp() if e is not None else Decimal(0) for e in log_softmax_row(attn_logits, attn_mask, temperature)]


def log_softmax_row(logits: list[Number], mask: list[bool] | None, temperature: Number) -> list[Decimal | None]:
    """LOSS-12: ``z_j / T - log sum_k exp(z_k / T)``; None for a key that may not be attended (MAP-2)."""
    allowed = [z != MINUS_INFINITY and (mask is None or mask[j]) for j, z in enumerate(logits)]
    if not any(allowed):
        return [None] * len(logits)
    scaled = [decimal(z / temperature) if ok else None for z, ok in zip(logits, allowed, strict=True)]
    peak = max(z for z in scaled if z is not None)
    total = sum(((z - peak).exp() for z in scaled if z is not None), Decimal(0))
    shift = peak + total.ln()
    return [z - shift if z is not None else None for z in scaled]


def soften(attn_probs: Nested, temperature: Number, *, row_sums: str = "one") -> Nested:
    """TEMP-2, TEMP-5, TEMP-6, TEMP-7."""
    if temperature == 1:
        return attn_probs
    if len(shape_of(attn_probs)) > 1:
        return [soften(row, temperature, row_sums=row_sums) for row in attn_probs]
    peak = max(attn_probs)
    if peak == 0:
        return [Decimal(0)] * len(attn_probs)
    power = 1 / decimal(temperature)
    powers = [(decimal(a / peak).ln() * power).exp() if a != 0 else Decimal(0) for a in attn_probs]
    mass = decimal(sum(attn_probs)) if row_sums == "at_most_one" else Decimal(1)
    total = sum(powers, Decimal(0))
    return [mass * x / total for x in powers]


def value_outputs(values: Nested, output_projection: Nested) -> Nested:
    """MAP-6, MAP-11: ``X_i = V_(i // group) W_i``."""
    _, kv_heads, _, width = shape_of(values)
    heads = len(output_projection) // width
    group = heads // kv_heads
    slices = [output_projection[i * width : (i + 1) * width] for i in range(heads)]
    return [[multiply(sample[i // group], slices[i]) for i in range(heads)] for sample in values]


# --- PLAN and LAYER -----------------------------------------------------------------------------------------------


def merge_plan(num_teacher_heads: int, num_student_heads: int, kind: str | Plan = "progressive") -> Plan:
    """PLAN-1, PLAN-3, PLAN-5, PLAN-8."""
    if not isinstance(kind, str):
        return kind
    if kind == "balanced":
        return _balanced_plan(num_teacher_heads, num_student_heads)
    plan, pool = [], num_teacher_heads
    while pool > num_student_heads:
        pairs = min(pool // 2, pool - num_student_heads)
        plan.append([[2 * i, 2 * i + 1] for i in range(pairs)])
        pool -= pairs
    return plan


def _balanced_plan(num_teacher_heads: int, num_student_heads: int) -> Plan:
    size, larger = divmod(num_teacher_heads, num_student_heads)
    pool = []  # the group of every head of the pool
    for group in range(num_student_heads):
        pool += [group] * (size + 1 if group < larger else size)
    plan = []
    while len(pool) > num_student_heads:
        one_round = []
        for group in range(num_student_heads):
            parts = [position for position, owner in enumerate(pool) if owner == group]
            one_round += [[parts[i], parts[i + 1]] for i in range(0, len(parts) - 1, 2)]
        plan.append(one_round)
        pool = next_pool(pool, one_round, [pool[p] for p, _ in one_round])
    return plan


def next_pool(pool: Sequence[Any], one_round: Sequence[Sequence[int]], merged: Sequence[Any]) -> list[Any]:
    """PLAN-4: the merged heads in the round's order, then the heads that were not used, in theirs."""
    used = {position for pair in one_round for position in pair}
    return [*merged, *(head for position, head in enumerate(pool) if position not in used)]


def plan_groups(plan: Plan, num_teacher_heads: int) -> list[list[int]]:
    """PLAN-6."""
    pool = [[head] for head in range(num_teacher_heads)]
    for one_round in plan:
        pool = next_pool(pool, one_round, [pool[p] + pool[q] for p, q in one_round])
    return pool


def layer_map(
    num_teacher_layers: int, num_student_layers: int, pairs: list[list[int]] | None = None
) -> list[list[int]]:
    """LAYER-1, LAYER-5, LAYER-6."""
    if pairs is not None:
        return sorted(pairs)
    rounded = [
        (2 * s * num_teacher_layers + num_student_layers) // (2 * num_student_layers)
        for s in range(1, num_student_layers + 1)
    ]
    return [[s, t - 1] for s, t in enumerate(rounded)]


# --- ALPHA --------------------------------------------------------------------------------------------------------


@dataclass
class Sums:
    """What alpha is a quotient of, over some rows: ``<-N, M>``, ``||M||^2`` and the scale of ALPHA-6."""

    top: Number
    bottom: Number
    scale: Number

    @property
    def degenerate(self) -> bool:
        """ALPHA-6."""
        least = decimal(DEGENERATE) if isinstance(self.bottom, Decimal) else DEGENERATE
        return bool(self.bottom <= least * self.scale)

    @property
    def best(self) -> Number:
        """``a*`` before the clip; 1/2 where degenerate (ALPHA-2, ALPHA-6, ALPHA-10)."""
        if self.degenerate:
            return decimal(HALF) if isinstance(self.bottom, Decimal) else HALF
        return self.top / self.bottom

    @property
    def alpha(self) -> Number:
        """ALPHA-3."""
        return min(max(self.best, 0 * self.best), 0 * self.best + 1)

    @property
    def clipped(self) -> bool:
        """ALPHA-5."""
        return bool(self.best < 0 or self.best > 1)


def pair_sums(
    a_p: Nested, a_q: Nested, x_p: Nested, x_q: Nested, mask: list[bool] | None, *, rule: str, per: str
) -> list[Sums]:
    """One sample: the sums over its counted rows, or those of every row (ALPHA-4, ALPHA-7, ALPHA-9)."""
    x = add(x_p, x_q)
    m = multiply(subtract(a_p, a_q), x)
    if rule == "as_printed":
        n = subtract(multiply(a_q, x_p), multiply(a_p, x_q))
    else:
        n = multiply(subtract(a_q, a_p), x_p)
    p_x, q_x = multiply(a_p, x), multiply(a_q, x)
    rows = []
    for i in range(len(m)):
        if mask is not None and not mask[i]:
            nothing = 0 * m[i][0]
            rows.append(Sums(nothing, nothing, nothing))
        else:
            rows.append(Sums(-dot(n[i], m[i]), dot(m[i], m[i]), dot(p_x[i], p_x[i]) + dot(q_x[i], q_x[i])))
    if per == "row":
        return rows
    whole = Sums(0 * m[0][0], 0 * m[0][0], 0 * m[0][0])
    for r in rows:
        whole = Sums(whole.top + r.top, whole.bottom + r.bottom, whole.scale + r.scale)
    return [whole]


def solve_alpha(
    probs_p: Nested,
    probs_q: Nested,
    value_outputs_p: Nested,
    value_outputs_q: Nested,
    *,
    query_mask: Nested = None,
    rule: str = "least_squares",
    alpha_per: str = "map",
    row_sums: str = "one",
) -> Nested:
    """ALPHA-8, ALPHA-11; ``row_sums`` changes only what is refused (MAP-9, MIX-17)."""
    result = []
    for b in range(len(probs_p)):
        mask = query_mask[b] if query_mask is not None else None
        sums = pair_sums(
            probs_p[b], probs_q[b], value_outputs_p[b], value_outputs_q[b], mask, rule=rule, per=alpha_per
        )
        alphas = [s.alpha for s in sums]
        result.append(alphas if alpha_per == "row" else alphas[0])
    return result


# --- MIX ----------------------------------------------------------------------------------------------------------


@dataclass
class Squeezed:
    """The record of MIX-11, and every ``Sums`` that was solved, so that a case can say how close a call was."""

    probs: Nested
    mixing: Nested
    alphas: list[Nested]
    residual: list[Any]
    num_clipped: int
    num_degenerate: int
    plan: Plan
    solved: list[Sums]


def compose_mixing(alphas: list[Nested], plan: Plan, num_teacher_heads: int) -> Nested:
    """MIX-13: from the alphas of every round, ``(B, pairs)`` or ``(B, pairs, L)``."""
    batch = len(alphas[0])
    per_row = isinstance(alphas[0][0][0], list)
    result = []
    for b in range(batch):
        width = len(alphas[0][b][0]) if per_row else 1
        columns = []
        for i in range(width):
            pool = [[Fraction(int(t == head)) for t in range(num_teacher_heads)] for head in range(num_teacher_heads)]
            for one_round, solved in zip(plan, alphas, strict=True):
                merged = []
                for number, (p, q) in enumerate(one_round):
                    a = solved[b][number][i] if per_row else solved[b][number]
                    kind = decimal if isinstance(a, Decimal) else Fraction
                    merged.append(combine(a, map_numbers(kind, pool[p]), 1 - a, map_numbers(kind, pool[q])))
                pool = next_pool(pool, one_round, merged)
            columns.append(pool)
        result.append(stack_last(columns) if per_row else columns[0])
    return result


def mix_heads(teacher_probs: Nested, mixing: Nested) -> Nested:
    """MIX-3."""
    return [
        [_mix_rows(maps, row_of_c) for row_of_c in weights]
        for maps, weights in zip(teacher_probs, mixing, strict=True)
    ]


def _mix_rows(maps: Nested, row_of_c: Nested) -> Nested:
    result = []
    for i in range(len(maps[0])):
        weights = [c[i] if isinstance(c, list) else c for c in row_of_c]
        used = [t for t, c in enumerate(weights) if c != 0]
        result.append(
            [dot([weights[t] for t in used], [maps[t][i][j] for t in used]) for j in range(len(maps[0][i]))]
        )
    return result


def squeeze_heads(
    teacher_probs: Nested,
    value_outputs: Nested,
    num_student_heads: int,
    *,
    plan: Any = "progressive",
    strategy: str = "shd",
    query_mask: Nested = None,
    temperature: Number = Fraction(1),
    alpha_rule: str = "least_squares",
    alpha_per: str = "map",
    alpha_from: str = "teacher",
    row_sums: str = "one",
) -> Squeezed:
    """MIX-4 to MIX-17, TEMP-3."""
    batch, heads, rows, _ = shape_of(teacher_probs)
    rounds = merge_plan(heads, num_student_heads, plan)
    softened = soften(teacher_probs, temperature, row_sums=row_sums)
    solve_on = softened if alpha_from == "softened" else teacher_probs
    if _is_decimal(solve_on):
        solve_on, value_outputs = map_numbers(decimal, solve_on), map_numbers(decimal, value_outputs)
        teacher_probs = map_numbers(decimal, teacher_probs)
    groups = plan_groups(rounds, heads)
    alphas: list[Nested] = [[] for _ in rounds]
    solved: list[Sums] = []
    mixing: Nested = []
    clipped = degenerate = 0
    for b in range(batch):
        mask = query_mask[b] if query_mask is not None else None
        if strategy == "mean":
            c = [[_per(alpha_per, rows, Fraction(1, heads)) for _ in range(heads)] for _ in groups]
        else:
            by_round = _run_plan(
                rounds, solve_on[b], value_outputs[b], mask, strategy=strategy, rule=alpha_rule, per=alpha_per
            )
            for number, pairs in enumerate(by_round):
                alphas[number].append([[a for a, _ in p] if alpha_per == "row" else p[0][0] for p in pairs])
                for pair in pairs:
                    for i, (_, sums) in enumerate(pair):
                        counted = alpha_per != "row" or mask is None or mask[i]
                        solved += [sums] if counted else []
                        clipped += int(strategy == "shd" and sums.clipped and counted)
                        degenerate += int(strategy != "constant" and sums.degenerate and counted)
            c = [[_per(alpha_per, rows, Fraction(int(t == h))) for t in range(heads)] for h in range(heads)]
            if rounds:
                c = compose_mixing([[of_round[b]] for of_round in alphas], rounds, heads)[0]
        mixing.append(c)
    if strategy == "mean":
        alphas = []
    mixed = mix_heads(teacher_probs, map_numbers(decimal, mixing) if _is_decimal(teacher_probs) else mixing)
    probs = mixed if softened is teacher_probs else mix_heads(softened, map_numbers(decimal, mixing))
    residual = [
        residual_of(
            teacher_probs[b], value_outputs[b], mixed[b], groups, query_mask[b] if query_mask is not None else None
        )
        for b in range(batch)
    ]
    return Squeezed(probs, mixing, alphas, residual, clipped, degenerate, rounds, solved)


def _is_decimal(nested: Nested) -> bool:
    return any(isinstance(x, Decimal) for x in flatten(nested))


def _per(alpha_per: str, rows: int, value: Number) -> Nested:
    """One weight, or one for every row (MIX-12)."""
    return [value] * rows if alpha_per == "row" else value


def _run_plan(
    rounds: Plan, maps: Nested, outputs: Nested, mask: list[bool] | None, *, strategy: str, rule: str, per: str
) -> list[list[list[tuple[Number, Sums]]]]:
    """MIX-4, MIX-5 for one sample: for every round and pair the alphas (one, or one a row) with their sums."""
    pool = list(zip(maps, outputs, strict=True))
    result = []
    for one_round in rounds:
        merged, pairs = [], []
        for p, q in one_round:
            (a_p, x_p), (a_q, x_q) = pool[p], pool[q]
            pair = []
            for sums in pair_sums(a_p, a_q, x_p, x_q, mask, rule=rule, per=per):
                a = sums.alpha
                if strategy == "constant":
                    a = 0 * a + HALF if not isinstance(a, Decimal) else decimal(HALF)
                elif strategy == "hard":
                    a = 0 * a + (1 if 2 * sums.best >= 1 else 0)
                pair.append((a, sums))
            weights = [a for a, _ in pair] * (1 if per == "row" else len(a_p))
            mixed = [combine(a, a_p[i], 1 - a, a_q[i]) for i, a in enumerate(weights)]
            merged.append((mixed, add(x_p, x_q)))
            pairs.append(pair)
        pool = next_pool(pool, one_round, merged)
        result.append(pairs)
    return result


def nearest_in_hull(gram: list[list[Fraction]]) -> list[Fraction]:
    """The weights on the simplex that minimise ``c^T gram c``: the best of the stationary points of all faces."""
    size = len(gram)
    best: tuple[Fraction, list[Fraction]] | None = None
    for count in range(1, size + 1):
        for face in combinations(range(size), count):
            # On the face: gram c = t 1 and sum(c) = 1, with unknowns c and t.
            matrix = [[*(gram[i][j] for j in face), Fraction(-1)] for i in face]
            matrix.append([Fraction(1)] * count + [Fraction(0)])
            solution = solve_linear(matrix, [Fraction(0)] * count + [Fraction(1)])
            if solution is None or any(c < 0 for c in solution[:count]):
                continue
            weights = [Fraction(0)] * size
            for place, i in enumerate(face):
                weights[i] = solution[place]
            value = sum((weights[i] * dot(gram[i], weights) for i in face), Fraction(0))
            if best is None or value < best[0]:
                best = value, weights
    assert best is not None
    return best[1]


def residual_of(
    maps: Nested, outputs: Nested, mixed: Nested, groups: list[list[int]], mask: list[bool] | None
) -> Any:
    """MIX-8 for one sample; ``mixed`` are its maps ``A~_h``."""
    wanted = got = None
    for a, x in zip(maps, outputs, strict=True):
        term = multiply(a, x)
        wanted = term if wanted is None else add(wanted, term)
    for h, group in enumerate(groups):
        x = outputs[group[0]]
        for t in group[1:]:
            x = add(x, outputs[t])
        term = multiply(mixed[h], x)
        got = term if got is None else add(got, term)
    error, size = squared_norm(subtract(got, wanted), mask), squared_norm(wanted, mask)
    if size == 0:
        return Decimal(0) if error == 0 else INFINITY
    return square_root(error / size)


def squared_norm(matrix: Nested, mask: list[bool] | None = None) -> Number:
    """Over counted rows."""
    return sum((dot(row, row) for i, row in enumerate(matrix) if mask is None or mask[i]), 0 * matrix[0][0])
