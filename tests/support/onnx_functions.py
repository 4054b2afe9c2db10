"""The generated ONNX functions as an implementation that ``shd_ref.conformance`` can judge.

For arrays that a graph's caller must refuse, it says that the operation is missing: it does not play the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import ROW_SUMS, check_option, check_temperature
from shd_ref.errors import ShdError, argument_value
from shd_ref.merging.alpha import ALPHA_RULES
from shd_ref.merging.mixing import ALPHA_FROM, STRATEGIES, check_teacher
from shd_ref.merging.plans import merge_plan
from shd_ref.teacher.opening.body import FLOAT, FUNCTION_DOMAIN, Body
from shd_ref.teacher.opening.model import onnx
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
from shd_ref.teacher.session import open_session

BACKENDS: Final[tuple[str, ...]] = ("onnxruntime", "onnx.reference")
"""What may run the graphs: onnxruntime on the CPU, or ONNX's own reference evaluator."""

GRAPH_DTYPES: Final[dict[str, int]] = {
    "float32": FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}
"""What a teacher's maps may be; the function itself computes in float32."""

_IR_VERSION: Final = 8  # the first with model-local functions, for backends of any age
_INT64: Final = onnx.TensorProto.INT64
_Run: TypeAlias = Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class GraphCall:
    """A call of ``squeeze_heads`` as a graph, by its rule, and the graph's inputs by name."""

    rule: MergeRule
    feeds: dict[str, NDArray[Any]]

    def build_model(self, *, dtype: str = "float32", opset: int = 18) -> onnx.ModelProto:
        """The model, see ``build_bare_model``."""
        return build_bare_model(self.rule, dtype=dtype, masked="query_mask" in self.feeds, opset=opset)


def make_call(
    teacher_probs: ArrayLike,
    value_outputs: ArrayLike,
    num_student_heads: int,
    *,
    plan: str | Iterable[Iterable[Sequence[int]]] | None = None,
    strategy: str = "shd",
    query_mask: ArrayLike | None = None,
    temperature: float = 1.0,
    alpha_rule: str = "least_squares",
    alpha_from: str = "teacher",
    row_sums: str = "one",
) -> GraphCall:
    """The graph of a call of ``shd_ref.squeeze_heads``; ``NotImplementedError`` where that is not the graph's."""
    check_option("strategy", strategy, STRATEGIES, "MIX-2")
    check_option("alpha_rule", alpha_rule, ALPHA_RULES, "ALPHA-4")
    check_option("alpha_from", alpha_from, ALPHA_FROM, "TEMP-3")
    check_option("row_sums", row_sums, ROW_SUMS, "MAP-9")
    temperature = check_temperature(temperature)
    feeds = _check_arrays(teacher_probs, value_outputs, query_mask, row_sums)
    num_heads = feeds["teacher_probs"].shape[1]
    rounds = merge_plan(num_heads, num_student_heads, "progressive" if plan is None else plan)
    if temperature != 1.0 and alpha_from == "softened":
        raise NotImplementedError("the function solves alphas on the maps as given, before temperature")
    if temperature != 1.0 and row_sums == "at_most_one":
        raise NotImplementedError("the function softens rows that sum to one, and does not keep a row's mass")
    width = feeds["value_outputs"].shape[3]
    return GraphCall(MergeRule(num_heads, width, rounds, strategy, alpha_rule, temperature), feeds)


class OnnxAdapter:
    """``squeeze_heads`` and ``solve_alpha`` as ONNX graphs, for the judge; see ``shd_ref.conformance.Adapter``.

    ``python -m shd_ref.conformance --impl support.onnx_functions:OnnxAdapter --dtype float32`` judges them in
    onnxruntime. Models are built once for each set of options, number of heads and width.

    Args:
        backend: one of ``BACKENDS``; ``argument-value`` for another.
    """

    def __init__(self, backend: str = "onnxruntime") -> None:
        if backend not in BACKENDS:
            raise argument_value(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
        self.backend = backend
        self._runs: dict[tuple[Any, ...], _Run] = {}

    def run_operation(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Any:
        """Run an operation of ``specs/shd.md``; ``dtype`` is that of maps and value outputs in the graph."""
        if dtype not in GRAPH_DTYPES:
            raise NotImplementedError(f"the functions compute in float32, which is too narrow for {dtype}")
        if operation == "squeeze_heads":
            return self._squeeze_heads(dtype, **inputs)
        if operation == "solve_alpha":
            return self._solve_alpha(dtype, **inputs)
        raise NotImplementedError(f"there is no ONNX function for {operation}")

    def _squeeze_heads(self, dtype: str, **inputs: Any) -> dict[str, Any]:
        call = make_call(**inputs)
        key = call.rule, "query_mask" in call.feeds, dtype  # a model's batch size and lengths are free
        if key not in self._runs:
            model, is_runtime = call.build_model(dtype=dtype), self.backend == "onnxruntime"
            session = open_session(model, num_threads=1) if is_runtime else onnx.reference.ReferenceEvaluator(model)
            names = [output.name for output in model.graph.output]
            self._runs[key] = lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))
        outputs = self._runs[key](call.feeds)
        return {
            "probs": outputs["probs"],
            "mixing": outputs["mixing"],
            "alphas": tuple(outputs[f"alphas_{n}"] for n in range(len(call.rule.rounds)) if f"alphas_{n}" in outputs),
            "residual": outputs["residual"],
            "num_clipped": int(outputs["num_clipped"]),
            "num_degenerate": int(outputs["num_degenerate"]),
            "plan": call.rule.rounds,
        }

    def _solve_alpha(
        self,
        dtype: str,
        probs_p: ArrayLike,
        probs_q: ArrayLike,
        value_outputs_p: ArrayLike,
        value_outputs_q: ArrayLike,
        *,
        query_mask: ArrayLike | None = None,
        rule: str = "least_squares",
        row_sums: str = "one",
    ) -> NDArray[Any]:
        squeezed = self._squeeze_heads(
            dtype,
            teacher_probs=_stack(probs_p, probs_q),
            value_outputs=_stack(value_outputs_p, value_outputs_q),
            num_student_heads=1,
            query_mask=query_mask,
            alpha_rule=rule,
            row_sums=row_sums,
        )
        alpha: NDArray[Any] = squeezed["alphas"][0][:, 0]
        return alpha


