"""``squeeze_heads`` as an ONNX model by itself; its other fields (MIX-9) follow by operators around the call."""

from __future__ import annotations

from typing import Final

import numpy as np

from shd_ref.teacher.body import FLOAT, FUNCTION_DOMAIN, Body
from shd_ref.teacher.packages import onnx
from shd_ref.teacher.rewrite.function import (
    MergeRule,
    constant_alphas,
    every_row,
    factors_of_round,
    final_mixing,
    gram_matrices,
    list_rounds,
    membership_of,
    squeeze_function,
)

GRAPH_DTYPES: Final[dict[str, int]] = {
    "float32": FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}
"""What a teacher's maps may be; the function itself computes in float32."""

_IR_VERSION: Final = 8  # the first with model-local functions, for backends of any age
_INT64: Final = onnx.TensorProto.INT64


def build_bare_model(
    rule: MergeRule, *, dtype: str = "float32", masked: bool = False, opset: int = 18
) -> onnx.ModelProto:
    """A model that computes ``squeeze_heads`` by this rule (its ``d_v`` is D), for any batch size and any lengths.

    Inputs: ``teacher_probs`` ``(B, H_t, L, S)``, ``value_outputs`` ``(B, H_t, S, D)`` in float32, cast to ``dtype``
    first, and where ``masked`` ``query_mask``, boolean ``(B, L)``. Outputs: the result's fields, and ``alphas_0``,
    ... by round.
    """
    body = Body("", opset)
    maps, values = (body.op("Cast", name, to=GRAPH_DTYPES[dtype]) for name in ("teacher_probs", "value_outputs"))
    rows = body.op("Cast", "query_mask", to=FLOAT) if masked else every_row(body, maps)
    inputs = [maps]
    if rule.solves:
        # The value outputs are given: V = X, read through an identity for every head.
        identities = np.tile(np.eye(rule.d_v), (rule.num_heads, 1))
        inputs += [values, rows, *(body.weight(gram) for gram in gram_matrices(rule, identities))]
    function = squeeze_function(rule, opset)
    results = body.call(function, inputs)
    alphas, counts = _alphas(body, rule, maps, results)
    mixing = _mixing(body, rule, maps, alphas)
    residual = _residual(body, rule, body.op("Cast", maps, to=FLOAT), body.op("Cast", values, to=FLOAT), mixing, rows)

    per_map = rule.alpha_per == "map"
    body.output(results["merged"], "probs", FLOAT, rank=4)
    body.output(body.reshape(mixing, 0, 0, 0) if per_map else mixing, "mixing", FLOAT, rank=3 if per_map else 4)
    for number, clipped in enumerate(alphas):
        body.output(clipped, f"alphas_{number}", FLOAT, rank=2 if per_map else 3)
    body.output(residual, "residual", FLOAT, rank=1)
    for name, count in zip(("num_clipped", "num_degenerate"), counts, strict=True):
        body.output(count, name, _INT64, rank=0)
    return _assemble(body, function, masked)


def _alphas(body: Body, rule: MergeRule, maps: str, results: dict[str, str]) -> tuple[list[str], tuple[str, str]]:
    """Clipped alphas of each round, ``(B, m)`` or ``(B, m, L)``, and the counts of clipped and degenerate ones."""
    if rule.strategy == "mean" or not rule.rounds:
        raw = None
    else:
        raw = results["alphas"] if rule.solves else constant_alphas(body, rule, maps)
    zero = body.const(np.array(0, dtype=np.int64))
    if raw is None:
        return [], (zero, zero)
    clipped = body.op("Clip", raw, body.const(0.0), body.const(1.0))
    ends = np.cumsum([len(one_round) for one_round in rule.rounds])
    by_round = [
        body.op("Slice", clipped, body.const([int(end) - len(one_round)]), body.const([int(end)]), body.const([1]))
        for end, one_round in zip(ends, rule.rounds, strict=True)
    ]
    if not rule.solves:
        return by_round, (zero, zero)
    outside = body.op("Or", body.op("Less", raw, body.const(0.0)), body.op("Greater", raw, body.const(1.0)))
    first, second = (
        body.op("ReduceSum", body.op("Cast", flags, to=_INT64), keepdims=0)
        for flags in (outside, results["degenerate"])
    )
    return by_round, (first, second)


