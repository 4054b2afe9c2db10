"""The oracle, second half: losses, gradients, support, tokens, gram tensors, matched plans and bounds.

Written from the sentences of ``specs/shd.md`` alone, like the first half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from itertools import combinations, product
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
    map_numbers,
    multiply,
    shape_of,
    solve_linear,
    square_root,
    stack_last,
    subtract,
    zeros,
)
from oracle_heads import (
    DEGENERATE,
    STRATEGIES,
    Plan,
    Sums,
    log_softmax_row,
    merge_plan,
    nearest_in_hull,
    next_pool,
    pair_sums,
    plan_groups,
    squared_norm,
    squeeze_heads,
    value_outputs,
)

LN_ZERO = None  # the logarithm of a probability that is 0

# --- LOSS and GRAD ------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One row that counts: its place, its distributions, its mass and its weight ``beta / n`` (over maps)."""

    layer: int
    place: tuple[int, int, int]  # sample, head, row
    P: list[Decimal]
    log_q: list[Decimal | None]
    rho: Decimal
    weight: Decimal

    @property
    def Q(self) -> list[Decimal]:  # noqa: N802  (the name in chapter LOSS)
        """The student's row."""
        return [q.exp() if q is not None else Decimal(0) for q in self.log_q]


def counted_rows(
    supervision: Nested,
    student_logits: Nested,
    *,
    beta: Number = Fraction(1),
    loss_mask: Nested = None,
    attn_mask: Nested = None,
    temperature: Number = Fraction(1),
    reduction: str = "sum",
    divergence: str = "kl",
    support: str = "error",
    row_sums: str = "one",
) -> Iterator[Row]:
    """Every row that counts (LOSS-4, -5, -10, -14, -16, -18); ``divergence`` is for the caller."""
    maps = sum(len(layer[0]) for layer in supervision)
    for number, (teacher, logits) in enumerate(zip(supervision, student_logits, strict=True)):
        if support == "intersect":
            teacher = intersect_support(teacher, logits, attn_mask=attn_mask)[0]
        mask = broadcast(attn_mask, shape_of(logits)) if attn_mask is not None else None
        batch, heads, rows, _ = shape_of(teacher)
        for h in range(heads):
            counted = [
                (b, i)
                for b in range(batch)
                for i in range(rows)
                if (loss_mask is None or loss_mask[b][i]) and any(a != 0 for a in teacher[b][h][i])
            ]
            for b, i in counted:
                row = teacher[b][h][i]
                rho = sum(row) if row_sums == "at_most_one" else Fraction(1)
                allowed = mask[b][h][i] if mask is not None else None
                weight = decimal(beta) / len(counted) / (maps if reduction == "mean" else 1)
                log_q = log_softmax_row(logits[b][h][i], allowed, temperature)
                yield Row(number, (b, h, i), [decimal(a / rho) for a in row], log_q, decimal(rho), weight)


def _times_log(factor: Decimal, log: Decimal | None) -> Decimal:
    """LOSS-12: a term whose leading factor is 0 is 0."""
    if factor == 0:
        return Decimal(0)
    assert log is not None, "the divergence is infinite: support-mismatch"
    return factor * log


def _log(value: Decimal) -> Decimal | None:
    return value.ln() if value > 0 else LN_ZERO


def divergence_of(row: Row, divergence: str) -> Decimal:
    """LOSS-11."""
    total = Decimal(0)
    for p, q, log_q in zip(row.P, row.Q, row.log_q, strict=True):
        if divergence == "kl":
            total += _times_log(p, _log(p)) - _times_log(p, log_q)
        elif divergence == "reverse_kl":
            total += _times_log(q, log_q) - _times_log(q, _log(p))
        elif divergence == "js":
            log_r = _log((p + q) / 2)
            total += (_times_log(p, _log(p)) - _times_log(p, log_r)) / 2
            total += (_times_log(q, log_q) - _times_log(q, log_r)) / 2
        else:
            total += (p - q) ** 2
    return total


def shd_loss(supervision: Nested, student_logits: Nested, **options: Any) -> Decimal:
    """LOSS-2: the weighted sum over counted rows of their terms (LOSS-11)."""
    layers, logits = _as_layers(supervision, student_logits)
    divergence = options.get("divergence", "kl")
    rows = counted_rows(layers, logits, **options)
    return sum((row.weight * row.rho * divergence_of(row, divergence) for row in rows), Decimal(0))


