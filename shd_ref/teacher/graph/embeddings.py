"""How many rows the tables have that a graph's inputs choose from: tokens, positions, types of tokens."""

from __future__ import annotations

from typing import Final

from shd_ref.teacher.opening.operators import CONTRIB_DOMAIN, STANDARD_DOMAINS
from shd_ref.teacher.packages import onnx

_SAME_NUMBERS: Final = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_SAME_ROWS: Final = frozenset({"Cast", "DequantizeLinear", "Identity"})
_GATHERS: Final = frozenset({"Gather", "GatherBlockQuantized"})


def count_rows(model: onnx.ModelProto) -> dict[str, int]:
    """How many rows the smallest table has that each input chooses rows of, by the input's name.

    An input that is clipped or computed with on its way is not listed.
    """
    stated = [(tensor.name, tensor) for tensor in model.graph.initializer]
    stated += [
        (node.output[0], a.t) for node in model.graph.node if node.op_type == "Constant" for a in node.attribute
    ]
    rows = {name: tensor.dims[0] for name, tensor in stated if tensor.dims}
    inputs = {value.name: value.name for value in model.graph.input if value.name not in rows}
    counts: dict[str, int] = {}
    for node in model.graph.node:
        if node.domain not in (*STANDARD_DOMAINS, CONTRIB_DOMAIN) or not node.input:
            continue
        first, *others = node.input
        if node.op_type in _SAME_NUMBERS and first in inputs:
            inputs[node.output[0]] = inputs[first]
        if node.op_type in _SAME_ROWS and first in rows:
            rows[node.output[0]] = rows[first]
        by_rows = node.op_type in _GATHERS and not any(a.name == "axis" and a.i for a in node.attribute)
        if by_rows and first in rows and others[0] in inputs:
            name = inputs[others[0]]
            counts[name] = min(rows[first], counts.get(name, rows[first]))
    return counts
