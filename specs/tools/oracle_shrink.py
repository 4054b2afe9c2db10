"""The oracle of ``specs/shrink.md``: products of factors, plans, least squares, from its sentences alone.

Fractions where a result is rational, decimals of 60 digits where roots, eigenvectors or exponentials enter. A layer
is a dictionary of nested lists; what is answered of a student's layer are the products of ``specs/conformance.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from typing import Any

from eigen import projector_of_largest, square_roots
from exact import (
    Nested,
    Number,
    combine,
    decimal,
    dot,
    map_numbers,
    multiply,
    shape_of,
    solve_linear,
    square_root,
    subtract,
    transpose,
    zeros,
)
from oracle_heads import Plan, compose_mixing, next_pool, plan_groups, softmax
from oracle_loss import merge_gram, solve_alpha_from_gram

RIDGE = Fraction(1e-6)

Layer = dict[str, Any]
Merge = dict[str, Any]


# --- HEAD: products of a layer ------------------------------------------------------------------------------------


def sizes_of(layer: Layer) -> tuple[int, int, int]:
    """Query heads, query heads for each key head, channels."""
    heads, width, _ = shape_of(layer["query"])
    return heads, heads // len(layer["key"]), width


def scale_of(layer: Layer) -> Decimal:
    """s, usually ``1 / sqrt(d)``."""
    given = layer.get("scale")
    return 1 / square_root(Fraction(shape_of(layer["query"])[2])) if given is None else decimal(given)


def augmented(layer: Layer, name: str) -> Nested:
    """The matrices of a name with their biases as one more row, or a row of zeros."""
    biases = layer.get(f"{name}_bias")
    return [
        [*matrix, biases[h] if biases is not None else [Fraction(0)] * len(matrix[0])]
        for h, matrix in enumerate(layer[name])
    ]


def mixed_forms(layer: Layer, weights: Nested) -> Nested:
    """``s sum_t C[h,t] [W_Q,t; b_Q,t] [W_K,t; b_K,t]^T`` of each student head ``(D + 1, D + 1)``."""
    _, per, _ = sizes_of(layer)
    query, key = augmented(layer, "query"), augmented(layer, "key")
    every = [multiply(query[t], transpose(key[t // per])) for t in range(len(query))]
    return [scaled(scale_of(layer), weighted_sum(row, every)) for row in weights]


def value_sums(layer: Layer, groups: Sequence[Sequence[int]]) -> Nested:
    """HEAD-12: ``sum_t [W_V,t; b_V,t] W_O,t`` of each group ``(D + 1, D)``."""
    _, per, _ = sizes_of(layer)
    value = augmented(layer, "value")
    every = [multiply(value[t // per], layer["output"][t]) for t in range(len(layer["output"]))]
    return [weighted_sum([Fraction(int(t in group)) for t in range(len(every))], every) for group in groups]


def exact_products(layer: Layer, weights: Nested, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """HEAD-7, HEAD-9: what the logits and the outputs of an exact squeezing are."""
    sums = value_sums(layer, groups)
    constant = [sum((form[-1][d] for form in sums), Fraction(0)) for d in range(len(sums[0][0]))]
    return {
        "logit_forms": [[row[:-1] for row in form] for form in mixed_forms(layer, weights)],
        "value_forms": [form[:-1] for form in sums],
        "constant": _added(constant, layer.get("output_bias")),
    }


def mix_queries(weights: Layer, merge: Merge, query_size: Nested = None) -> dict[str, Any]:
    """HEAD-7, HEAD-8, HEAD-18."""
    c = merge["mixing"]
    if query_size is not None:
        c = [[x / r for x, r in zip(row, query_size, strict=True)] for row in c]
    biases = weights.get("query_bias")
    return {
        **exact_products(weights, c, merge["groups"]),
        "query": [weighted_sum(row, weights["query"]) for row in c],
        "query_bias": None if biases is None else [weighted_sum(row, biases) for row in c],
        "output": [
            weighted_sum([Fraction(int(t in group)) for t in range(len(c[0]))], weights["output"])
            for group in merge["groups"]
        ],
    }


def concatenate_heads(weights: Layer, merge: Merge, head_dim: int) -> dict[str, Any]:
    """HEAD-9, HEAD-10: the products do not depend on the length."""
    assert head_dim >= max(map(len, merge["groups"])) * shape_of(weights["query"])[2]
    return exact_products(weights, merge["mixing"], merge["groups"])


def low_rank_heads(
    weights: Layer,
    merge: Merge,
    num_kv_heads: int,
    head_dim: int,
    moment: Nested,
    *,
    key_moment: Nested = None,
    rotary: dict[str, Any] | None = None,
    ridge: Number = RIDGE,
) -> dict[str, Any]:
    """HEAD-11 to HEAD-16."""
    groups = merge["groups"]
    per = len(groups) // num_kv_heads
    shared = [range(kv * per, kv * per + per) for kv in range(num_kv_heads)]
    whole = raised(moment, ridge)
    result: dict[str, Any] = {}
    if rotary is None:
        mean = moment[-1][:-1]
        centred = key_moment or [
            [moment[i][j] - mean[i] * mean[j] for j in range(len(mean))] for i in range(len(mean))
        ]
        forms = [[row[:-1] for row in form] for form in mixed_forms(weights, merge["mixing"])]
        result["logit_forms"] = cut_forms(forms, shared, head_dim, whole, raised(centred, ridge))
    else:
        result |= _rotary_products(weights, merge["mixing"], shared, whole, rotary)
    sums = value_sums(weights, groups)
    moved = weights.get("output_bias") is not None
    if moved:
        constant = [sum((form[-1][d] for form in sums), Fraction(0)) for d in range(len(sums[0][0]))]
        sums = [[*form[:-1], [Fraction(0)] * len(form[0])] for form in sums]
    turned = [transpose(form) for form in sums]
    same = [[Fraction(int(i == j)) for j in range(len(turned[0]))] for i in range(len(turned[0]))]
    kept = [transpose(form) for form in cut_forms(turned, shared, head_dim, same, whole)]
    if not moved:
        constant = [sum((form[-1][d] for form in kept), Decimal(0)) for d in range(len(kept[0][0]))]
    return {
        **result,
        "value_forms": [form[:-1] for form in kept],
        "constant": _added(constant, weights.get("output_bias")),
    }


def _rotary_products(
    layer: Layer, weights: Nested, shared: Sequence[range], whole: Nested, rotary: dict[str, Any]
) -> dict[str, Any]:
    """HEAD-14 to HEAD-16: rank one for each pair that turns, in complex numbers; the rest as one real form."""
    pairs, dim = len(rotary["frequencies"]), shape_of(layer["query"])[2]
    adjacent = rotary.get("layout") == "adjacent"
    entries = [(2 * f, 2 * f + 1) if adjacent else (f, f + pairs) for f in range(pairs)]
    slow = rotary.get("slow") or [False] * pairs
    fast = [entry for entry, still in zip(entries, slow, strict=True) if not still]
    by_pair = []
    for i, j in fast:
        forms = [_complex_form(layer, row, i, j) for row in weights]
        by_pair.append(cut_forms(forms, shared, 2, _doubled(whole), _doubled(whole)))
    rest = [entry for entry in range(dim) if not any(entry in pair for pair in fast)]
    still = {
        **layer,
        **{
            name: map_rows(layer.get(name), lambda row: [row[e] for e in rest])
            for name in ("query", "key", "query_bias", "key_bias")
        },
        "scale": scale_of(layer),
    }
    size = len(whole)
    found = {
        "pair_forms": [
            [[[row[:size] for row in pair[h][:size]], [row[:size] for row in pair[h][size:]]] for pair in by_pair]
            for h in range(len(weights))
        ]
    }
    if rest:
        found["still_forms"] = cut_forms(mixed_forms(still, weights), shared, len(rest), whole, whole)
    return found


def _complex_form(layer: Layer, row: Sequence[Number], i: int, j: int) -> Nested:
    """``s sum_t c_t w_Q w_K^H`` of one pair of entries, as the real matrix ``[[Re, -Im], [Im, Re]]``."""
    _, per, _ = sizes_of(layer)
    query, key = augmented(layer, "query"), augmented(layer, "key")
    size = len(query[0])
    real, imaginary = zeros([size, size]), zeros([size, size])
    for t, c in enumerate(row):
        for a in range(size):
            for b in range(size):
                q, k = query[t][a], key[t // per][b]
                real[a][b] += c * (q[i] * k[i] + q[j] * k[j])
                imaginary[a][b] += c * (q[j] * k[i] - q[i] * k[j])
    top = [[*x, *(-y for y in z)] for x, z in zip(real, imaginary, strict=True)]
    return scaled(scale_of(layer), top + [[*z, *x] for x, z in zip(real, imaginary, strict=True)])


def _doubled(matrix: Nested) -> Nested:
    nothing = [Fraction(0)] * len(matrix)
    return [[*row, *nothing] for row in matrix] + [[*nothing, *row] for row in matrix]


# --- HEAD-13: one decomposition under moments ---------------------------------------------------------------------


def raised(moment: Nested, ridge: Number) -> Nested:
    """``S + e m I`` with m the mean eigenvalue."""
    size = len(moment)
    more = ridge * sum((moment[i][i] for i in range(size)), Fraction(0)) / size
    return [[x + more if i == j else x for j, x in enumerate(row)] for i, row in enumerate(moment)]


def cut_forms(forms: Nested, shared: Sequence[range], rank: int, left: Nested, right: Nested) -> Nested:
    """The forms ``M_h`` after a cut to the rank, with one right factor for the heads that share one.

    With P the projector on the leading eigenvectors of ``R (sum M_h^T S M_h) R``, R the root of the right moment,
    the best product is ``M_h R P R^-1``.
    """
    forms, left = map_numbers(decimal, forms), map_numbers(decimal, left)
    root, inverse = square_roots(map_numbers(decimal, right))
    found: list[Any] = [None] * len(forms)
    for heads in shared:
        total = map_numbers(decimal, zeros([len(root), len(root)]))
        for h in heads:
            total = combine(Decimal(1), total, Decimal(1), multiply(transpose(forms[h]), multiply(left, forms[h])))
        kept = projector_of_largest(multiply(root, multiply(total, root)), rank)
        turn = multiply(root, multiply(kept, inverse))
        for h in heads:
            found[h] = multiply(forms[h], turn)
    return found


# --- HEAD-2: attention --------------------------------------------------------------------------------------------


def attend(
    inputs: Nested,
    weights: Layer,
    *,
    merge: Merge | None = None,
    attn_mask: Nested = None,
    rotary: dict[str, Any] | None = None,
) -> Nested:
    """HEAD-2, HEAD-14."""
    heads, per, _ = sizes_of(weights)
    parts = {name: augmented(weights, name) for name in ("query", "key", "value")}
    result = []
    for rows in inputs:
        x = [[decimal(v) for v in row] + [Decimal(1)] for row in rows]
        query, key, value = (
            [multiply(x, map_numbers(decimal, matrix)) for matrix in parts[name]]
            for name in ("query", "key", "value")
        )
        if rotary is not None:
            query, key = ([turned(head, rotary) for head in side] for side in (query, key))
        logits = [scaled(scale_of(weights), multiply(query[h], transpose(key[h // per]))) for h in range(heads)]
        if merge is not None:
            mixed = [weighted_sum(list(map(decimal, row)), logits) for row in merge["mixing"]]
            home = [next(h for h, group in enumerate(merge["groups"]) if t in group) for t in range(heads)]
            logits = [mixed[home[t]] for t in range(heads)]
        out = map_numbers(decimal, zeros([len(x), shape_of(weights["output"])[2]]))
        for h in range(heads):
            maps = softmax(logits[h], attn_mask, temperature=Decimal(1))
            head = multiply(multiply(maps, value[h // per]), map_numbers(decimal, weights["output"][h]))
            out = combine(Decimal(1), out, Decimal(1), head)
        bias = weights.get("output_bias")
        result.append(out if bias is None else [_added(row, list(map(decimal, bias))) for row in out])
    return result


def turned(rows: Nested, rotary: dict[str, Any]) -> Nested:
    """Queries or keys at positions 0, 1, ..., each rotated pair by its angle."""
    frequencies = rotary["frequencies"]
    adjacent = rotary.get("layout") == "adjacent"
    found = []
    for position, row in enumerate(rows):
        row = list(row)
        for f, frequency in enumerate(frequencies):
            i, j = (2 * f, 2 * f + 1) if adjacent else (f, f + len(frequencies))
            cosine, sine = circle(decimal(frequency) * position)
            row[i], row[j] = row[i] * cosine - row[j] * sine, row[i] * sine + row[j] * cosine
        found.append(row)
    return found


def circle(angle: Decimal) -> tuple[Decimal, Decimal]:
    """Cosine and sine, by their series."""
    cosine, sine, term, n = Decimal(0), Decimal(0), Decimal(1), 0
    while abs(term) > Decimal(10) ** -55:
        sign = -1 if n % 4 > 1 else 1
        cosine, sine = (cosine + sign * term, sine) if n % 2 == 0 else (cosine, sine + sign * term)
        n += 1
        term = term * angle / n
    return cosine, sine


# --- HEAD-3 to HEAD-5 ---------------------------------------------------------------------------------------------


def pooled_mixing(gram: Nested, plan: Plan) -> dict[str, Any]:
    """HEAD-3."""
    pool, alphas = [gram], []
    for one_round in plan:
        alphas.append([[solve_alpha_from_gram(pool, p, q)[0] for p, q in one_round]])
        pool = _next_gram(pool, one_round, alphas[-1][0])
    heads = len(gram)
    same = [[Fraction(int(i == j)) for j in range(heads)] for i in range(heads)]
    return {
        "mixing": compose_mixing(alphas, plan, heads)[0] if plan else same,
        "groups": plan_groups(plan, heads),
    }


def _next_gram(pool: Nested, one_round: Sequence[Sequence[int]], alphas: Sequence[Number]) -> Nested:
    """GRAM-4 pair by pair, from the last, so that the merged heads stand in the round's order."""
    names: list[Any] = list(range(len(pool[0])))
    for number in reversed(range(len(one_round))):
        p, q = one_round[number]
        pool = merge_gram(pool, names.index(p), names.index(q), [alphas[number]])
        names = [("merged", number), *(name for name in names if name not in (p, q))]
    return pool