def shd_loss_gradient(supervision: Nested, student_logits: Nested, **options: Any) -> Nested:
    """GRAD-1, GRAD-3, GRAD-9: layers as given, or one array."""
    layers, logits = _as_layers(supervision, student_logits)
    divergence = options.get("divergence", "kl")
    gradients = [zeros(shape_of(z)) for z in logits]
    for row in counted_rows(layers, logits, **options):
        b, h, i = row.place
        w = row.weight / decimal(options.get("temperature", 1))
        # A zero that the text calls exact (GRAD-3) stays a fraction; what arithmetic gives is a decimal.
        gradients[row.layer][b][h][i] = [
            w * row.rho * slope if log_q is not None else Fraction(0)
            for slope, log_q in zip(slopes_of(row, divergence), row.log_q, strict=True)
        ]
    return gradients if layers is supervision else gradients[0]


def slopes_of(row: Row, divergence: str) -> list[Decimal]:
    """GRAD-1 without ``w rho``."""
    P, Q = row.P, row.Q
    if divergence == "kl":
        s = sum(P, Decimal(0))
        return [s * q - p for p, q in zip(P, Q, strict=True)]
    r = []
    for p, q, log_q in zip(P, Q, row.log_q, strict=True):
        if log_q is None:
            r.append(Decimal(0))  # a product with Q_j = 0 is 0
        elif divergence == "reverse_kl":
            r.append(log_q - p.ln())
        elif divergence == "js":
            r.append(log_q - ((p + q) / 2).ln())
        else:
            r.append(q - p)
    mean = sum((q * x for q, x in zip(Q, r, strict=True)), Decimal(0))
    factor = {"reverse_kl": Decimal(1), "js": Decimal(1) / 2, "mse": Decimal(2)}[divergence]
    return [factor * q * (x - mean) for q, x in zip(Q, r, strict=True)]


