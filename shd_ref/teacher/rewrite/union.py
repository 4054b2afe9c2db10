"""Several squeezed graphs of one teacher as one: the teacher runs once for all its students."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shd_ref.teacher.body import FUNCTION_DOMAIN
from shd_ref.teacher.packages import onnx
from shd_ref.teacher.rewrite.squeeze import SqueezedGraph, SqueezedLayer

_PREFIX = f"{FUNCTION_DOMAIN}/"


def unite_graphs(graphs: Sequence[SqueezedGraph]) -> tuple[onnx.ModelProto, tuple[SqueezedGraph, ...]]:
    """One model with the outputs of all, and the graphs with the names that their outputs have in it.

    Args:
        graphs: from ``squeeze_graph`` on the same model, each to another number of heads.
    """
    if len(graphs) == 1:
        return graphs[0].model, tuple(graphs)
    united = onnx.ModelProto()
    united.CopyFrom(graphs[0].model)
    renamed = [graphs[0]]
    for graph in graphs[1:]:
        prefix = f"{_PREFIX}{graph.options.num_student_heads}-heads/"
        model = _with_prefix(graph.model, prefix)
        _append(united, model)
        layers = tuple(_rename_layer(layer, prefix) for layer in graph.layers)
        renamed.append(replace(graph, model=model, layers=layers))
    return united, tuple(renamed)


def _append(united: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Add what is not there yet; equal names mean equal things, since both come from one teacher."""
    there = {name for node in united.graph.node for name in node.output}
    united.graph.node.extend(node for node in model.graph.node if not there.intersection(node.output))
    for kind in ("initializer", "input", "output"):
        held = getattr(united.graph, kind)
        names = {item.name for item in held}
        held.extend(item for item in getattr(model.graph, kind) if item.name not in names)
    functions = {function.name for function in united.functions}
    united.functions.extend(function for function in model.functions if function.name not in functions)


def _with_prefix(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    """The model with everything that the squeeze added renamed.

    Weights held outside the graph belong to the teacher and keep their names, whatever these are.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = {tensor.name for tensor in copy.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL}
    for node in copy.graph.node:
        node.name = _renamed(node.name, prefix)
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = name if name in kept else _renamed(name, prefix)
    for items in (copy.graph.initializer, copy.graph.output):
        for item in items:
            item.name = item.name if item.name in kept else _renamed(item.name, prefix)
    return copy


def _rename_layer(layer: SqueezedLayer, prefix: str) -> SqueezedLayer:
    return replace(
        layer,
        codes=_renamed(layer.codes, prefix),
        alphas=_renamed(layer.alphas, prefix),
        degenerate=None if layer.degenerate is None else _renamed(layer.degenerate, prefix),
        probs=_renamed(layer.probs, prefix),
        values=_renamed(layer.values, prefix),
        merged=_renamed(layer.merged, prefix),
        queries=None if layer.queries is None else _renamed(layer.queries, prefix),
        keys=None if layer.keys is None else _renamed(layer.keys, prefix),
        spans=None if layer.spans is None else _renamed(layer.spans, prefix),
    )


def _renamed(name: str, prefix: str) -> str:
    return prefix + name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name