def _check_arrays(
    teacher_probs: ArrayLike, value_outputs: ArrayLike, query_mask: ArrayLike | None, row_sums: str
) -> dict[str, NDArray[Any]]:
    try:
        probs, outputs, mask = check_teacher(teacher_probs, value_outputs, query_mask, row_sums=row_sums)
    except ShdError as error:
        raise NotImplementedError(f"a graph does not check its inputs ({error.code} is its caller's)") from error
    feeds: dict[str, NDArray[Any]] = {
        "teacher_probs": probs.astype(np.float32),
        "value_outputs": outputs.astype(np.float32),
    }
    return feeds if mask is None else {**feeds, "query_mask": mask}


def _stack(first: ArrayLike, second: ArrayLike) -> NDArray[Any]:
    """Two heads as one array; two that cannot be one are for their caller to refuse, as in ``_check_arrays``."""
    arrays = [np.asarray(first), np.asarray(second)]
    if arrays[0].shape != arrays[1].shape or arrays[0].ndim != 3:
        raise NotImplementedError("a graph does not check its inputs (argument-shape is its caller's)")
    if arrays[0].dtype != arrays[1].dtype:
        raise NotImplementedError("a graph does not check its inputs (argument-dtype is its caller's)")
    return np.stack(arrays, axis=1)


def build_bare_model(
    rule: MergeRule, *, dtype: str = "float32", masked: bool = False, opset: int = 18
) -> onnx.ModelProto:
    """A model from ``teacher_probs``, ``value_outputs`` and perhaps ``query_mask`` to the result's fields."""
    body = Body("", opset)
    maps, values = (body.op("Cast", name, to=GRAPH_DTYPES[dtype]) for name in ("teacher_probs", "value_outputs"))
    rows = body.op("Cast", "query_mask", to=FLOAT) if masked else every_row(body, maps)
    inputs = [maps]
    if rule.solves:
        # The value outputs are given: V = X, read through an identity for every head.
        identities = np.tile(np.eye(rule.d_v), (rule.num_heads, 1))
        inputs += [values, rows, *(body.weight(gram) for gram in gram_matrices(rule, identities))]
    function = squeeze_function(rule, opset)
    results = body.call(rule, lambda: function, inputs)
    alphas, counts = _alphas(body, rule, maps, results)
    mixing = _mixing(body, rule, maps, alphas)
    residual = _residual(body, rule, body.op("Cast", maps, to=FLOAT), body.op("Cast", values, to=FLOAT), mixing, rows)

    body.output(results["merged"], "probs", FLOAT, rank=4)
    body.output(body.reshape(mixing, 0, 0, 0), "mixing", FLOAT, rank=3)
    for number, clipped in enumerate(alphas):
        body.output(clipped, f"alphas_{number}", FLOAT, rank=2)
    body.output(residual, "residual", FLOAT, rank=1)
    for name, count in zip(("num_clipped", "num_degenerate"), counts, strict=True):
        body.output(count, name, _INT64, rank=0)
    return _assemble(body, function, masked)


def _alphas(body: Body, rule: MergeRule, maps: str, results: dict[str, str]) -> tuple[list[str], tuple[str, str]]:
    """Clipped alphas of each round, ``(B, m)``, and the counts of clipped and degenerate ones."""
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
    """C ``(B, H_s, H_t, 1)``, composed of the rounds' alphas (MIX-13)."""
    constant = final_mixing(rule)
    if constant is None:
        constant = np.eye(rule.num_heads, dtype=np.float32)
    if rule.solves:
        weights = ""
        for one_round, clipped in zip(list_rounds(rule), alphas, strict=True):
            factors = factors_of_round(body, rule, one_round, body.reshape(clipped, 0, 0, 1))  # (B, H_t, 1)
            weights = body.op("Mul", weights, factors) if weights else factors
        weights = body.reshape(weights, 0, 1, rule.num_heads, -1)
    else:
        ones = body.op("Slice", every_row(body, maps), body.const([0]), body.const([1]), body.const([1]))
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
