"""One merge plan as an ONNX function of standard operators, the quantiser at its end.

No value output X is formed D wide: with ``P_i = A_i [V_p | V_q]`` and the Gram matrix ``G`` of the pair's rows of
W_o, ``|| A_i (X_p + X_q) ||^2`` is the sum of ``(P_i G) * P_i``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import SMALLEST_PROB, SQRT8_LEVELS
from shd_ref.errors import graph_unsupported
from shd_ref.merging.plans import MergePlan, merge_pool, plan_groups
from shd_ref.teacher.graph.factors import SiteFactors
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.graph.inputs import Layout
from shd_ref.teacher.opening.body import FLOAT, FUNCTION_DOMAIN, Array32, Body
from shd_ref.teacher.opening.model import onnx
from shd_ref.tolerances import degenerate_threshold

Slots: TypeAlias = Sequence[Sequence[int]]
"""For each head the heads whose values its map is multiplied by, see ``Tiling``."""


@dataclass(frozen=True)
class MergeRule:
    """All that the function of a merge depends on: equal rules share one function."""

    num_heads: int
    d_v: int
    rounds: MergePlan
    strategy: str = "shd"
    temperature: float = 1.0
    codec: str = "float32"
    pooled: bool = False  # over groups of tokens, before coding
    value_heads: tuple[int, ...] = ()  # of each head, the first with the same values, where that is known

    @property
    def name(self) -> str:
        """The function's name: head counts, and d_v where alphas depend on it."""
        return f"squeeze_{self.num_heads}_to_{len(self.groups)}" + (f"_dv{self.d_v}" if self.solves else "")

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The teacher heads behind each student head."""
        return plan_groups(self.rounds, self.num_heads)

    @property
    def solves(self) -> bool:
        """Whether alphas are computed from the values."""
        return self.strategy in ("shd", "hard") and bool(self.rounds)


@dataclass(frozen=True)
class Round:
    """One round of pairs over the pool of that round."""

    pairs: tuple[tuple[int, int], ...]
    pool: tuple[tuple[int, ...], ...]  # teacher heads behind each position

    @property
    def order(self) -> list[int]:
        """Pool positions, pair after pair."""
        return [position for pair in self.pairs for position in pair]

    @property
    def width(self) -> int:
        """Teacher heads in the largest pool position used; smaller ones are padded to it."""
        return max(len(self.pool[position]) for position in self.order)

    def members(self) -> list[list[int]]:
        """The teacher heads behind every position of ``order``, padded by repetition of the first."""
        groups = [self.pool[position] for position in self.order]
        return [[*group, *[group[0]] * (self.width - len(group))] for group in groups]


def list_rounds(rule: MergeRule) -> list[Round]:
    """The rounds, each with the pool that it finds."""
    pool: list[tuple[int, ...]] = [(head,) for head in range(rule.num_heads)]
    rounds = []
    for pairs in rule.rounds:
        rounds.append(Round(pairs, tuple(pool)))
        pool = merge_pool(pool, pairs)
    return rounds


def gram_matrices(rule: MergeRule, output_projection: NDArray[Any]) -> list[Array32]:
    """Per round ``(num_pairs, 2 k d_v, 2 k d_v)``: products of the pairs' rows of W_o, zero where padded."""
    by_head = output_projection.astype(np.float64).reshape(rule.num_heads, rule.d_v, -1)
    grams = []
    for one_round in list_rounds(rule):
        rows = by_head[np.array(one_round.members())]  # (2 m, k, d_v, D)
        for number, position in enumerate(one_round.order):
            rows[number, len(one_round.pool[position]) :] = 0.0
        stacked = rows.reshape(len(one_round.pairs), 2 * one_round.width * rule.d_v, -1)
        grams.append((stacked @ stacked.swapaxes(1, 2)).astype(np.float32))
    return grams


