"""The oracle of chapter IDX: an indexer's target, loss and gradients, in plain loops from its sentences."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from exact import MINUS_INFINITY, Nested, Number, broadcast, decimal, dot, shape_of, zeros

ZERO = Decimal(0)


@dataclass
class Teacher:
    """The logits of each layer and who may attend."""

    layers: list[list[list[list[list[Number | None]]]]]  # layer, sample, head, row, key: None where not allowed
    outside: list[Nested | None]
    may: Nested  # sample, row, key
    groups: int
    block_size: int

    @property
    def blocks(self) -> list[range]:
        """The keys of each block (IDX-4)."""
        keys = len(self.may[0][0])
        return [range(c, min(c + self.block_size, keys)) for c in range(0, keys, self.block_size)]

    def row(self, b: int, g: int, t: int, chosen: list[int] | None) -> list[Decimal]:
        """p of one row (IDX-6 to -9); each head over the chosen blocks alone where they are given."""
        inside = {k for c in chosen for k in self.blocks[c]} if chosen is not None else None
        total = [ZERO] * len(self.blocks)
        for layer, rest in zip(self.layers, self.outside, strict=True):
            heads = len(layer[b])
            members = range(g * heads // self.groups, (g + 1) * heads // self.groups)
            exps, lost = {}, {}
            for h in members:
                logits = layer[b][h][t]
                exps[h] = [
                    decimal(z).exp() if z is not None and (inside is None or k in inside) else ZERO
                    for k, z in enumerate(logits)
                ]
                other = MINUS_INFINITY if rest is None else rest[b][h][t]
                lost[h] = ZERO if other == MINUS_INFINITY else decimal(other).exp()
            rho = {h: sum(exps[h]) / (sum(exps[h]) + lost[h]) for h in members if sum(exps[h]) > 0}
            if not rho:
                continue
            whole = sum(rho.values())
            for c, keys in enumerate(self.blocks):
                mass = sum((rho[h] * exps[h][k] / sum(exps[h]) for h in rho for k in keys), ZERO)
                total[c] += mass / whole / len(self.layers)
        return total


def read_teacher(
    teacher_queries: Nested,
    teacher_keys: Nested,
    *,
    teacher_scale: Number,
    groups: int = 1,
    block_size: int = 1,
    attn_mask: Nested = None,
    segments: Nested = None,
    outside: Nested = None,
) -> Teacher:
    """IDX-5, IDX-6."""
    single = len(shape_of(teacher_queries)) == 4
    queries, keys = ([teacher_queries], [teacher_keys]) if single else (teacher_queries, teacher_keys)
    rests = [None] * len(queries) if outside is None else [outside] if single else outside
    batch, _, rows, _ = shape_of(queries[0])
    columns = shape_of(keys[0])[2]
    mask = broadcast(True if attn_mask is None else attn_mask, [batch, 1, rows, columns])
    may = [
        [
            [mask[b][0][t][k] and (segments is None or segments[b][t] == segments[b][k]) for k in range(columns)]
            for t in range(rows)
        ]
        for b in range(batch)
    ]
    layers = []
    for q, k in zip(queries, keys, strict=True):
        share = len(q[0]) // len(k[0])
        layers.append(
            [
                [
                    [
                        [
                            teacher_scale * dot(row, key) if may[b][t][j] else None
                            for j, key in enumerate(k[b][h // share])
                        ]
                        for t, row in enumerate(head)
                    ]
                    for h, head in enumerate(sample)
                ]
                for b, sample in enumerate(q)
            ]
        )
    return Teacher(layers, list(rests), may, groups, block_size)


def indexer_target(teacher_queries: Nested, teacher_keys: Nested, **options: Any) -> Nested:
    """Every row; a zero that is exact (no key allowed) stays a fraction."""
    teacher = read_teacher(teacher_queries, teacher_keys, **options)
    return [
        [
            [[x if x != 0 else Fraction(0) for x in teacher.row(b, g, t, None)] for t in range(len(teacher.may[b]))]
            for g in range(teacher.groups)
        ]
        for b in range(len(teacher.may))
    ]


@dataclass
class Term:
    """One row and group that counts: p and log q by block, and the blocks of the scorer's distribution."""

    place: tuple[int, int, int]
    p: list[Decimal]
    log_q: dict[int, Decimal]


