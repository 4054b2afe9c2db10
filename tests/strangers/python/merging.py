"""Chapters ALPHA, GRAM and MIX."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import reduce
from typing import Any

from arrays import (
    DEGENERATE,
    Array,
    Row,
    Rows,
    add,
    dot,
    fail,
    flatten,
    indices,
    matmul,
    option,
    positive,
    probabilities,
    real,
    soften_all,
    whole,
)
from plans import Plan, check_count, check_plan, compose, merge_plan, mix, next_pool, plan_groups

STRATEGIES = ("shd", "constant", "hard", "mean", "simplex")


def value_outputs(values: Any, output_projection: Any) -> Array:
    """MAP-6, MAP-11: X ``(B, H_t, S, D)``."""
    values = real(values, "values", 4)
    projection = real(output_projection, "output_projection", 2)
    batch, groups, keys, width = values.shape
    rows, model = projection.shape
    if rows == 0 or rows % (groups * width):
        fail("argument-shape", f"{rows} rows of the projection, values {values.shape}")
    heads = rows // width
    share = heads // groups
    weights = projection.block()
    data: Row = []
    for b, t in indices((batch, heads)):
        data += flatten(matmul(values.block(b, t // share), weights[t * width : (t + 1) * width]))
    return Array((batch, heads, keys, model), data)


def weigh_pair(A_p: Rows, A_q: Rows, X_p: Rows, X_q: Rows, rule: str, counted: list[bool]) -> list[tuple[float, ...]]:
    """Per row: <N, M>, ||M||^2 and the norms of ALPHA-6; nothing on rows that do not count."""
    if not any(counted):
        return [(0.0, 0.0, 0.0)] * len(counted)
    X = add(X_p, X_q)
    M = matmul(add(A_p, A_q, 1, -1), X)
    if rule == "least_squares":
        N = matmul(add(A_q, A_p, 1, -1), X_p)
    else:
        N = add(matmul(A_q, X_p), matmul(A_p, X_q), 1, -1)
    scale = [dot(p, p) + dot(q, q) for p, q in zip(matmul(A_p, X), matmul(A_q, X), strict=True)]
    return [
        (dot(n, m), dot(m, m), size) if counts else (0.0, 0.0, 0.0)
        for m, n, size, counts in zip(M, N, scale, counted, strict=True)
    ]


def raw_alpha(product: float, norm: float, scale: float) -> float | None:
    """ALPHA-2, and none for a degenerate pair (ALPHA-6)."""
    return None if norm <= DEGENERATE * scale else -product / norm


def raw_alphas(
    A_p: Rows, A_q: Rows, X_p: Rows, X_q: Rows, rule: str, per: str, counted: list[bool]
) -> list[float | None]:
    """`a*` before the clip: one number, or one a row."""
    sums = weigh_pair(A_p, A_q, X_p, X_q, rule, counted)
    if per == "map":
        sums = [tuple(map(math.fsum, zip(*sums, strict=True)))]
    return [raw_alpha(*entry) for entry in sums]


def clip(raw: float | None) -> float:
    """ALPHA-3, ALPHA-10."""
    return 0.5 if raw is None else min(max(raw, 0.0), 1.0)


def solve_alpha(
    probs_p: Any,
    probs_q: Any,
    value_outputs_p: Any,
    value_outputs_q: Any,
    *,
    query_mask: Any = None,
    rule: Any = "least_squares",
    alpha_per: Any = "map",
    row_sums: Any = "one",
) -> Array:
    """Chapter ALPHA."""
    option(rule, ("least_squares", "as_printed"), "rule")
    option(alpha_per, ("map", "row"), "alpha_per")
    A_p, counted = probabilities(probs_p, "probs_p", 3, row_sums, query_mask)
    A_q, _ = probabilities(probs_q, "probs_q", 3, row_sums, query_mask)
    X_p, X_q = real(value_outputs_p, "value_outputs_p", 3), real(value_outputs_q, "value_outputs_q", 3)
    if A_p.shape != A_q.shape or X_p.shape != X_q.shape or X_p.shape[:2] != (A_p.shape[0], A_p.shape[2]):
        fail("argument-shape", f"{A_p.shape}, {A_q.shape}, {X_p.shape}, {X_q.shape}")
    batch, length, _ = A_p.shape
    data = [
        clip(raw)
        for b in range(batch)
        for raw in raw_alphas(A_p.block(b), A_q.block(b), X_p.block(b), X_q.block(b), rule, alpha_per, counted[b])
    ]
    return Array((batch, length) if alpha_per == "row" else (batch,), data)


def nearest_weights(points: Rows) -> Row:
    """The point nearest to zero in a convex hull, by Wolfe's method in exact arithmetic (MIX-7)."""
    k = len(points)
    top = max(max(map(abs, point)) for point in points)
    if top == 0:
        return [1 / k] * k
    shift = 50 - math.frexp(top)[1]  # 50 bits keep a relative error of 2^-50
    whole_points = [[round(math.ldexp(entry, shift)) for entry in point] for point in points]
    G = [[0] * k for _ in range(k)]
    for i in range(k):
        for j in range(i + 1):
            G[i][j] = G[j][i] = sum(x * y for x, y in zip(whole_points[i], whole_points[j], strict=True))
    start = min(range(k), key=lambda i: G[i][i])
    weights = {start: Fraction(1)}
    while True:
        slope = [sum(c * G[i][j] for j, c in weights.items()) for i in range(k)]
        value = sum(c * slope[i] for i, c in weights.items())
        best = min(range(k), key=slope.__getitem__)
        if slope[best] >= value:
            return [float(weights.get(i, 0)) for i in range(k)]
        weights[best] = Fraction(0)
        while True:
            target = affine_minimum(G, list(weights))
            if all(c > 0 for c in target.values()):
                weights = target
                break
            step = min(weights[i] / (weights[i] - c) for i, c in target.items() if c <= 0)
            moved = {i: (1 - step) * c + step * target[i] for i, c in weights.items()}
            weights = {i: c for i, c in moved.items() if c > 0}