def squeeze_function(rule: MergeRule, opset: int) -> onnx.FunctionProto:
    """``(probs[, values, row_mask, gram of each round][, groups]) -> (codes, merged[, alphas, degenerate])``.

    Of a pooled rule the groups ``(B, l, L)`` come last, and ``row_mask`` is among the inputs; merged maps are pooled.
    """
    body = Body("", opset)
    inputs, outputs = ["probs"], ["codes", "merged"]
    maps = body.op("Cast", "probs", to=FLOAT)
    weights = None
    if rule.solves:
        inputs += ["values", "row_mask", *(f"gram_{number}" for number in range(len(rule.rounds)))]
        outputs += ["alphas", "degenerate"]
        values = body.op("Cast", "values", to=FLOAT)
        weights = _solve(body, rule, functools.partial(_products, body, rule, maps, values))
    elif rule.pooled:
        inputs.append("row_mask")
    inputs += ["groups"] * rule.pooled
    merged, codes = merge_and_code(body, rule, maps, weights)
    body.rename(merged, "merged")
    body.rename(codes, "codes")
    return onnx.helper.make_function(
        FUNCTION_DOMAIN, rule.name, inputs, outputs, body.nodes, [onnx.helper.make_opsetid("", opset)]
    )


def merge_and_code(body: Body, rule: MergeRule, maps: str, weights: str | None) -> tuple[str, str]:
    """Merged maps of some rows, and their codes, from maps in float32 and every head's weight in its group."""
    merged = _mix(body, _soften(body, maps, rule.temperature), final_mixing(rule), weights)
    merged = _pool(body, merged) if rule.pooled else merged
    return merged, _sqrt8_codes(body, merged) if rule.codec == "sqrt8-row" else merged


def _pool(body: Body, maps: str) -> str:
    """Maps ``(B, n, L, L)`` over the tokens of ``groups``, from rows of ``row_mask``: ``(B, n, l, l)`` (TOKEN-9)."""
    counted = body.op("Greater", body.reshape("row_mask", 0, 1, -1, 1), body.const(0.0))
    # Rows of padding may be NaN; NaN elsewhere stays, as its row has weight.
    counted_maps = body.op("Where", counted, maps, body.const(0.0))
    empty = body.op("Equal", body.reduce_sum(counted_maps, -1, keepdims=1), body.const(0.0))
    has_weight = body.op("Cast", body.op("Not", empty), to=FLOAT)  # (B, n, L, 1)
    groups = body.op("Unsqueeze", "groups", body.const([1]))
    shares = body.op("Div", groups, body.or_one(body.reduce_sum(groups, 2, keepdims=1)))
    rows = body.op("Div", body.op("MatMul", groups, counted_maps), body.or_one(body.op("MatMul", groups, has_weight)))
    pooled = body.op("MatMul", rows, body.op("Transpose", shares, perm=[0, 1, 3, 2]))
    mass, pooled_mass = (body.reduce_sum(value, -1, keepdims=1) for value in (rows, pooled))
    return body.op("Mul", body.op("Div", pooled, body.or_one(pooled_mass)), mass)


def final_mixing(rule: MergeRule) -> Array32 | None:
    """The constant part of C ``(H_s, H_t)``: membership, times the weights where they are constant too."""
    if rule.strategy == "mean":
        return np.full((len(rule.groups), rule.num_heads), 1.0 / rule.num_heads, dtype=np.float32)
    if not rule.rounds:
        return None
    mixing = membership_of(rule.groups, rule.num_heads)
    if rule.strategy == "constant":
        for one_round in list_rounds(rule):
            halved = [head for position in one_round.order for head in one_round.pool[position]]
            mixing[:, halved] /= 2
    return mixing


def membership_of(groups: Sequence[Sequence[int]], num_heads: int) -> Array32:
    """``(len(groups), num_heads)``: 1 where the group holds the head."""
    member = np.zeros((len(groups), num_heads), dtype=np.float32)
    for row, group in enumerate(groups):
        member[row, list(group)] = 1.0
    return member


