"""Nodes in an untrusted graph: every tensor that is read has one source, every operator its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from shd_ref.errors import ShdError
from shd_ref.teacher.opening.operators import CONTRIB_DOMAIN, STANDARD_DOMAINS
from shd_ref.teacher.opening.parts import all_nodes
from shd_ref.teacher.packages import onnx

_CONTRIB_INPUTS: Final = {
    "DynamicQuantizeMatMul": 3,
    "FusedGemm": 2,
    "FusedMatMul": 2,
    "MatMulIntegerToFloat": 4,
    "QLinearSoftmax": 5,
    "SkipLayerNormalization": 3,
    "TransposeMatMul": 2,
}
"""Operators of onnxruntime's own domain, which have no schema here, and how many inputs they need at least."""


def check_nodes(graph: onnx.GraphProto, opset: int, file: Path) -> None:
    """Every node must have the inputs, outputs and kinds of attributes that its operator is defined with.

    onnxruntime asks for no less, so no graph that runs is refused.

    Args:
        graph: of a model without local functions.
        opset: version of its standard operators.
        file: where it is from, for messages.

    Raises:
        ShdError: ``graph-invalid``.
    """
    for node in all_nodes(graph):
        problem = _signature_problem(node, opset)
        if problem is not None:
            raise _broken(file, f"node {node.name!r} ({node.op_type}) {problem}")


def _signature_problem(node: onnx.NodeProto, opset: int) -> str | None:
    if not node.output:
        return "has no output"
    if node.domain == CONTRIB_DOMAIN:
        least = _CONTRIB_INPUTS.get(node.op_type, 0)
        return None if sum(map(bool, node.input[:least])) == least else f"lacks one of its {least} inputs"
    schema = _find_schema(node.op_type, opset) if node.domain in STANDARD_DOMAINS else None
    if schema is None:
        return None
    if not schema.min_input <= len(node.input) <= schema.max_input:
        return f"has {len(node.input)} inputs, and may have {schema.min_input} to {schema.max_input}"
    if not schema.min_output <= len(node.output) <= schema.max_output:
        return f"has {len(node.output)} outputs, and may have {schema.min_output} to {schema.max_output}"
    for given, formal in zip(node.input, schema.inputs, strict=False):
        if not given and formal.option == onnx.defs.OpSchema.FormalParameterOption.Single:
            return f"lacks its input {formal.name!r}"
    for attribute in node.attribute:
        formal = schema.attributes.get(attribute.name)
        if formal is not None and attribute.type != int(formal.type):
            return f"has an attribute {attribute.name!r} of another type than the operator's"
    lacking = {name for name, each in schema.attributes.items() if each.required} - {a.name for a in node.attribute}
    return f"lacks its attribute {min(lacking)!r}" if lacking else None


def _find_schema(op_type: str, opset: int) -> Any:
    """The operator's definition in this version, or its latest: onnxruntime knows some earlier than ONNX."""
    version = min(max(opset, 1), 2**31 - 1)
    if onnx.defs.has(op_type, max_inclusive_version=version):
        return onnx.defs.get_schema(op_type, version)
    return onnx.defs.get_schema(op_type) if onnx.defs.has(op_type) else None


def check_wiring(graph: onnx.GraphProto, file: Path, outer: frozenset[str] = frozenset()) -> None:
    """Every tensor that a graph reads must be one of its inputs, a constant, or what exactly one node gives.

    Args:
        graph: of a parsed model, or the body of one of its operators.
        file: where it is from, for messages.
        outer: names that a body may read from around it.

    Raises:
        ShdError: ``graph-invalid``.
    """
    given = [value.name for value in graph.input]
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {tensor.values.name for tensor in graph.sparse_initializer}
    made = [name for node in graph.node for name in node.output if name]
    names = [*given, *constants, *made]
    kinds = [text for node in graph.node for text in (node.op_type, node.domain, node.name)]
    if not all(isinstance(name, str) for name in (*names, *kinds)):  # bytes, where they are not text
        raise _broken(file, "a tensor or node has a name that is not text")
    if len(set(given)) < len(given) or len({*given, *constants, *made}) < len({*given, *constants}) + len(made):
        raise _broken(file, "a tensor has two sources")
    known = outer.union(names)
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                raise _broken(file, f"a node ({node.op_type!r}) reads the tensor {name!r}, which has no source")
        for body in _bodies(node):
            check_wiring(body, file, known)
    for value in graph.output:
        if value.name not in known:
            raise _broken(file, f"the output {value.name!r} has no source")


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _broken(file: Path, what: str) -> ShdError:
    return ShdError("graph-invalid", f"teacher graph {file} is broken, as {what}: copy or export it again")
