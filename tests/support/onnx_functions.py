"""The generated ONNX functions as an implementation that ``shd_ref.conformance`` can judge.

For arrays that a graph's caller must refuse, it says that the operation is missing: it does not play the caller.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import ROW_SUMS, check_temperature
from shd_ref.errors import ShdError
from shd_ref.integers import check_option
from shd_ref.merging.alpha import ALPHA_RULES
from shd_ref.merging.mixing import ALPHA_FROM, STRATEGIES, check_teacher, compose_mixing
from shd_ref.merging.plans import merge_plan
from shd_ref.teacher.opening.body import FLOAT, FUNCTION_DOMAIN, Body
from shd_ref.teacher.opening.model import onnx
from shd_ref.teacher.rewrite.function import (
    MergeRule,
    every_row,
    final_mixing,
    gram_matrices,
    membership_of,
    squeeze_function,
)
from shd_ref.teacher.session import open_session

GRAPH_DTYPES: Final[dict[str, int]] = {
    "float32": FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}
"""What a teacher's maps may be; the function itself computes in float32."""

_OPSET: Final = 18
_IR_VERSION: Final = 8  # the first with model-local functions, for backends of any age
_Run: TypeAlias = Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class GraphCall:
    """A call of ``squeeze_heads`` as a graph, by its rule, and the graph's inputs by name."""

    rule: MergeRule
    feeds: dict[str, NDArray[Any]]


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
    if alpha_rule != "least_squares":
        raise NotImplementedError("the function solves alphas by least squares alone")
    return GraphCall(MergeRule(num_heads, width, rounds, strategy, temperature), feeds)


class OnnxAdapter:
    """``squeeze_heads`` and ``solve_alpha`` as ONNX graphs, for the judge.

    ``python -m shd_ref.conformance --impl support.onnx_functions:OnnxAdapter --dtype float32`` judges them in
    onnxruntime. Models are built once for each set of options, number of heads and width.

    Args:
        backend: onnxruntime on the CPU, or ONNX's own evaluator, ``onnx.reference``.
    """

    def __init__(self, backend: str = "onnxruntime") -> None:
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
        masked = "query_mask" in call.feeds
        key = call.rule, masked, dtype  # a model's batch size and lengths are free
        if key not in self._runs:
            model, is_runtime = build_model(call.rule, dtype, masked=masked), self.backend == "onnxruntime"
            session = open_session(model, num_threads=1) if is_runtime else onnx.reference.ReferenceEvaluator(model)
            names = [output.name for output in model.graph.output]
            self._runs[key] = lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))
        return _answer(call, self._runs[key](call.feeds))

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


def build_model(rule: MergeRule, dtype: str, *, masked: bool) -> onnx.ModelProto:
    """A model from ``teacher_probs``, ``value_outputs`` and perhaps ``query_mask`` to what the function gives."""
    body = Body("", _OPSET)
    maps, values = (body.op("Cast", name, to=GRAPH_DTYPES[dtype]) for name in ("teacher_probs", "value_outputs"))
    rows = body.op("Cast", "query_mask", to=FLOAT) if masked else every_row(body, maps)
    inputs = [maps]
    if rule.solves:
        # The value outputs are given: V = X, read through an identity for every head.
        identities = np.tile(np.eye(rule.d_v), (rule.num_heads, 1))
        inputs += [values, rows, *(body.weight(gram) for gram in gram_matrices(rule, identities))]
    function = squeeze_function(rule, _OPSET)
    results = body.call(rule, lambda: function, inputs)
    body.output(results["merged"], "probs", FLOAT, rank=4)
    for name in ("alphas", "degenerate") if rule.solves else ():
        body.output(results[name], name, FLOAT if name == "alphas" else onnx.TensorProto.BOOL, rank=None)
    kinds = {"teacher_probs": (FLOAT, 4), "value_outputs": (FLOAT, 4)}
    if masked:
        kinds["query_mask"] = (onnx.TensorProto.BOOL, 2)
    graph_inputs = [
        onnx.helper.make_tensor_value_info(name, elem_type, [None] * rank)
        for name, (elem_type, rank) in kinds.items()
    ]
    graph = onnx.helper.make_graph(body.nodes, function.name, graph_inputs, body.outputs, body.initializers)
    opsets = [onnx.helper.make_opsetid("", body.opset), onnx.helper.make_opsetid(FUNCTION_DOMAIN, 1)]
    return onnx.helper.make_model(
        graph, functions=[function], opset_imports=opsets, ir_version=_IR_VERSION, producer_name="squeezing-heads"
    )


def _answer(call: GraphCall, found: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The fields of a result: what the function leaves to its caller is composed of its alphas."""
    rule, maps, values = call.rule, call.feeds["teacher_probs"], call.feeds["value_outputs"]
    raw = np.full((len(maps), sum(map(len, rule.rounds))), 0.5, np.float32)
    raw = found["alphas"].reshape(raw.shape) if rule.solves else raw
    ends = np.cumsum([len(one_round) for one_round in rule.rounds])[:-1]
    alphas = tuple(np.split(np.clip(raw, 0, 1), ends, axis=1)) if rule.rounds and rule.strategy != "mean" else ()
    mixing = np.eye(rule.num_heads) if rule.strategy != "mean" else final_mixing(rule)
    mixing = compose_mixing(alphas, rule.rounds, rule.num_heads) if alphas else np.array([mixing] * len(maps))
    rows = call.feeds.get("query_mask", np.ones((len(maps), maps.shape[2]), np.bool_))[..., None]
    sums = np.einsum("gh,bhsd->bgsd", membership_of(rule.groups, rule.num_heads), values.astype(np.float64))
    merged = np.einsum("bgls,bgsd->bld", np.einsum("bgh,bhls->bgls", mixing, maps), sums)
    target = np.einsum("bhls,bhsd->bld", maps.astype(np.float64), values)
    error, norm = (
        np.linalg.norm((array * rows).reshape(len(maps), -1), axis=1) for array in (merged - target, target)
    )
    return {
        "probs": found["probs"],
        "mixing": mixing,
        "alphas": alphas,
        "residual": np.where(norm > 0, error / np.where(norm > 0, norm, 1), np.where(error > 0, np.inf, 0.0)),
        "num_clipped": int(((raw < 0) | (raw > 1)).sum()) if rule.solves else 0,
        "num_degenerate": int(found["degenerate"].sum()) if rule.solves else 0,
        "plan": rule.rounds,
    }