def _mix(body: Body, maps: str, mixing: Array32 | None, weights: str | None) -> str:
    """``sum_t mixing[n, t] weights[t] A_t`` ``(B, n, L, S)``; weights ``(B, H_t, 1)`` or ones."""
    if mixing is None:
        return maps
    num_maps = len(mixing)
    blocks = _diagonal_blocks(mixing)
    num_blocks, _, block_heads = blocks.shape
    left = body.const(blocks)
    if weights is not None:
        left = body.op("Mul", left, body.reshape(weights, 0, num_blocks, 1, block_heads))
    # Matrix products over flattened maps read every map once, for any set of mixed heads.
    mixed = body.op("MatMul", left, body.reshape(maps, 0, num_blocks, block_heads, -1))
    rows = body.sizes(maps, 2)
    shape = body.op("Concat", body.const([0, num_maps]), rows, body.const([-1]), axis=0)
    return body.op("Reshape", mixed, shape)


def _diagonal_blocks(mixing: Array32) -> Array32:
    """A mixing as ``(n, 1, H_t / n)`` where neighbours mix, a third faster, else ``(1, n, H_t)``."""
    num_maps, num_heads = mixing.shape
    if num_heads % num_maps == 0:
        by_block = mixing.reshape(num_maps, num_maps, -1)
        diagonal = by_block[range(num_maps), range(num_maps)][:, None]  # (n, 1, H_t / n)
        if np.count_nonzero(diagonal) == np.count_nonzero(mixing):
            return diagonal
    return mixing[None]


def alphas_function(rule: MergeRule, slots: Slots, opset: int) -> onnx.FunctionProto:
    """``(sums, row_mask, gram of each round) -> (alphas, degenerate, weights)``, from products in place of maps.

    ``sums`` ``(B, H, L, W)`` are products of each head's map with the values of its ``slots``; the weights
    ``(B, H, 1)`` are those of each head in its group.
    """
    body = Body("", opset)
    inputs = ["sums", "row_mask", *(f"gram_{number}" for number in range(len(rule.rounds)))]
    body.rename(_solve(body, rule, functools.partial(_products_of_sums, body, rule, slots)), "weights")
    return onnx.helper.make_function(
        FUNCTION_DOMAIN,
        f"alphas_{rule.name}",
        inputs,
        ["alphas", "degenerate", "weights"],
        body.nodes,
        [onnx.helper.make_opsetid("", opset)],
    )


def _products_of_sums(body: Body, rule: MergeRule, slots: Slots, one_round: Round, weights: str) -> str:
    """The result of ``_products``, mixed from products of single heads' maps; only these have so few numbers."""
    width = 2 * one_round.width
    members = one_round.members()
    by_head: dict[int, list[int]] = {}  # the heads whose values a head's map is to meet in this round
    for number, position in enumerate(one_round.order):
        pair = members[number - number % 2] + members[number - number % 2 + 1]
        by_head |= dict.fromkeys(one_round.pool[position], pair)
    places = [
        head * len(slots[head]) + list(slots[head]).index(rule.value_heads[other] if rule.value_heads else other)
        for head in range(rule.num_heads)
        for other in by_head.get(head, [head] * width)
    ]
    split = body.reshape("sums", 0, 0, -1, len(slots[0]), rule.d_v)
    by_slot = body.op("Transpose", split, perm=[0, 1, 3, 2, 4])  # (B, H, slots, L, d_v)
    shape = body.concat([body.const([0, -1]), body.sizes(split, 2), body.const([rule.d_v])], 0)
    taken = body.op("Gather", body.op("Reshape", by_slot, shape), body.const(places), axis=1)
    aligned = body.op("Transpose", body.reshape(taken, 0, rule.num_heads, width, -1, rule.d_v), perm=[0, 1, 3, 2, 4])
    products = body.reshape(aligned, 0, 0, -1, width * rule.d_v)  # (B, H, L, E)
    if weights:
        selected = [one_round.pool[position] for position in one_round.order]
        paired = _mix(body, products, membership_of(selected, rule.num_heads), weights)
    else:
        paired = _take_heads(body, products, one_round.order, rule.num_heads)
    return body.reshape(paired, 0, len(one_round.pairs), -1, width * rule.d_v)


