"""The best convex weights of whole groups of heads (MIX-7) as an ONNX function, for the fidelity test.

A group's error is the squared norm of ``sum_i c_i U_i`` with ``U_i = A_i X' - O``: a quadratic form in k weights on
the simplex. It is lowered by moving weight from the member that gains least to the one that gains most, as far as it
pays; two members need one such step. The number of steps is fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.teacher.body import FLOAT, FUNCTION_DOMAIN, Array32, Body
from shd_ref.teacher.packages import onnx
from shd_ref.teacher.rewrite.rule import MergeRule
from shd_ref.tolerances import degenerate_threshold

_STEPS_PER_MEMBER: Final = 40
"""Enough for float32: tests hold the error to that of the exact optimum."""


def simplex_function(rule: MergeRule, opset: int) -> onnx.FunctionProto:
    """``(probs, values, row_mask, gram of each group) -> merged``; weights by map."""
    body = Body("", opset)
    maps, values = body.op("Cast", "probs", to=FLOAT), body.op("Cast", "values", to=FLOAT)
    inputs, merged = ["probs", "values", "row_mask"], []
    for number, group in enumerate(rule.groups):
        inputs.append(f"gram_{number}")
        of_group = body.op("Gather", maps, body.const(list(group)), axis=1)  # (B, k, L, S)
        if len(group) > 1:
            quadratic, uniform = _quadratic(body, rule, group, of_group, values, f"gram_{number}")
            weights = _descend(body, quadratic, uniform, len(group))
            of_group = body.op("Mul", of_group, body.reshape(weights, 0, 0, 1, 1))
        merged.append(body.reduce_sum(of_group, 1, keepdims=1))
    body.rename(body.concat(merged, 1), "merged")
    name = f"simplex_{rule.num_heads}_to_{len(rule.groups)}_dv{rule.d_v}"
    opsets = [onnx.helper.make_opsetid("", opset)]
    return onnx.helper.make_function(FUNCTION_DOMAIN, name, inputs, ["merged"], body.nodes, opsets)


def group_grams(rule: MergeRule, output_projection: NDArray[np.floating]) -> list[Array32]:
    """Per group ``(k d_v, k d_v)``: products of its rows of W_o."""
    by_head = output_projection.astype(np.float64).reshape(rule.num_heads, rule.d_v, -1)
    rows = [by_head[list(group)].reshape(len(group) * rule.d_v, -1) for group in rule.groups]
    return [(part @ part.T).astype(np.float32) for part in rows]


def _quadratic(
    body: Body, rule: MergeRule, group: Sequence[int], maps: str, values: str, gram: str
) -> tuple[str, str]:
    """``<U_i, U_j>`` over counted rows ``(B, k, k)``, and whether all weights are as good ``(B, 1)``."""
    count, width = len(group), len(group) * rule.d_v
    by_head = body.op("Gather", values, body.const(list(group)), axis=1)  # (B, k, S, d_v)
    by_key = body.op("Transpose", by_head, perm=[0, 2, 1, 3])
    products = body.op("MatMul", maps, body.reshape(by_key, 0, 1, -1, width))  # A_i [V_1 .. V_k]: (B, k, L, E)
    own = np.repeat(np.eye(count, dtype=np.float32), rule.d_v, axis=1)[:, None]  # (k, 1, E)
    output = body.reduce_sum(body.op("Mul", products, body.const(own)), 1, keepdims=1)
    errors = body.op("Sub", products, output)
    counted = body.reshape("row_mask", 0, 1, -1, 1)

    def inner(left: str, right: str) -> str:
        weighed = body.op("Mul", body.op("MatMul", left, gram), counted)
        turned = body.op("Transpose", body.reshape(right, 0, count, -1), perm=[0, 2, 1])
        return body.op("MatMul", body.reshape(weighed, 0, count, -1), turned)  # (B, k, k)

    quadratic = inner(errors, errors)
    diagonal = body.const(np.eye(count, dtype=np.float32))
    norms = body.reduce_sum(body.op("Mul", quadratic, diagonal), 2, keepdims=1)  # (B, k, 1)
    pairs = body.op("Add", norms, body.op("Transpose", norms, perm=[0, 2, 1]))
    distances = body.op("Sub", pairs, body.op("Mul", quadratic, body.const(2.0)))
    farthest = body.reduce_max(body.reshape(distances, 0, count * count))  # (B, 1)
    scale = body.reduce_sum(body.op("Mul", inner(products, products), diagonal), 2)
    least = body.op("Mul", body.reduce_sum(scale, 1, keepdims=1), body.const(degenerate_threshold()))
    return quadratic, body.op("LessOrEqual", farthest, least)


def _descend(body: Body, quadratic: str, uniform: str, count: int) -> str:
    """Weights ``(B, k)`` on the simplex that minimise the quadratic form."""
    even = body.const(np.full((1, count), 1.0 / count, dtype=np.float32))
    zeros = body.op("Mul", body.reduce_sum(quadratic, 2), body.const(0.0))
    start = body.op("Add", zeros, even)
    name = body.op(
        "Loop",
        body.const(np.array(_STEPS_PER_MEMBER * count, dtype=np.int64)),
        "",
        start,
        quadratic,
        body=_step(f"{start}/", body.opset, count),
    )
    # The second state is the form itself, which the step needs.
    body.nodes[-1].output.append(f"{name}_form")
    return body.op("Where", uniform, start, name)


def _step(prefix: str, opset: int, count: int) -> onnx.GraphProto:
    """One move of weight between two members."""
    step = Body(prefix, opset)
    number, go_on, weights, form = (f"{prefix}{name}" for name in ("number", "go_on", "weights", "form"))
    slope = step.reshape(step.op("MatMul", form, step.reshape(weights, 0, count, 1)), 0, count)
    to = _one_hot(step, step.op("ArgMin", slope, axis=1, keepdims=0), count)
    held = step.op("Greater", weights, step.const(0.0))
    least = step.const(np.array(np.finfo(np.float32).min, dtype=np.float32))
    taken = _one_hot(step, step.op("ArgMax", step.op("Where", held, slope, least), axis=1, keepdims=0), count)
    direction = step.op("Sub", to, taken)
    fall = step.reduce_sum(step.op("Mul", direction, slope), 1, keepdims=1)  # (B, 1), at most 0
    bent = step.reshape(step.op("MatMul", form, step.reshape(direction, 0, count, 1)), 0, count)
    curve = step.or_one(step.reduce_sum(step.op("Mul", direction, bent), 1, keepdims=1))
    wanted = step.op("Max", step.op("Div", step.op("Neg", fall), curve), step.const(0.0))
    most = step.reduce_sum(step.op("Mul", weights, taken), 1, keepdims=1)
    moved = step.op("Add", weights, step.op("Mul", step.op("Min", wanted, most), direction))
    kept = step.op("Max", moved, step.const(0.0))
    outputs = [step.op("Identity", go_on), kept, step.op("Identity", form)]
    kinds = {number: onnx.TensorProto.INT64, go_on: onnx.TensorProto.BOOL}
    ranks = {number: 0, go_on: 0, weights: 2, form: 3}
    return onnx.helper.make_graph(
        step.nodes,
        f"{prefix}step",
        [
            onnx.helper.make_tensor_value_info(name, kinds.get(name, FLOAT), [None] * rank)
            for name, rank in ranks.items()
        ],
        [
            onnx.helper.make_tensor_value_info(name, kind, [None] * rank)
            for name, kind, rank in zip(outputs, (onnx.TensorProto.BOOL, FLOAT, FLOAT), (0, 2, 3), strict=True)
        ],
    )


def _one_hot(body: Body, places: str, count: int) -> str:
    values = body.const(np.array([0.0, 1.0], dtype=np.float32))
    return body.op("OneHot", places, body.const(np.array(count, dtype=np.int64)), values)
