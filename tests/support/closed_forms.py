"""The closed forms of ``shd_ref.shrink`` as goldens name them, and the merged attention that heads must equal."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref import shrink, softmax
from shd_ref.shrink import heads, kept
from shd_ref.shrink.align import RIDGE, RowSums, solve_change

Array = NDArray[np.float64]


def attend(
    inputs: Array, weights: heads.HeadWeights, merge: Any = None, attn_mask: Any = None, frequencies: Any = None
) -> Array:
    """What a layer gives for rows ``(B, L, D)``; with ``merge``, by one softmax of each group's mixed logits."""
    x, rows = inputs[:, None], np.arange(inputs.shape[1])[:, None]
    query, key, value = (
        x @ matrix + (0.0 if bias is None else bias[:, None])
        for matrix, bias in (
            (weights.query, weights.query_bias),
            (weights.key, weights.key_bias),
            (weights.value, weights.value_bias),
        )
    )
    if frequencies is not None:
        pairs, turn = len(frequencies), np.exp(1j * rows * frequencies)
        for side in (query, key):
            turned = (side[..., :pairs] + 1j * side[..., pairs : 2 * pairs]) * turn
            side[..., :pairs], side[..., pairs : 2 * pairs] = turned.real, turned.imag
    logits = weights.logit_scale * query @ key[:, weights.reads].swapaxes(2, 3)
    if merge is not None:
        logits = np.einsum("ht,btls->bhls", merge.mixing, logits)[:, merge.members.argmax(axis=0)]
    out: Array = (softmax(logits, attn_mask) @ value[:, weights.reads] @ weights.output).sum(axis=1)
    return out if weights.output_bias is None else out + weights.output_bias


def align_output(inputs: Array, targets: Array, weight: Array, bias: Any = None, ridge: float = RIDGE) -> Any:
    """A refitted matrix and its bias."""
    if bias is not None:
        inputs, weight = np.c_[inputs, np.ones(len(inputs))], np.r_[weight, bias[None]]
    sums = RowSums(inputs.T @ inputs, inputs.T @ (targets - inputs @ weight), len(inputs), 0.0)
    made = weight + solve_change(sums, ridge, biased=bias is not None)
    return (made, None) if bias is None else (made[:-1], made[-1])


def run(operation: str, given: dict[str, Any], _: str = "") -> Any:
    """One operation on a golden's inputs, whose records are mappings."""
    inputs = dict(given)
    if "weights" in inputs:
        inputs["weights"] = heads.HeadWeights(**inputs["weights"])
    if inputs.get("merge") is not None:
        groups = tuple(map(tuple, inputs["merge"]["groups"]))
        inputs["merge"] = heads.HeadMerge(inputs["merge"]["mixing"], groups)
    if "predictor" in inputs:
        inputs["predictor"] = shrink.Predictor(**inputs["predictor"])
    rotary = inputs.pop("rotary", None)
    if operation == "attend":
        return attend(**inputs, frequencies=None if rotary is None else rotary["frequencies"])
    if operation == "low_rank_heads":
        moment = inputs["moment"]
        centred = moment[:-1, :-1] - np.outer(moment[-1, :-1], moment[-1, :-1])
        inputs.setdefault("key_moment", centred)
        if rotary is not None:
            inputs["slow"] = rotary.get("slow", np.zeros(len(rotary["frequencies"]), bool))
    if operation == "pooled_mixing":
        inputs["plan"] = tuple(tuple(map(tuple, pairs)) for pairs in inputs["plan"])
    if operation == "align_output":
        return align_output(**inputs)
    room = next(room for room in (heads, kept, shrink) if hasattr(room, operation))
    return getattr(room, operation)(**inputs)
