"""Squeezing-Heads Distillation from the text of specs/shd.md, with the standard library alone.

A program for the protocol of specs/conformance.md: one JSON object a line in, one out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import arrays
import losses
import merging
import plans
from arrays import Array, ShdError

# The operations, and the names of their outputs in the order of a tuple; none where a record comes by name.
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...] | None]] = {
    "softmax": (arrays.softmax, ("attn_probs",)),
    "soften": (arrays.soften, ("attn_probs",)),
    "value_outputs": (merging.value_outputs, ("value_outputs",)),
    "merge_plan": (plans.merge_plan, ("plan",)),
    "plan_groups": (plans.plan_groups, ("groups",)),
    "solve_alpha": (merging.solve_alpha, ("alpha",)),
    "compose_mixing": (plans.compose_mixing, ("mixing",)),
    "mix_heads": (plans.mix_heads, ("probs",)),
    "squeeze_heads": (merging.squeeze_heads, None),
    "shd_loss": (losses.shd_loss, ("loss",)),
    "shd_loss_gradient": (losses.shd_loss_gradient, ("dz",)),
    "shd_loss_gradient_qk": (losses.shd_loss_gradient_qk, ("dq", "dk")),
    "intersect_support": (losses.intersect_support, ("supervision", "dropped")),
    "layer_map": (losses.layer_map, ("pairs",)),
    "align_tokens": (arrays.align_tokens, ("probs", "dropped")),
    "gram_tensor": (merging.gram_tensor, ("gram",)),
    "solve_alpha_from_gram": (merging.solve_alpha_from_gram, ("alpha",)),
    "merge_gram": (merging.merge_gram, ("gram",)),
}
LOSS_OPTIONS = set(signature(losses.prepare).parameters) - {"supervision", "student_logits"}


def decode(value: Any, dtype: str) -> Any:
    """An argument from JSON; a float array has the dtype under judgement."""
    if isinstance(value, list):
        return [decode(item, dtype) for item in value]
    if not isinstance(value, dict):
        return value
    if "number" in value:
        return float(value["number"])
    kind = value.get("dtype", "float")
    if kind == "float":
        return Array(tuple(value["shape"]), list(map(float, value["data"])), dtype)
    if kind.startswith("int"):
        return Array(tuple(value["shape"]), list(map(int, value["data"])), kind)
    return Array(tuple(value["shape"]), value["data"], kind)


def encode(value: Any) -> Any:
    """A result as JSON, with special numbers as strings."""
    if isinstance(value, Array):
        return {"shape": list(value.shape), "data": [encode(entry) for entry in value.data]}
    if isinstance(value, dict):
        return {name: encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def call(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one call, without its id."""
    if request["operation"] not in OPERATIONS:
        return {"error": {"code": "not-implemented", "message": request["operation"]}}
    function, names = OPERATIONS[request["operation"]]
    inputs = {name: decode(value, request["dtype"]) for name, value in request["inputs"].items()}
    known = set(signature(function).parameters)
    unknown = set(inputs) - (known | LOSS_OPTIONS if "options" in known else known)
    if unknown:
        return {"error": {"code": "not-implemented", "message": f"no argument {', '.join(sorted(unknown))}"}}
    try:
        result = function(**inputs)
    except ShdError as error:
        return {"error": {"code": error.code, "message": str(error)}}
    if names is None:
        return {"outputs": encode(result)}
    return {"outputs": encode(dict(zip(names, result if len(names) > 1 else (result,), strict=True)))}


def main() -> None:
    """Answer every line until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if request["type"] == "hello":
            answer: dict[str, Any] = {
                "type": "hello",
                "protocol": "1",
                "name": "stranger-python 1.0",
                "operations": list(OPERATIONS),
                "dtypes": list(arrays.ROW_SUM),
            }
        else:
            answer = {"id": request["id"], **call(request)}
        print(json.dumps(answer, allow_nan=False), flush=True)


if __name__ == "__main__":
    main()