def _mixing(body: Body, rule: MergeRule, maps: str, alphas: list[str]) -> str:
    """C ``(B, H_s, H_t, 1 or L)``, composed of the rounds' alphas (MIX-13)."""
    constant = final_mixing(rule)
    if constant is None:
        constant = np.eye(rule.num_heads, dtype=np.float32)
    if rule.solves:
        weights = ""
        for one_round, clipped in zip(list_rounds(rule), alphas, strict=True):
            by_row = body.reshape(clipped, 0, 0, 1) if rule.alpha_per == "map" else clipped
            factors = factors_of_round(body, rule, one_round, by_row)  # (B, H_t, 1 or L)
            weights = body.op("Mul", weights, factors) if weights else factors
        weights = body.reshape(weights, 0, 1, rule.num_heads, -1)
    else:
        ones = every_row(body, maps)
        if rule.alpha_per == "map":
            ones = body.op("Slice", ones, body.const([0]), body.const([1]), body.const([1]))
        weights = body.reshape(ones, 0, 1, 1, -1)
    return body.op("Mul", body.const(constant[None, :, :, None]), weights)


def _residual(body: Body, rule: MergeRule, maps: str, values: str, mixing: str, rows: str) -> str:
    """The relative error of the merged attention output at temperature 1 (MIX-8), ``(B,)``."""
    target = body.reduce_sum(body.op("MatMul", maps, values), 1)  # (B, L, D)
    by_row = body.op("Transpose", maps, perm=[0, 2, 1, 3])  # (B, L, H_t, S)
    mixed = body.op("MatMul", body.op("Transpose", mixing, perm=[0, 3, 1, 2]), by_row)  # (B, L, H_s, S)
    member = body.const(membership_of(rule.groups, rule.num_heads))
    sums = body.op("MatMul", member, body.reshape(values, 0, 0, -1))
    merged_values = body.reshape(sums, 0, len(rule.groups), -1, rule.d_v)  # (B, H_s, S, D)
    merged = body.op("MatMul", body.op("Transpose", mixed, perm=[0, 2, 1, 3]), merged_values)
    difference = body.op("Sub", body.reduce_sum(merged, 1), target)
    error, norm = (_norm(body, array, rows) for array in (difference, target))
    vanishes = body.op("Equal", norm, body.const(0.0))
    alone = body.op("And", vanishes, body.op("Greater", error, body.const(0.0)))
    ratio = body.op("Div", error, body.op("Where", vanishes, body.const(1.0), norm))
    return body.op("Where", alone, body.const(float("inf")), ratio)


def _norm(body: Body, array: str, rows: str) -> str:
    """The norm of ``(B, L, D)`` over the rows that count, ``(B,)``."""
    squares = body.op("Mul", body.op("Mul", array, array), body.reshape(rows, 0, -1, 1))
    return body.op("Sqrt", body.reduce_sum(body.reduce_sum(squares, 2), 1))


def _assemble(body: Body, function: onnx.FunctionProto, masked: bool) -> onnx.ModelProto:
    kinds = {"teacher_probs": (FLOAT, 4), "value_outputs": (FLOAT, 4)}
    if masked:
        kinds["query_mask"] = (onnx.TensorProto.BOOL, 2)
    inputs = [
        onnx.helper.make_tensor_value_info(name, elem_type, [None] * rank)
        for name, (elem_type, rank) in kinds.items()
    ]
    graph = onnx.helper.make_graph(body.nodes, function.name, inputs, body.outputs, body.initializers)
    opsets = [onnx.helper.make_opsetid("", body.opset), onnx.helper.make_opsetid(FUNCTION_DOMAIN, 1)]
    return onnx.helper.make_model(
        graph, functions=[function], opset_imports=opsets, ir_version=_IR_VERSION, producer_name="squeezing-heads"
    )
