"""Everything that a model's graph is made of, the bodies of its control flow included."""

from __future__ import annotations

from collections.abc import Iterator

from shd_ref.teacher.packages import onnx


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and the bodies of its control flow."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_graphs(attribute.g)
            for body in attribute.graphs:
                yield from all_graphs(body)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of all these."""
    yield from (node for part in all_graphs(graph) for node in part.node)


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initialisers and tensors in attributes, those of local functions included."""
    nodes = [*all_nodes(model.graph), *(node for function in model.functions for node in function.node)]
    yield from (tensor for graph in all_graphs(model.graph) for tensor in graph.initializer)
    for node in nodes:
        for attribute in node.attribute:
            yield from attribute.tensors
            if attribute.HasField("t"):
                yield attribute.t