def grouped_plan(gram: Nested, num_student_heads: int, num_kv_heads: int) -> Plan:
    """HEAD-4, HEAD-5, by trying every set of pairs."""
    pool = [gram]
    per = len(gram) // num_kv_heads
    groups = [list(range(start, start + per)) for start in range(0, len(gram), per)]
    goal = num_student_heads // num_kv_heads
    plan: Plan = []
    while len(groups[0]) > goal:
        count = min(len(groups[0]) // 2, len(groups[0]) - goal)
        pairs: list[list[int]] = []
        for group in groups:
            errors = {pair: _pooled_error(pool, *pair) for pair in combinations(group, 2)}
            ranked = sorted(
                (sum((errors[pair] for pair in chosen), Fraction(0)), chosen)
                for chosen in combinations(errors, count)
                if len({head for pair in chosen for head in pair}) == 2 * count
            )
            assert len(ranked) == 1 or ranked[1][0] - ranked[0][0] > ranked[1][0] / 1000, "a tie: any choice is right"
            pairs += [list(pair) for pair in sorted(ranked[0][1])]
        alphas = [solve_alpha_from_gram(pool, p, q)[0] for p, q in pairs]
        merged = [next(number for number, group in enumerate(groups) if p in group) for p, _ in pairs]
        owner = {head: number for number, group in enumerate(groups) for head in group}
        owners = next_pool([owner[head] for head in range(len(pool[0]))], pairs, merged)
        pool = _next_gram(pool, pairs, alphas)
        groups = [[head for head, of in enumerate(owners) if of == number] for number in range(num_kv_heads)]
        plan.append(pairs)
    return plan


def _pooled_error(pool: Nested, p: int, q: int) -> Fraction:
    """``E(a*) = || a (A_p - A_q)(X_p + X_q) - (A_p - A_q) X_p ||^2``."""
    gram = pool[0]

    def inner(j: int, k: int) -> Fraction:
        value: Fraction = gram[p][j][p][k] - gram[p][j][q][k] - gram[q][j][p][k] + gram[q][j][q][k]
        return value

    u, cross, w = inner(p, p), inner(p, q), inner(q, q)
    a: Fraction = solve_alpha_from_gram(pool, p, q)[0]
    return a * a * (u + 2 * cross + w) - 2 * a * (u + cross) + u


# --- FFN, WIDTH, ALIGN, DEPTH -------------------------------------------------------------------------------------


def merge_linear(
    first: Nested, second: Nested, first_bias: Nested = None, second_bias: Nested = None, *, gate: None = None
) -> dict[str, Any]:
    """FFN-1, FFN-2."""
    bias = None
    if first_bias is not None or second_bias is not None:
        moved = [dot(row, first_bias) if first_bias is not None else Fraction(0) for row in second]
        bias = _added(moved, second_bias)
    return {"weight": multiply(second, first), "bias": bias}


def neuron_importance(activations: Nested, second: Nested) -> Nested:
    """FFN-4."""
    columns = list(zip(*second, strict=True))
    squares = [
        sum((x * x for x in column), Fraction(0)) / len(activations) for column in zip(*activations, strict=True)
    ]
    return [square_root(s * sum(w * w for w in column)) for s, column in zip(squares, columns, strict=True)]


def keep_neurons(first: Layer, second: Layer, importance: Nested, count: int) -> dict[str, Any]:
    """FFN-5."""
    kept = sorted(sorted(range(len(importance)), key=lambda i: (-importance[i], i))[:count])
    bias = first.get("bias")
    return {
        "first.weight": [first["weight"][i] for i in kept],
        "first.bias": None if bias is None else [bias[i] for i in kept],
        "second.weight": [[row[i] for i in kept] for row in second["weight"]],
        "second.bias": second.get("bias"),
        "kept": kept,
    }


def fold_norm(matrix: Nested, scale: Nested, shift: Nested = None, bias: Nested = None) -> dict[str, Any]:
    """WIDTH-1."""
    moved = None if shift is None else [dot(shift, column) for column in zip(*matrix, strict=True)]
    return {
        "matrix": [[s * x for x in row] for s, row in zip(scale, matrix, strict=True)],
        "bias": bias if moved is None else _added(moved, bias),
    }


def principal_axes(moment: Nested, width: int, norm: str = "rms") -> dict[str, Any]:
    """WIDTH-3, WIDTH-4: the projector on the kept axes."""
    size = len(moment)
    if norm == "layer":
        centre = [[Fraction(int(i == j)) - Fraction(1, size) for j in range(size)] for i in range(size)]
        moment, width = multiply(centre, multiply(moment, centre)), width - 1
    return {"projector": projector_of_largest(map_numbers(decimal, moment), width)}


def kept_scale(moment: Nested, basis: Nested) -> Decimal:
    """WIDTH-5."""
    columns = transpose(basis)
    kept = sum((dot(column, [dot(row, column) for row in moment]) for column in columns), Fraction(0))
    energy = kept / sum((moment[i][i] for i in range(len(moment))), Fraction(0))
    return square_root(energy * len(basis) / len(columns))


def align_output(
    inputs: Nested, targets: Nested, weight: Nested, bias: Nested = None, *, ridge: Number = Fraction(1e-4)
) -> dict[str, Any]:
    """ALIGN-2, by its normal equations."""
    columns = len(weight)
    hold = ridge * sum((x * x for row in inputs for x in row), Fraction(0)) / columns
    rows = inputs if bias is None else [[*row, Fraction(1)] for row in inputs]
    start = weight if bias is None else [*weight, bias]
    system = multiply(transpose(rows), rows)
    for i in range(columns):
        system[i][i] += hold
    right = multiply(transpose(rows), subtract(targets, multiply(rows, start)))
    changes = [solve_linear(system, list(column)) for column in zip(*right, strict=True)]
    assert all(change is not None for change in changes), "a fit with several answers"
    found = combine(1, start, 1, transpose(changes))
    return {"weight": found, "bias": None} if bias is None else {"weight": found[:-1], "bias": found[-1]}


def kept_layers(num_teacher_layers: int, layers: int | list[int]) -> list[int]:
    """DEPTH-1, DEPTH-2."""
    if isinstance(layers, list):
        return layers
    if layers == 1:
        return [num_teacher_layers - 1]
    return [
        int(Fraction(i * (num_teacher_layers - 1), layers - 1) + Fraction(1, 2)) for i in range(layers)
    ]  # of numbers of at least 0, whose whole part is their floor


# --- small linear algebra -----------------------------------------------------------------------------------------


def weighted_sum(weights: Sequence[Number], parts: Sequence[Nested]) -> Nested:
    """``sum_t w_t X_t``."""
    total = combine(weights[0], parts[0], 0 * weights[0], parts[0])
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = combine(1, total, weight, part)
    return total


def scaled(factor: Decimal, nested: Nested) -> Nested:
    """Every entry times the factor."""
    return map_numbers(lambda x: factor * decimal(x), nested)


def map_rows(nested: Nested, function: Any) -> Nested:
    """The function at every list along the last axis; None stays None."""
    if nested is None:
        return None
    if nested and isinstance(nested[0], list):
        return [map_rows(item, function) for item in nested]
    return function(nested)


def _added(row: Nested, bias: Nested | None) -> Nested:
    return row if bias is None else [decimal_like(x, y) for x, y in zip(row, bias, strict=True)]


def decimal_like(x: Number, y: Number) -> Number:
    """The sum, in decimals where either is one."""
    return decimal(x) + decimal(y) if isinstance(x, Decimal) or isinstance(y, Decimal) else x + y
