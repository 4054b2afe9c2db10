"""Names in a graph that nobody vouches for: every tensor that is read has one source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shd_ref.errors import ShdError
from shd_ref.teacher.packages import onnx


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
    if not all(isinstance(name, str) for name in (*names, *kinds)):  # bytes, where they are no text
        raise _broken(file, "a tensor or node has a name that is no text")
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