def affine_minimum(G: list[list[int]], members: list[int]) -> dict[int, Fraction]:
    """Weights that sum to one and minimise the norm; fraction-free elimination of the bordered system."""
    n = len(members)
    table = [[G[i][j] for j in members] + [1, 0] for i in members] + [[1] * n + [0, 1]]
    last = 1
    for column in range(n + 1):
        pivot = next(r for r in range(column, n + 1) if table[r][column])
        table[column], table[pivot] = table[pivot], table[column]
        head = table[column]
        for r in range(n + 1):
            if r != column:
                factor = table[r][column]
                table[r] = [(head[column] * x - factor * y) // last for x, y in zip(table[r], head, strict=True)]
        last = head[column]
    return {member: Fraction(table[at][-1], table[at][at]) for at, member in enumerate(members)}


def simplex_weights(maps: list[Rows], outputs: list[Rows], per: str, counted: list[bool]) -> list[Row]:
    """MIX-7, MIX-14, MIX-15: per row, or once, the weights of a group."""
    k, length = len(maps), len(counted)
    problems = 1 if per == "map" else length
    if k == 1:
        return [[1.0]] * problems
    X = reduce(add, outputs)
    Y = [matmul(A, X) for A in maps]
    O = reduce(add, [matmul(A, V) for A, V in zip(maps, outputs, strict=True)])  # noqa: E741
    result = []
    for rows in [[i for i in range(length) if counted[i]]] if per == "map" else [[i] for i in range(length)]:
        parts = [[entry for i in rows for entry in y[i]] for y in Y]
        gaps = [[u - v for u, v in zip(parts[i], parts[j], strict=True)] for i in range(k) for j in range(i)]
        total = math.fsum(dot(part, part) for part in parts)
        skip = per == "row" and not counted[rows[0]]
        if skip or not rows or max(dot(gap, gap) for gap in gaps) <= DEGENERATE * total:
            result.append([1 / k] * k)
            continue
        goal = [entry for i in rows for entry in O[i]]
        result.append(nearest_weights([[u - o for u, o in zip(part, goal, strict=True)] for part in parts]))
    return result


def squeeze_heads(
    teacher_probs: Any,
    value_outputs: Any,
    num_student_heads: Any,
    *,
    plan: Any = "progressive",
    strategy: Any = "shd",
    query_mask: Any = None,
    temperature: Any = 1,
    alpha_rule: Any = "least_squares",
    alpha_per: Any = "map",
    alpha_from: Any = "teacher",
    row_sums: Any = "one",
) -> dict[str, Any]:
    """Chapter MIX: the record of MIX-9 and MIX-11."""
    temperature = positive(temperature, "temperature")
    option(strategy, STRATEGIES, "strategy")
    option(alpha_rule, ("least_squares", "as_printed"), "alpha_rule")
    option(alpha_per, ("map", "row"), "alpha_per")
    option(alpha_from, ("teacher", "softened"), "alpha_from")
    probs, counted = probabilities(teacher_probs, "teacher_probs", 4, row_sums, query_mask)
    X = real(value_outputs, "value_outputs", 4)
    if X.shape[:3] != (*probs.shape[:2], probs.shape[3]):
        fail("argument-shape", f"maps {probs.shape}, value outputs {X.shape}")
    batch, heads, length, _ = probs.shape
    check_count(num_student_heads, "num_student_heads")
    if num_student_heads > heads:
        fail("heads-exceed", f"{num_student_heads} student heads, {heads} teacher heads")
    if plan is None or isinstance(plan, str):
        rounds = merge_plan(heads, num_student_heads, plan or "progressive")
    else:
        rounds = check_plan(plan, heads, num_student_heads)
    softened = soften_all(probs, temperature, row_sums)
    source = softened if alpha_from == "softened" else probs
    per_row = alpha_per == "row"
    groups = plan_groups(rounds, heads)
    alphas: list[Array] = []
    clipped = degenerate = 0
    if strategy in ("mean", "simplex"):
        mixing = weigh_groups(source, X, groups, strategy, alpha_per, counted)
    else:
        samples = [run_plan(source, X, b, rounds, strategy, alpha_rule, alpha_per, counted[b]) for b in range(batch)]
        for number, pairs in enumerate(rounds):
            shape = (batch, len(pairs), length) if per_row else (batch, len(pairs))
            alphas.append(Array(shape, [a for sample, _, _ in samples for a in sample[number]]))
        clipped, degenerate = sum(c for _, c, _ in samples), sum(d for _, _, d in samples)
        mixing = compose(alphas, rounds, heads, batch, length if per_row else None)
    return {
        "probs": mix(softened, mixing),
        "mixing": mixing,
        "alphas": alphas,
        "residual": Array((batch,), residuals(probs, X, mixing, groups, counted)),
        "num_clipped": clipped,
        "num_degenerate": degenerate,
        "plan": [[list(pair) for pair in pairs] for pairs in rounds],
    }


def run_plan(
    source: Array, X: Array, b: int, rounds: Plan, strategy: str, rule: str, per: str, counted: list[bool]
) -> tuple[list[Row], int, int]:
    """MIX-4, MIX-5 for one sample: the alphas of every round, and the counts."""
    heads = source.shape[1]
    pool = [(source.block(b, t), X.block(b, t)) for t in range(heads)]
    counts = counted if per == "row" else [True]
    alphas: list[Row] = []
    clipped = degenerate = 0
    for pairs in rounds:
        merged, weights = [], []
        for p, q in pairs:
            (A_p, X_p), (A_q, X_q) = pool[p], pool[q]
            if strategy == "constant":
                chosen = [0.5] * (len(counted) if per == "row" else 1)
            else:
                raws = raw_alphas(A_p, A_q, X_p, X_q, rule, per, counted)
                degenerate += sum(raw is None for raw, counts_too in zip(raws, counts, strict=True) if counts_too)
                chosen = [clip(raw) for raw in raws]
                if strategy == "hard":
                    chosen = [float(a >= 0.5) for a in chosen]
                else:
                    clipped += sum(raw is not None and not 0 <= raw <= 1 for raw in raws)
            weights += chosen
            by_row = chosen if per == "row" else chosen * len(counted)
            A = [
                [a * x + (1 - a) * y for x, y in zip(r, s, strict=True)]
                for a, r, s in zip(by_row, A_p, A_q, strict=True)
            ]
            merged.append((A, add(X_p, X_q)))
        alphas.append(weights)
        pool = next_pool(pool, pairs, merged)
    return alphas, clipped, degenerate


def weigh_groups(
    source: Array, X: Array, groups: list[list[int]], strategy: str, per: str, counted: list[list[bool]]
) -> Array:
    """C of `mean` (MIX-6) and of `simplex` (MIX-7)."""
    batch, heads, length, _ = source.shape
    inner = length if per == "row" else 1
    data: Row = []
    for b in range(batch):
        for group in groups:
            if strategy == "mean":
                data += [1 / heads] * (heads * inner)
                continue
            maps, outputs = [source.block(b, t) for t in group], [X.block(b, t) for t in group]
            weights = simplex_weights(maps, outputs, per, counted[b])
            for t in range(heads):
                data += [w[group.index(t)] if t in group else 0.0 for w in weights]
    return Array((batch, len(groups), heads) + ((length,) if per == "row" else ()), data)


def residuals(probs: Array, X: Array, mixing: Array, groups: list[list[int]], counted: list[list[bool]]) -> Row:
    """MIX-8."""
    mixed = mix(probs, mixing)
    result = []
    for b in range(probs.shape[0]):
        O = reduce(add, [matmul(probs.block(b, t), X.block(b, t)) for t in range(probs.shape[1])])  # noqa: E741
        merged = [matmul(mixed.block(b, h), reduce(add, [X.block(b, t) for t in g])) for h, g in enumerate(groups)]
        gap = add(reduce(add, merged), O, 1, -1)
        rows = [i for i, counts in enumerate(counted[b]) if counts]
        error = math.fsum(dot(gap[i], gap[i]) for i in rows)
        norm = math.fsum(dot(O[i], O[i]) for i in rows)
        result.append(math.sqrt(error) / math.sqrt(norm) if norm > 0 else (math.inf if error > 0 else 0.0))
    return result


def gram_tensor(
    teacher_probs: Any,
    values: Any,
    output_projection: Any,
    *,
    query_mask: Any = None,
    alpha_per: Any = "map",
    row_sums: Any = "one",
) -> Array:
    """GRAM-1, as the products ``<A_i X_j, A_k X_l>``."""
    option(alpha_per, ("map", "row"), "alpha_per")
    probs, counted = probabilities(teacher_probs, "teacher_probs", 4, row_sums, query_mask)
    X = value_outputs(values, output_projection)
    batch, heads, length, keys = probs.shape
    if X.shape[:3] != (batch, heads, keys):
        fail("argument-shape", f"maps {probs.shape}, value outputs {X.shape}")
    inner = length if alpha_per == "row" else 1
    size = heads**2
    data: Row = []
    for b in range(batch):
        wide = [flatten(columns) for columns in zip(*(X.block(b, j) for j in range(heads)), strict=True)]
        model = X.shape[3]
        products: list[Rows] = []  # A_i X_j for (i, j), only counted rows
        for i in range(heads):
            rows = matmul(probs.block(b, i), wide)
            products += [[row[j * model : (j + 1) * model] for row in rows] for j in range(heads)]
        G = [[[0.0]] * size for _ in range(size)]
        if inner == 1:
            flat = [[x for row, counts in zip(Y, counted[b], strict=True) if counts for x in row] for Y in products]
        for m in range(size):
            for n in range(m + 1):
                if inner == 1:
                    entry = [dot(flat[m], flat[n])]
                else:
                    pairs = zip(products[m], products[n], counted[b], strict=True)
                    entry = [dot(x, y) if counts else 0.0 for x, y, counts in pairs]
                G[m][n] = G[n][m] = entry
        data += [x for row in G for entry in row for x in entry]
    return Array((batch,) + (heads,) * 4 + ((length,) if alpha_per == "row" else ()), data)


def check_gram(gram: Any, p: Any, q: Any) -> Array:
    """GRAM-6."""
    gram = real(gram, "gram")
    if len(gram.shape) not in (5, 6) or len(set(gram.shape[1:5])) != 1:
        fail("argument-shape", f"gram is {gram.shape}")
    heads = gram.shape[1]
    if not (whole(p) and whole(q) and 0 <= p < heads and 0 <= q < heads and p != q):
        fail("argument-value", f"p = {p!r}, q = {q!r} in a pool of {heads}")
    return gram


def solve_alpha_from_gram(gram: Any, p: Any, q: Any) -> Array:
    """GRAM-2, GRAM-3, GRAM-7."""
    gram = check_gram(gram, p, q)
    batch, heads = gram.shape[:2]
    inner = gram.shape[5] if len(gram.shape) == 6 else 1
    result = []
    for b in range(batch):
        for row in range(inner):

            def entry(i: int, j: int, k: int, m: int, b: int = b, row: int = row) -> float:
                return gram.data[((((b * heads + i) * heads + j) * heads + k) * heads + m) * inner + row]

            def g(j: int, m: int, G: Any = entry) -> float:
                return math.fsum((G(p, j, p, m), -G(p, j, q, m), -G(q, j, p, m), G(q, j, q, m)))

            pp, pq, qq = g(p, p), g(p, q), g(q, q)
            scale = math.fsum(entry(i, j, i, m) for i in (p, q) for j in (p, q) for m in (p, q))
            bottom = pp + 2 * pq + qq
            result.append(clip(raw_alpha(-(pp + pq), bottom, scale) if bottom > 0 else None))
    return Array((batch, *gram.shape[5:]), result)


def merge_gram(gram: Any, p: Any, q: Any, alpha: Any) -> Array:
    """GRAM-4."""
    gram = check_gram(gram, p, q)
    alpha = real(alpha, "alpha")
    batch, heads = gram.shape[:2]
    inner = gram.shape[5:]
    if alpha.shape != (batch, *inner):
        fail("argument-shape", f"alpha is {alpha.shape}, gram {gram.shape}")
    if not all(0 <= a <= 1 for a in alpha.data):
        fail("mixing-invalid", "an alpha outside [0, 1] makes a negative weight")
    rows = inner[0] if inner else 1
    size = heads**4 * rows
    data: Row = []
    for b in range(batch):
        weights = alpha.data[b * rows : (b + 1) * rows]
        parts = [gram.data[b * size + r : (b + 1) * size : rows] for r in range(rows)]
        merged = [merge_axes(part, heads, p, q, a) for part, a in zip(parts, weights, strict=True)]
        data += [merged[r][at] for at in range(len(merged[0])) for r in range(rows)]
    return Array((batch,) + (heads - 1,) * 4 + inner, data)


def merge_axes(flat: Row, heads: int, p: int, q: int, a: float) -> Row:
    """The four axes of one gram tensor, each merged: the new head first."""
    for axis in range(4):
        u, v = (a, 1 - a) if axis % 2 == 0 else (1.0, 1.0)
        stride = heads ** (3 - axis)  # the axes behind have not been merged yet
        result: Row = []
        for start in range(0, len(flat), stride * heads):
            block = [flat[start + i * stride : start + (i + 1) * stride] for i in range(heads)]
            result += [u * x + v * y for x, y in zip(block[p], block[q], strict=True)]
            for i in range(heads):
                if i not in (p, q):
                    result += block[i]
        flat = result
    return flat
