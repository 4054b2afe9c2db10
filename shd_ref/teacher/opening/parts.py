"""Everything that a model's graph is made of, the bodies of its control flow included."""

from __future__ import annotations

from collections.abc import Iterator

from shd_ref.teacher.packages import onnx


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and the bodies of its control flow."""
    yield graph
    for node in graph.node:
        for body in _bodies(node):
            yield from all_graphs(body)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of all these."""
    yield from (node for part in all_graphs(graph) for node in part.node)


def function_nodes(function: onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a local function, the bodies of its control flow included."""
    for node in function.node:
        yield node
        for body in _bodies(node):
            yield from all_nodes(body)


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initialisers and tensors in attributes, also of bodies and local functions; sparse ones as their parts."""
    graphs = [*all_graphs(model.graph)]
    nodes = [node for graph in graphs for node in graph.node]
    for node in (node for function in model.functions for node in function.node):
        bodies = [graph for body in _bodies(node) for graph in all_graphs(body)]
        graphs += bodies
        nodes += [node, *(inner for body in bodies for inner in body.node)]
    for graph in graphs:
        yield from graph.initializer
        yield from (part for sparse in graph.sparse_initializer for part in (sparse.values, sparse.indices))
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from attribute.tensors
        if attribute.HasField("t"):
            yield attribute.t
        yield from (part for sparse in attribute.sparse_tensors for part in (sparse.values, sparse.indices))
        if attribute.HasField("sparse_tensor"):
            yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