def _terms(queries: Nested, keys: Nested, teacher: Teacher, options: dict[str, Any]) -> tuple[list[Term], Decimal]:
    """The terms that count (IDX-1, -2, -10 to -12), and what their sum is divided by (IDX-13)."""
    top_k, way = options.get("top_k"), options.get("restriction", "renormalised")
    counts, segments, loss_mask = [], options.get("segments"), options.get("loss_mask")
    for b, sample in enumerate(teacher.may):
        for g in range(teacher.groups):
            for t, may in enumerate(sample):
                open_blocks = [c for c, block in enumerate(teacher.blocks) if any(may[k] for k in block)]
                scores = {c: _score(queries, keys, teacher.groups, options, (b, g, t), c) for c in open_blocks}
                best = [c for _, c in sorted((-scores[c], c) for c in open_blocks)]
                chosen = open_blocks if top_k is None else best[:top_k]
                first = way == "mask_first" and top_k is not None
                p = [
                    x if c in chosen else ZERO for c, x in enumerate(teacher.row(b, g, t, chosen if first else None))
                ]
                if sum(p) == 0 or (loss_mask is not None and not loss_mask[b][t]):
                    continue
                if top_k is not None and way in ("renormalised", "student_all"):
                    p = [x / sum(p) for x in p]
                support = open_blocks if way == "student_all" or top_k is None else chosen
                shift = sum((decimal(scores[c]).exp() for c in support), ZERO).ln()
                counts.append(Term((b, g, t), p, {c: decimal(scores[c]) - shift for c in support}))
    samples = {(one.place[0], segments[one.place[0]][one.place[2]] if segments else 0) for one in counts}
    number = {"sum": 1, "rows": len(counts), "samples": len(samples)}[options.get("reduction", "sum")]
    return counts, Decimal(max(number, 1))


def _heads_of(queries: Nested, groups: int, g: int) -> range:
    heads = len(queries[0])
    return range(g * heads // groups, (g + 1) * heads // groups)


def _product(queries: Nested, keys: Nested, b: int, h: int, t: int, c: int) -> Number:
    share = len(queries[0]) // len(keys[0])
    return dot(queries[b][h][t], keys[b][h // share][c])


def _score(
    queries: Nested, keys: Nested, groups: int, options: dict[str, Any], place: tuple[int, int, int], c: int
) -> Number:
    b, g, t = place
    total: Number = Fraction(0)
    for h in _heads_of(queries, groups, g):
        x = _product(queries, keys, b, h, t, c)
        weight = options["weights"][b][h][t] if options.get("weights") else Fraction(1)
        total += weight * (max(x, Fraction(0)) if options.get("relu", True) else x)
    return options["scale"] * total


_OF_TARGET = ("teacher_scale", "groups", "block_size", "attn_mask", "segments", "outside")


def _teacher_of(teacher_queries: Nested, teacher_keys: Nested, options: dict[str, Any]) -> Teacher:
    return read_teacher(teacher_queries, teacher_keys, **{k: v for k, v in options.items() if k in _OF_TARGET})


def indexer_loss(
    queries: Nested, keys: Nested, teacher_queries: Nested, teacher_keys: Nested, **options: Any
) -> Decimal:
    """IDX-12, IDX-13."""
    terms, divisor = _terms(queries, keys, _teacher_of(teacher_queries, teacher_keys, options), options)
    total = ZERO
    for term in terms:
        total += sum((x * (x.ln() - term.log_q[c]) for c, x in enumerate(term.p) if x != 0), ZERO)
    return total / divisor


def indexer_loss_gradient(
    queries: Nested, keys: Nested, teacher_queries: Nested, teacher_keys: Nested, **options: Any
) -> tuple[Nested, Nested, Nested]:
    """IDX-14."""
    teacher = _teacher_of(teacher_queries, teacher_keys, options)
    terms, divisor = _terms(queries, keys, teacher, options)
    relu, share = options.get("relu", True), len(queries[0]) // len(keys[0])
    dq, dk, dw = zeros(shape_of(queries)), zeros(shape_of(keys)), zeros(shape_of(queries)[:3])
    for term in terms:
        b, g, t = term.place
        for c, log_q in term.log_q.items():
            slope = (sum(term.p) * log_q.exp() - term.p[c]) / divisor * decimal(options["scale"])
            for h in _heads_of(queries, teacher.groups, g):
                x = _product(queries, keys, b, h, t, c)
                is_on = x > 0 or not relu
                dw[b][h][t] = decimal(dw[b][h][t]) + slope * decimal(x if is_on else 0)
                if not is_on:
                    continue
                through = slope * decimal(options["weights"][b][h][t] if options.get("weights") else 1)
                for i, k in enumerate(keys[b][h // share][c]):
                    dq[b][h][t][i] = decimal(dq[b][h][t][i]) + through * decimal(k)
                    dk[b][h // share][c][i] = decimal(dk[b][h // share][c][i]) + through * decimal(
                        queries[b][h][t][i]
                    )
    return dq, dk, dw
