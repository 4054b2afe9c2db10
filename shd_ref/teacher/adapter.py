"""The generated ONNX functions as an implementation that ``shd_ref.conformance`` can judge.

Options and plans are checked where the graph is written; arrays by a graph's caller, which this adapter does not
play: for arrays that must be refused it says that the operation is missing, and never claims the reference's check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import ROW_SUMS, check_option, check_temperature
from shd_ref.errors import ShdError
from shd_ref.merging.alpha import ALPHA_PER, ALPHA_RULES
from shd_ref.merging.mixing import ALPHA_FROM, STRATEGIES, check_teacher
from shd_ref.merging.plans import merge_plan
from shd_ref.teacher.packages import onnx
from shd_ref.teacher.rewrite.bare import GRAPH_DTYPES, build_bare_model
from shd_ref.teacher.rewrite.function import MergeRule
from shd_ref.teacher.session import open_session

BACKENDS: Final[tuple[str, ...]] = ("onnxruntime", "onnx.reference")
"""What may run the graphs: onnxruntime on the CPU, or ONNX's own reference evaluator."""

_Run: TypeAlias = Callable[[dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class GraphCall:
    """A call of ``squeeze_heads`` as a graph, by its rule, and the graph's inputs by name."""

    rule: MergeRule
    feeds: dict[str, NDArray[Any]]

    @property
    def key(self) -> tuple[MergeRule, bool]:
        """All that a model depends on; its batch size and lengths are free."""
        return self.rule, "query_mask" in self.feeds

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
    alpha_per: str = "map",
    alpha_from: str = "teacher",
    row_sums: str = "one",
) -> GraphCall:
    """The graph of a call with the arguments of ``shd_ref.squeeze_heads``.

    Raises ``NotImplementedError`` for options that the function lacks and for arrays to be refused.
    """
    check_option("strategy", strategy, STRATEGIES, "MIX-2")
    check_option("alpha_rule", alpha_rule, ALPHA_RULES, "ALPHA-4")
    check_option("alpha_per", alpha_per, ALPHA_PER, "ALPHA-9")
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
    return GraphCall(MergeRule(num_heads, width, rounds, strategy, alpha_rule, alpha_per, temperature), feeds)


class OnnxAdapter:
    """``squeeze_heads`` and ``solve_alpha`` as ONNX graphs, for the judge; see ``shd_ref.conformance.Adapter``.

    ``python -m shd_ref.conformance --impl shd_ref.teacher.adapter:OnnxAdapter --dtype float32`` judges them in
    onnxruntime. Models are built once for each set of options, number of heads and width.

    Args:
        backend: one of ``BACKENDS``.

    Raises:
        ShdError: ``argument-value`` for another backend.
    """

    def __init__(self, backend: str = "onnxruntime") -> None:
        if backend not in BACKENDS:
            raise ShdError("argument-value", f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
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
        outputs = self._run_for(call, dtype)(call.feeds)
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
        alpha_per: str = "map",
        row_sums: str = "one",
    ) -> NDArray[Any]:
        """The one alpha of merging two heads into one."""
        squeezed = self._squeeze_heads(
            dtype,
            teacher_probs=_stack(probs_p, probs_q),
            value_outputs=_stack(value_outputs_p, value_outputs_q),
            num_student_heads=1,
            query_mask=query_mask,
            alpha_rule=rule,
            alpha_per=alpha_per,
            row_sums=row_sums,
        )
        alpha: NDArray[Any] = squeezed["alphas"][0][:, 0]
        return alpha

    def _run_for(self, call: GraphCall, dtype: str) -> _Run:
        """The backend with the model of this call, built at its first use."""
        key = (*call.key, dtype)
        if key not in self._runs:
            self._runs[key] = open_backend(call.build_model(dtype=dtype), self.backend)
        return self._runs[key]


def open_backend(model: onnx.ModelProto, backend: str) -> _Run:
    """A model ready to run in a backend of ``BACKENDS``: feeds by name to outputs by name."""
    names = [output.name for output in model.graph.output]
    if backend == "onnxruntime":
        session = open_session(model, num_threads=1)
    else:
        session = onnx.reference.ReferenceEvaluator(model)

    def run(feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return dict(zip(names, session.run(names, feeds), strict=True))

    return run


def _check_arrays(
    teacher_probs: ArrayLike, value_outputs: ArrayLike, query_mask: ArrayLike | None, row_sums: str
) -> dict[str, NDArray[Any]]:
    """The graph's inputs, in its dtypes."""
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
