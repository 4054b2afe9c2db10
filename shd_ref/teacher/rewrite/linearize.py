"""Feed-forward layers without their activation: two products of a teacher's graph become one."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.drafts import drafting, output_file, put
from shd_ref.cache.storage.storage import write_errors
from shd_ref.errors import ShdError, argument_value, graph_invalid, graph_unsupported
from shd_ref.shrink.ffn import merge_linear
from shd_ref.teacher.graph.ffns import Ffn, find_ffns
from shd_ref.teacher.graph.nodes import constant_of, product_weight
from shd_ref.teacher.opening.model import INLINE_BYTES, all_tensors, read_graph
from shd_ref.teacher.packages import ir, onnx
from shd_ref.teacher.rewrite.squeeze import check_opset, remove_unused

_DATA_FOLDER: Final = "squeezing_heads.data_folder"


@dataclass(frozen=True)
class Linearized:
    """A graph with merged layers; of each channels read, neurons that were there, channels given (``sizes``)."""

    model: ir.Model
    sizes: dict[int, tuple[int, int, int]]


def linearize_graph(model: onnx.ModelProto, layers: Sequence[int]) -> Linearized:
    """The graph with the activations of these feed-forward layers dropped, and their two matrices merged.

    The result equals the teacher with the identity in place of each such activation. Matrices are multiplied in
    float64 and stored in the dtype of the teacher's.

    Args:
        layers: each by the number of the attention site that it follows, as ``shd inspect`` prints; rising.

    Raises:
        ShdError: ``layers-invalid``, ``shrink-unsupported`` for gated layers and activations with weights,
            ``graph-unsupported`` for an operator set that is too old, or several such layers behind one site.
    """
    check_opset(model)
    if not layers or list(layers) != sorted(set(layers)):
        raise ShdError("layers-invalid", f"drop_activations must be a rising list of layers; got {list(layers)}")
    read_graph(model)  # refuses what is broken
    made = ir.from_proto(model)
    folder = made.metadata_props.pop(_DATA_FOLDER, None)
    if folder is not None:
        ir.external_data.set_base_dir(made.graph, folder)
    try:
        made.graph.sort()
    except ValueError as error:
        raise graph_invalid(f"the graph's nodes feed one another in a circle: {error}") from error
    chosen = _choose(find_ffns(made.graph), layers)
    sizes = {ffn.layer: _merge(made.graph, ffn) for ffn in chosen}
    remove_unused(made.graph)
    return Linearized(made, sizes)


def _choose(ffns: list[Ffn], layers: Sequence[int]) -> list[Ffn]:
    by_layer: dict[int, list[Ffn]] = {}
    for ffn in ffns:
        by_layer.setdefault(ffn.layer, []).append(ffn)
    chosen = []
    for layer in layers:
        own = by_layer.get(layer, [])
        if not own:
            known = ", ".join(map(str, sorted(by_layer))) or "none"
            raise ShdError(
                "layers-invalid",
                f"drop_activations must name attention sites that a feed-forward layer with an activation follows, "
                f"{known} in this graph; got {layer}",
            )
        reason = next((ffn.reason for ffn in own if ffn.reason is not None), None)
        if reason is not None:
            raise ShdError("shrink-unsupported", f"the activation of layer {layer} cannot be dropped: {reason}")
        if len(own) > 1:
            names = ", ".join(repr(ffn.second.name) for ffn in own)
            raise graph_unsupported(f"layer {layer} must have one feed-forward layer; got {len(own)}, with {names}")
        chosen += own
    return chosen


def _merge(graph: ir.Graph, ffn: Ffn) -> tuple[int, int, int]:
    """Put one product in place of two; what nothing reads any more is removed later."""
    first, second = _matrix(ffn.first), _matrix(ffn.second)
    merged = merge_linear(first.T, second.T, ffn.first_bias, ffn.second_bias)
    stored = constant_of(ffn.second.inputs[1])
    assert stored is not None  # find_ffns
    dtype = stored.dtype
    # Not the squeeze's prefix, under which each student of a pass gets nodes of its own: this is the teacher's.
    name = f"linearized/{ffn.layer}"

    def keep(array: NDArray[Any], what: str) -> ir.Value:
        with np.errstate(over="ignore"):
            array = array.astype(dtype)
        if not np.isfinite(array).all():
            raise ShdError(
                "shrink-unsupported",
                f"the activation of layer {ffn.layer} cannot be dropped: the product of its matrices does not fit "
                f"{dtype}; export the teacher in float32",
            )
        value = ir.Value(name=f"{name}/{what}", const_value=ir.tensor(array, name=f"{name}/{what}"))
        value.dtype, value.shape = ir.DataType.from_numpy(dtype), ir.Shape(array.shape)
        graph.register_initializer(value)
        return value

    nodes = [ir.Node("", "MatMul", [ffn.first.inputs[0], keep(np.ascontiguousarray(merged.weight.T), "weight")])]
    if merged.bias is not None:
        nodes.append(ir.Node("", "Add", [nodes[0].outputs[0], keep(merged.bias, "bias")]))
    for number, node in enumerate(nodes):
        node.name = f"{name}/{node.op_type}"
        node.outputs[0].name = f"{name}/{number}"
    old, new = ffn.out, nodes[-1].outputs[0]
    producer = old.producer()
    assert producer is not None
    graph.insert_before(producer, nodes)
    new.shape, new.type = old.shape, old.type
    for user, index in tuple(old.uses()):
        user.replace_input_with(index, new)
    for index, value in enumerate(graph.outputs):
        if value is old:
            old.name, new.name = f"{name}/unused", old.name
            graph.outputs[index] = new
    return first.shape[0], first.shape[1], second.shape[1]


def _matrix(node: ir.Node) -> NDArray[Any]:
    weight = product_weight(node, 0)
    assert weight is not None  # find_ffns
    return weight.matrix.astype(np.float64)


def save_graph(model: ir.Model, out: str | os.PathLike[str], teacher: Path) -> Path:
    """``saving_graph`` for a graph made from that of ``teacher``, which stays with its weights."""
    target = output_file(out)
    kept = {Path(teacher).resolve(), *_data_files(model)}
    if target.resolve() in kept:
        raise argument_value(f"out must be another file than the teacher and its data; got {target}")
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    large = sum(tensor.nbytes for tensor in tensors) >= INLINE_BYTES
    if not large:
        ir.external_data.load_to_model(model)  # of a teacher that was larger, whose files another place lacks
    with saving_graph(model, target, large=large, kept=kept):
        pass
    return target


@contextmanager
def saving_graph(
    model: ir.Model, target: Path, *, large: bool, kept: Collection[Path] = ()
) -> Iterator[tuple[Path, Path | None]]:
    """The draft of a graph, and the place of its weights beside it; both are in place when the block has not failed.

    The file of ``large`` weights is named after its hash, ``NAME.0123456789abcdef.data``, so that graph and weights
    change together at one rename, the graph's; whoever is killed before leaves the earlier graph, else replaced with
    its weights (but for those ``kept``), as it was.
    """
    with drafting(target) as draft:
        data, weights_file = draft.with_name("data"), None
        ir.save(model, draft, external_data=data.name if large else None)
        if data.exists():
            with data.open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            weights_file = target.with_name(f"{target.name}.{digest[:16]}.data")
            _name_data(draft, weights_file.name)
            data = data.rename(draft.with_name(weights_file.name))
        yield draft, weights_file
        if weights_file is not None:
            put(data, weights_file)
    with write_errors(target):
        others = {file.resolve() for file in (*kept, *([] if weights_file is None else [weights_file]))}
        for file in target.parent.iterdir():  # also of graphs that were never finished
            if _is_data_of(target, file.name) and file.resolve() not in others:
                file.unlink(missing_ok=True)


def _name_data(graph: Path, name: str) -> None:
    proto = onnx.load(graph, load_external_data=False)
    for tensor in all_tensors(proto):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    graph.write_bytes(proto.SerializeToString())


def _is_data_of(graph: Path, name: str) -> bool:
    return name.startswith(graph.name) and re.fullmatch(r"\.[0-9a-f]{16}\.data", name[len(graph.name) :]) is not None


def _data_files(model: ir.Model) -> set[Path]:
    tensors = (value.const_value for value in model.graph.initializers.values())
    return {Path(tensor.path).resolve() for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