def _solve(body: Body, rule: MergeRule, products_of: Callable[[Round, str], str]) -> str:
    """Run the rounds: name ``alphas`` and ``degenerate``, and return every teacher head's weight in its group."""
    weights = ""
    alphas, degenerate = [], []
    for number, one_round in enumerate(list_rounds(rule)):
        products = products_of(one_round, weights)
        raw, is_degenerate = _alphas(body, rule, _moments(body, rule, one_round, products, f"gram_{number}"))
        factors = factors_of_round(body, rule, one_round, body.op("Clip", raw, body.const(0.0), body.const(1.0)))
        weights = body.op("Mul", weights, factors) if weights else factors
        alphas.append(raw)
        degenerate.append(is_degenerate)
    body.rename(body.reshape(body.concat(alphas, 1), 0, -1), "alphas")
    body.rename(body.reshape(body.concat(degenerate, 1), 0, -1), "degenerate")
    return weights


def _take_heads(body: Body, tensor: str, heads: Sequence[int], num_heads: int) -> str:
    if list(heads) == list(range(num_heads)):
        return tensor
    if list(heads) == list(range(heads[0], heads[0] + len(heads))):
        return body.op("Slice", tensor, body.const([heads[0]]), body.const([heads[-1] + 1]), body.const([1]))
    return body.op("Gather", tensor, body.const(list(heads)), axis=1)


def _products(body: Body, rule: MergeRule, maps: str, values: str, one_round: Round, weights: str) -> str:
    """``A_p [V_p | V_q]`` above ``A_q [V_p | V_q]`` for every pair: ``(B, m, 2 L, E)`` with ``E = 2 k d_v``."""
    if not weights:
        paired = _take_heads(body, maps, one_round.order, rule.num_heads)
    else:
        selected = [one_round.pool[position] for position in one_round.order]
        paired = _mix(body, maps, membership_of(selected, rule.num_heads), weights)
    num_pairs, num_members = len(one_round.pairs), 2 * one_round.width
    members = [head for group in one_round.members() for head in group]
    by_pair = body.reshape(
        _take_heads(body, values, members, rule.num_heads), 0, num_pairs, num_members, -1, rule.d_v
    )
    by_key = body.op("Transpose", by_pair, perm=[0, 1, 3, 2, 4])  # (B, m, S, 2 k, d_v)
    pair_values = body.reshape(by_key, 0, num_pairs, -1, num_members * rule.d_v)  # (B, m, S, E)
    return body.op("MatMul", body.reshape(paired, 0, num_pairs, -1, 0), pair_values)


