"""What a single node or tensor of a graph says: its constant value, its attributes, its name."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.opening.operators import STANDARD_DOMAINS
from shd_ref.teacher.packages import ir, onnx

_CONSTANT_OPS: Final = frozenset(
    {"Cast", "DequantizeLinear", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The value as an array where the graph fixes it, through layout and dequantisation of weights.

    Raises:
        ShdError: ``graph-invalid`` for constants that cannot be computed, as they contradict each other.
    """
    if value is None or not is_constant(value):
        return None
    found: dict[ir.Value, NDArray[Any]] = {}
    waiting = [value]  # not by recursion: a graph may be as deep as its author likes
    while waiting:
        node = waiting[-1].producer()
        stated = ir.convenience.get_const_tensor(waiting[-1])
        inputs = [] if node is None or stated is not None else [each for each in node.inputs if each is not None]
        unknown = [each for each in inputs if each not in found]
        if unknown:
            waiting += unknown
            continue
        current = waiting.pop()
        if current in found:
            continue
        try:
            if stated is not None:
                found[current] = stated.numpy()
            elif node is not None:
                feeds = {name_of(each): found[each] for each in inputs}
                outputs = onnx.reference.ReferenceEvaluator(ir.to_proto(node)).run(None, feeds)
                found[current] = np.asarray(next(iter(outputs)))
        except ShdError:
            raise
        except Exception as error:  # the evaluator raises what NumPy and its own operators raise
            name = "a constant" if node is None else f"node {node.name!r} ({node.op_type})"
            raise ShdError(
                "graph-invalid",
                f"constants of the graph must be what its operators take; {name} cannot be computed: {error}: copy "
                "or export the model again",
            ) from error
    return found[value]


def is_constant(value: ir.Value | None) -> bool:
    """Whether ``constant_of`` gives a value, found without computing it."""
    if value is None:
        return False
    seen, waiting = {value}, [value]
    while waiting:
        current = waiting.pop()
        if ir.convenience.get_const_tensor(current) is not None:
            continue
        node = current.producer()
        if node is None or node.op_type not in _CONSTANT_OPS or node.domain not in STANDARD_DOMAINS:
            return False
        sources = {source for source in node.inputs if source is not None} - seen
        seen |= sources
        waiting += sources
    return True


def int_attribute(node: ir.Node, *names: str) -> int | None:
    """The first of these attributes that the node has."""
    name = next((name for name in names if name in node.attributes), None)
    if name is None:
        return None
    try:
        return node.attributes[name].as_int()
    except TypeError as error:
        raise _mistyped(node, name) from error


def float_attribute(node: ir.Node, name: str) -> float:
    """The attribute, or 1."""
    try:
        return node.attributes[name].as_float() if name in node.attributes else 1.0
    except TypeError as error:
        raise _mistyped(node, name) from error


def _mistyped(node: ir.Node, name: str) -> ShdError:
    return ShdError(
        "graph-invalid",
        f"attribute {name!r} of node {node.name!r} ({node.op_type}) is of another type than the operator's: copy or "
        "export the model again",
    )


def name_of(value: ir.Value) -> str:
    """A tensor's name."""
    if not value.name:
        raise ShdError("graph-invalid", "a tensor of the graph has no name: export the model again")
    return value.name


def dtype_name(value: ir.Value | None) -> str | None:
    """NumPy's name of a tensor's dtype, where inference found it."""
    return None if value is None or value.dtype is None else str(value.dtype.numpy().name)


def data_inputs(node: ir.Node) -> list[ir.Value]:
    """The input that carries the data, in operators that move or repeat it."""
    return [value for value in node.inputs[:1] if value is not None]