def shd_loss_gradient_qk(
    supervision: Nested, queries: Nested, keys: Nested, *, scale: Number, **options: Any
) -> tuple[Nested, Nested]:
    """GRAD-4, GRAD-5, GRAD-6, GRAD-9."""
    single = len(shape_of(supervision)) == 4
    if single:
        supervision, queries, keys = [supervision], [queries], [keys]
    logits = [_logits_of(q, k, scale) for q, k in zip(queries, keys, strict=True)]
    dz = shd_loss_gradient(supervision, logits, **options)
    dq, dk = [zeros(shape_of(q)) for q in queries], [zeros(shape_of(k)) for k in keys]
    for number, layer in enumerate(dz):
        group = len(layer[0]) // len(keys[number][0])
        for b, h, i, j in product(*map(range, shape_of(layer))):
            if isinstance(layer[b][h][i][j], Fraction):
                continue
            slope = decimal(scale) * layer[b][h][i][j]
            of_q, of_k = dq[number][b][h], dk[number][b][h // group]
            q, k = queries[number][b][h][i], keys[number][b][h // group][j]
            of_q[i] = combine(1, map_numbers(decimal, of_q[i]), slope, map_numbers(decimal, k))
            of_k[j] = combine(1, map_numbers(decimal, of_k[j]), slope, map_numbers(decimal, q))
    return (dq[0], dk[0]) if single else (dq, dk)


def _logits_of(queries: Nested, keys: Nested, scale: Number) -> Nested:
    group = len(queries[0]) // len(keys[0])
    return [
        [[[scale * dot(q, k) for k in k_heads[h // group]] for q in head] for h, head in enumerate(q_heads)]
        for q_heads, k_heads in zip(queries, keys, strict=True)
    ]


def _as_layers(supervision: Nested, student_logits: Nested) -> tuple[Nested, Nested]:
    if len(shape_of(supervision)) == 4:
        return [supervision], [student_logits]
    return supervision, student_logits


def intersect_support(
    supervision: Nested,
    student_logits: Nested,
    *,
    loss_mask: Nested = None,
    attn_mask: Nested = None,
    row_sums: str = "one",
) -> tuple[Nested, Nested]:
    """LOSS-15; ``loss_mask`` and ``row_sums`` change only what is refused."""
    mask = broadcast(attn_mask, shape_of(student_logits)) if attn_mask is not None else None
    shape = shape_of(supervision)
    kept, dropped = zeros(shape), zeros(shape[:3])
    for b, h, i in product(*map(range, shape[:3])):
        logits = student_logits[b][h][i]
        allowed = [j for j, z in enumerate(logits) if z != MINUS_INFINITY and (mask is None or mask[b][h][i][j])]
        rescaled, dropped[b][h][i] = _keep_columns(supervision[b][h][i], allowed)
        for j, value in zip(allowed, rescaled, strict=True):
            kept[b][h][i][j] = value
    return kept, dropped


def _keep_columns(row: list[Fraction], columns: list[int]) -> tuple[list[Fraction], Fraction]:
    """The kept entries scaled back to the row's sum, and the mass that was dropped; zeros where nothing is left."""
    before, after = sum(row, Fraction(0)), sum((row[j] for j in columns), Fraction(0))
    if after == 0:
        return [Fraction(0)] * len(columns), before
    return [row[j] * before / after for j in columns], before - after


# --- TOKEN --------------------------------------------------------------------------------------------------------


def align_tokens(
    attn_probs: Nested,
    rows: list[int] | None = None,
    columns: list[int] | None = None,
    *,
    query_mask: Nested = None,
    row_sums: str = "one",
) -> tuple[Nested, Nested]:
    """TOKEN-1, TOKEN-2, TOKEN-3; ``query_mask`` and ``row_sums`` change only what is refused."""
    _, _, length, keys = shape_of(attn_probs)
    rows = list(range(length)) if rows is None else rows
    columns = list(range(keys)) if columns is None else columns
    both = [[[_keep_columns(head[i], columns) for i in rows] for head in sample] for sample in attn_probs]
    probs = [[[new for new, _ in head] for head in sample] for sample in both]
    return probs, [[[lost for _, lost in head] for head in sample] for sample in both]


# --- GRAM ---------------------------------------------------------------------------------------------------------


def gram_tensor(
    teacher_probs: Nested,
    values: Nested,
    output_projection: Nested,
    *,
    query_mask: Nested = None,
    alpha_per: str = "map",
    row_sums: str = "one",
) -> Nested:
    """GRAM-1, as ``<A_i X_j, A_k X_l>``."""
    result = []
    for b, (maps, outputs) in enumerate(zip(teacher_probs, value_outputs(values, output_projection), strict=True)):
        heads, rows = len(maps), len(maps[0])
        counted = [query_mask is None or query_mask[b][i] for i in range(rows)]
        products = [[multiply(a, x) for x in outputs] for a in maps]

        def inner(
            i: int, j: int, k: int, m: int, products: Nested = products, counted: list[bool] = counted
        ) -> Nested:
            by_row = [
                dot(left, right) if count else Fraction(0)
                for left, right, count in zip(products[i][j], products[k][m], counted, strict=True)
            ]
            return by_row if alpha_per == "row" else sum(by_row, Fraction(0))

        n = range(heads)
        result.append([[[[inner(i, j, k, m) for m in n] for k in n] for j in n] for i in n])
    return result


def solve_alpha_from_gram(gram: Nested, p: int, q: int) -> Nested:
    """GRAM-2, GRAM-3, GRAM-7."""
    result = []
    for of_sample in gram:
        per_row = isinstance(of_sample[0][0][0][0], list)
        alphas = [_alpha_of(of_sample, p, q, i) for i in range(len(of_sample[0][0][0][0]) if per_row else 1)]
        result.append(alphas if per_row else alphas[0])
    return result


def _alpha_of(gram: Nested, p: int, q: int, row: int) -> Number:
    def entry(i: int, j: int, k: int, m: int) -> Number:
        value = gram[i][j][k][m]
        return value[row] if isinstance(value, list) else value

    def g(j: int, m: int) -> Number:
        return entry(p, j, p, m) - entry(p, j, q, m) - entry(q, j, p, m) + entry(q, j, q, m)

    scale = sum((entry(i, j, i, m) for i in (p, q) for j in (p, q) for m in (p, q)), Fraction(0))
    bottom = g(p, p) + 2 * g(p, q) + g(q, q)
    return Sums(g(p, p) + g(p, q), bottom, scale).alpha if bottom > 0 else HALF  # GRAM-7


def merge_gram(gram: Nested, p: int, q: int, alpha: Nested) -> Nested:
    """GRAM-4: linear along every axis, maps (first and third) by alpha, value outputs by the sum."""
    result = []
    for of_sample, a in zip(gram, alpha, strict=True):
        others = [[(i, Fraction(1))] for i in range(len(of_sample)) if i not in (p, q)]
        outputs = [[(p, Fraction(1)), (q, Fraction(1))], *others]
        parts = []
        for row, weight in enumerate(a if isinstance(a, list) else [a]):
            maps = [[(p, weight), (q, 1 - weight)], *others]
            parts.append(_mix_axes(of_sample, [maps, outputs, maps, outputs], row))
        result.append(stack_last(parts) if isinstance(a, list) else parts[0])
    return result


def _mix_axes(gram: Nested, axes: list[Any], row: int) -> Nested:
    """Each entry of an axis as a weighted sum of the old ones."""
    if not axes:
        return gram[row] if isinstance(gram, list) else gram
    return [
        reduce(add, [map_numbers(weight.__mul__, _mix_axes(gram[i], axes[1:], row)) for i, weight in terms])
        for terms in axes[0]
    ]


# --- PLAN-9 to PLAN-13 --------------------------------------------------------------------------------------------


def matched_plan(
    calibration: list[list[Nested]],
    num_student_heads: int,
    by: str = "residual",
    *,
    alpha_per: str = "map",
    row_sums: str = "one",
) -> tuple[Plan, Fraction]:
    """The plan, and by how much (relative) the best set of pairs beat the next in the closest round."""
    samples = []  # one pool a sample: (maps, value outputs, mask)
    for item in calibration:
        masks = item[2] if len(item) > 2 else [None] * len(item[0])
        samples += [(list(zip(a, x, strict=True)), mask) for a, x, mask in zip(item[0], item[1], masks, strict=True)]
    plan, margin = [], Fraction(1)
    heads = len(samples[0][0])
    while heads > num_student_heads:
        count = min(heads // 2, heads - num_student_heads)
        scores = {
            (p, q): -sum((_pair_cost(pool[p], pool[q], mask, by, alpha_per) for pool, mask in samples), Fraction(0))
            for p in range(heads)
            for q in range(p + 1, heads)
        }
        ranked = sorted(
            (sum((scores[pair] for pair in pairs), Fraction(0)), [list(pair) for pair in pairs])
            for pairs in combinations(scores, count)
            if len({position for pair in pairs for position in pair}) == 2 * count
        )
        best = ranked[-1]
        if len(ranked) > 1 and ranked[0][0] != 0:
            margin = min(margin, (best[0] - ranked[-2][0]) / -ranked[0][0])
        one_round = sorted(best[1])
        plan.append(one_round)
        samples = [
            (next_pool(pool, one_round, [_merge(pool[p], pool[q], mask, alpha_per) for p, q in one_round]), mask)
            for pool, mask in samples
        ]
        heads -= count
    return plan, margin


def _pair_cost(p: Any, q: Any, mask: list[bool] | None, by: str, per: str) -> Number:
    """PLAN-12: E at the clipped alpha, or the squared distance of the maps, over counted rows."""
    if by == "similarity":
        return squared_norm(subtract(p[0], q[0]), mask)
    merged = _merge(p, q, mask, per)
    wanted = add(multiply(p[0], p[1]), multiply(q[0], q[1]))
    return squared_norm(subtract(multiply(merged[0], merged[1]), wanted), mask)


def _merge(p: Any, q: Any, mask: list[bool] | None, per: str) -> Any:
    alphas = [s.alpha for s in pair_sums(p[0], q[0], p[1], q[1], mask, rule="least_squares", per=per)]
    alphas *= 1 if per == "row" else len(p[0])
    mixed = [combine(a, p[0][i], 1 - a, q[0][i]) for i, a in enumerate(alphas)]
    return mixed, add(p[1], q[1])


# --- ORACLE -------------------------------------------------------------------------------------------------------


def diagnose(
    teacher_probs: Nested,
    value_outputs: Nested,
    num_student_heads: int,
    *,
    plan: Any = "progressive",
    strategies: Sequence[str] = STRATEGIES,
    query_mask: Nested = None,
    alpha_per: str = "map",
    row_sums: str = "one",
) -> dict[str, Any]:
    """ORACLE-1 to ORACLE-6."""
    batch, heads, length, keys = shape_of(teacher_probs)
    rounds = merge_plan(heads, num_student_heads, plan)
    groups = plan_groups(rounds, heads)
    options = {"plan": rounds, "query_mask": query_mask, "alpha_per": alpha_per, "row_sums": row_sums}
    report: dict[str, Any] = {"plan": rounds, "unconstrained": [], "stochastic": []}
    squares: dict[str, list[Any]] = {"unconstrained": [], "stochastic": []}
    results = {
        name: squeeze_heads(teacher_probs, value_outputs, num_student_heads, strategy=name, **options)
        for name in strategies
    }
    for name in strategies:
        squares[name] = []
    for b in range(batch):
        mask = query_mask[b] if query_mask is not None else None
        errors = {name: Fraction(0) for name in squares}
        size = Fraction(0)
        for h, group in enumerate(groups):
            x, wanted = value_outputs[b][group[0]], zeros([length, len(value_outputs[b][0][0])])
            for t in group[1:]:
                x = add(x, value_outputs[b][t])
            for t in group:
                wanted = add(wanted, multiply(teacher_probs[b][t], value_outputs[b][t]))
            size += squared_norm(wanted, mask)
            for i in range(length):
                if mask is not None and not mask[i]:
                    continue
                allowed = [j for j in range(keys) if any(teacher_probs[b][t][i][j] > 0 for t in range(heads))]
                errors["unconstrained"] += _distance_to_span(wanted[i], x)
                errors["stochastic"] += _distance_to_hull(
                    wanted[i], [x[j] for j in allowed], sink=row_sums == "at_most_one"
                )
            for name, result in results.items():
                errors[name] += squared_norm(subtract(multiply(result.probs[b][h], x), wanted), mask)
        for name, error in errors.items():
            squares[name].append(INFINITY if size == 0 and error else error / size if size else Fraction(0))
    for name in ("unconstrained", "stochastic"):
        report[name] = [_root(value) for value in squares[name]]
    for name, result in results.items():
        report[f"strategies.{name}.residual"] = result.residual
        report[f"strategies.{name}.head_residual"] = [_root(value) for value in squares[name]]
        for bound in ("unconstrained", "stochastic"):
            ratios = [_ratio(over, under) for over, under in zip(squares[name], squares[bound], strict=True)]
            report[f"strategies.{name}.over_{bound}"] = ratios
    return report


def _root(square: Any) -> Any:
    return square if square == INFINITY else square_root(square)


def _ratio(over: Any, under: Any) -> Any:
    """ORACLE-6."""
    over, under = (Fraction(0) if value <= DEGENERATE else value for value in (over, under))
    if under == 0:
        return Decimal(1) if over == 0 else INFINITY
    return square_root(over / under)


def _distance_to_span(target: list[Fraction], rows: Nested) -> Number:
    """ORACLE-2: the squared distance from any real combination of the rows; dependent rows are left out."""
    basis: list[list[Fraction]] = []
    for row in rows:
        trial = [*basis, row]
        if solve_linear([[dot(u, v) for v in trial] for u in trial], [Fraction(0)] * len(trial)) is not None:
            basis = trial
    if not basis:
        return dot(target, target)
    weights = solve_linear([[dot(u, v) for v in basis] for u in basis], [dot(u, target) for u in basis])
    assert weights is not None
    rest = list(target)
    for weight, row in zip(weights, basis, strict=True):
        rest = combine(1, rest, -weight, row)
    return dot(rest, rest)


def _distance_to_hull(target: list[Fraction], rows: Nested, *, sink: bool) -> Number:
    """ORACLE-3: the squared distance from the rows' convex combinations; a sink is one more row of zeros."""
    if not rows:
        return dot(target, target)
    points = [subtract(row, target) for row in rows]
    if sink:
        points.append([-x for x in target])
    gram = [[dot(u, v) for v in points] for u in points]
    weights = nearest_in_hull(gram)
    return sum((weights[i] * dot(gram[i], weights) for i in range(len(gram))), Fraction(0))