def _moments(body: Body, rule: MergeRule, one_round: Round, products: str, gram: str) -> str:
    """Numerator, denominator and scale of alphas, from sums and differences of products: ``(B, m, 1, 3)``."""
    num_pairs, width = len(one_round.pairs), 2 * one_round.width * rule.d_v
    both = body.const(np.array([[1.0, 1.0], [1.0, -1.0]], dtype=np.float32))
    turned = body.op("MatMul", both, body.reshape(products, 0, num_pairs, 2, -1))  # sums, differences
    by_row = body.reshape(turned, 0, num_pairs, -1, width)  # (B, m, 2 L, E)
    in_metric = body.op("MatMul", by_row, gram)
    terms = body.reshape(body.op("Mul", in_metric, by_row), 0, num_pairs, 2, -1, width)  # (B, m, 2, L, E)
    totals = body.op("MatMul", body.reshape("row_mask", 0, 1, 1, 1, -1), terms)  # (B, m, 2, 1, E)
    # Which columns of sums and differences make the numerator, the denominator and the scale.
    pick = np.zeros((2, width, 3), dtype=np.float32)
    pick[1, : width // 2, 0] = 1.0  # u = (A_p - A_q) V_p is the first half of a difference
    pick[1, :, 1] = 1.0
    pick[:, :, 2] = 0.5
    return body.op("MatMul", body.reshape(totals, 0, num_pairs, 1, 2 * width), body.const(pick.reshape(-1, 3)))


def _alphas(body: Body, rule: MergeRule, moments: str) -> tuple[str, str]:
    """Raw alphas and whether they are degenerate, ``(B, m, 1)``."""
    numerator, denominator, scale = (
        body.op("Gather", moments, body.const(np.array(moment)), axis=3) for moment in range(3)
    )
    # Where value outputs cancel, rounding leaves the scale below 0, and the quotient of two zeros (GRAM-7).
    least = body.op("Mul", body.op("Max", scale, body.const(0.0)), body.const(degenerate_threshold()))
    # NaN is not degenerate, so a broken teacher shows in its alphas.
    degenerate = body.op("LessOrEqual", denominator, least)
    quotient = body.op("Div", numerator, body.op("Where", degenerate, body.const(1.0), denominator))
    raw = body.op("Where", degenerate, body.const(0.5), quotient)
    if rule.strategy == "hard":
        nearer_p = body.op("GreaterOrEqual", raw, body.const(0.5))
        # Times zero, not zero: NaN stays NaN.
        raw = body.op("Where", nearer_p, body.const(1.0), body.op("Mul", raw, body.const(0.0)))
    return raw, degenerate


def factors_of_round(body: Body, rule: MergeRule, one_round: Round, alphas: str) -> str:
    """The factors of every teacher head's weight in this round: alpha, 1 - alpha or 1; ``(B, H_t, 1)``."""
    slope = np.zeros((rule.num_heads, len(one_round.pairs)), dtype=np.float32)
    offset = np.ones((rule.num_heads, 1), dtype=np.float32)
    for number, (p, q) in enumerate(one_round.pairs):
        slope[list(one_round.pool[p]), number] = 1.0
        slope[list(one_round.pool[q]), number] = -1.0
        offset[list(one_round.pool[p])] = 0.0
    return body.op("Add", body.op("MatMul", body.const(slope), alphas), body.const(offset))


def _soften(body: Body, maps: str, temperature: float) -> str:
    if temperature == 1.0:
        return maps
    relative = body.op("Div", maps, body.or_one(body.reduce_max(maps)))
    powers = body.op("Pow", relative, body.const(1.0 / temperature))
    return body.op("Div", powers, body.or_one(body.reduce_sum(powers, -1, keepdims=1)))


def _sqrt8_codes(body: Body, maps: str) -> str:
    """The quantiser of the codec ``sqrt8-row``, operation by operation as ``shd_ref.cache.codecs.codecs`` does it."""
    relative = body.op("Div", maps, body.or_one(body.reduce_max(maps)))
    levels = body.op("Mul", body.op("Sqrt", relative), body.const(float(SQRT8_LEVELS)))
    # A scale of one: rounds half to even and saturates in a single pass.
    codes = body.op("QuantizeLinear", levels, body.const(1.0), body.const(np.array(0, dtype=np.uint8)))
    at_least_one = body.op("Clip", codes, body.const(np.array(1, dtype=np.uint8)))
    positive = body.op("GreaterOrEqual", maps, body.const(SMALLEST_PROB))
    return body.op("Where", positive, at_least_one, body.const(np.array(0, dtype=np.uint8)))


def constant_alphas(body: Body, rule: MergeRule, probs: str) -> str:
    """Alphas that need no solving: 1/2 for every pair, or none at all."""
    num_pairs = 0 if rule.strategy == "mean" else sum(len(one_round) for one_round in rule.rounds)
    sizes = [body.sizes(probs, 0), body.const([num_pairs])]
    half = onnx.numpy_helper.from_array(np.full(1, 0.5, dtype=np.float32))
    return body.op("ConstantOfShape", body.concat(sizes, 0), value=half)


def every_row(body: Body, probs: str) -> str:
    """A row mask ``(B, L)`` of ones."""
    shape = body.sizes(probs, 0, 2)
    return body.op("ConstantOfShape", shape, value=onnx.numpy_helper.from_array(np.ones(1, np.float32)))


def batch_heads(body: Body, tensor: str, layout: Layout | None, num_heads: int) -> str:
    """A map, V, queries or keys with the leading axes ``(B, H)``, from any layout."""
    if layout in ("batch-folded", "heads-folded"):
        sizes = [-1, num_heads] if layout == "batch-folded" else [num_heads, -1]
        inner = body.sizes(tensor, 1, 2)
        tensor = body.op("Reshape", tensor, body.op("Concat", body.const(sizes), inner, axis=0))
    if layout in ("heads-batch", "heads-folded"):
        return body.op("Transpose", tensor, perm=[1, 0, 2, 3])
    return tensor


def site_tensors(body: Body, site: AttentionSite) -> tuple[str, str]:
    """The map ``(B, H, L, S)`` and V ``(B, H, S, d_v)`` of a supported site."""
    return batch_heads(body, site.probs, site.layout, site.num_heads or 1), values_of(body, site)


def values_of(body: Body, site: AttentionSite) -> str:
    """V ``(B, H, S, d_v)`` of a supported site."""
    heads = site.num_heads or 1
    values = batch_heads(body, site.values, site.layout, heads)
    if site.shared_values:
        values = body.op("Expand", values, body.const([1, heads, 1, 1]))
    if site.joined_values:
        by_key = body.reshape(body.op("Transpose", values, perm=[0, 2, 1, 3]), 0, 1, -1, site.d_v or 0)
        values = body.op("Expand", by_key, body.const([1, heads, 1, 1]))
    return values


def spans_of(body: Body, seen: str) -> str:
    """First, last and number of the keys that rows see ``(..., S)``, int64 ``(..., 3)``; 0, S - 1 and 0 of none."""
    marks = body.op("Cast", seen, to=onnx.TensorProto.UINT8)
    ends = [body.op("ArgMax", marks, axis=-1, keepdims=1, select_last_index=last) for last in (0, 1)]
    count = body.reduce_sum(body.op("Cast", seen, to=FLOAT), -1, keepdims=1)
    return body.concat([*ends, body.op("Cast", count, to=onnx.TensorProto.INT64)], -1)


def add_factors(body: Body, factors: SiteFactors) -> tuple[str, str]:
    """Append nodes that give queries ``(B, H, L, d)`` and keys ``(B, H_kv, S, d)`` in float32."""
    site = factors.site
    if not factors.supported:
        raise graph_unsupported(f"site {site.name} cannot be stored as queries and keys: {factors.reason}")
    queries = body.op("Cast", factors.queries, to=FLOAT)
    for op_type, multiplier in factors.multipliers:
        queries = body.op(op_type, queries, body.op("Cast", multiplier, to=FLOAT))
    keys = body.op("Cast", factors.keys, to=FLOAT)
    heads = site.num_heads or 1
    shared = factors.layout in ("batch-heads", "heads-batch") and factors.num_kv_heads == 1 and not factors.key_heads
    queries = batch_heads(body, queries, factors.layout, heads)
    keys = batch_heads(body, keys, factors.layout, 1 if shared else heads)
    if factors.keys_transposed:
        keys = body.op("Transpose", keys, perm=[0, 1, 3, 2])
    if factors.key_heads:
        keys = body.op("Gather", keys, body.const(list(factors.key_heads)), axis=1)
    return queries, keys
