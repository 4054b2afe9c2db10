"""Read a teacher's untrusted ONNX file: data files, sizes that would fill the memory, wiring, operator sets."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from shd_ref.errors import graph_invalid, import_package, need
from shd_ref.teacher.opening.body import rewrite_einsum
from shd_ref.teacher.opening.model import (
    CONTRIB_DOMAIN,
    INLINE_BYTES,
    MIN_OPSET,
    MOST_ENTRIES,
    STANDARD_DOMAINS,
    DecodeError,
    all_graphs,
    all_nodes,
    all_tensors,
    check_external_data,
    copy_skeleton,
    function_nodes,
    ir,
    is_small,
    kinds,
    load_external_data,
    onnx,
    opset_version,
)

_TARGET_OPSET: Final = 18  # of our own exports
_EARLY: Final = frozenset({"LayerNormalization"})
_ASIDE: Final = "squeezing_heads.aside"
_KNOWN_DOMAINS: Final = frozenset({*STANDARD_DOMAINS, "ai.onnx.ml", CONTRIB_DOMAIN})


def load_teacher(path: str | Path, *, inline_bytes: int = INLINE_BYTES) -> onnx.ModelProto:
    """Read an ONNX model from a file that is not trusted, with its external data, local functions inlined.

    Graphs of old operator sets are converted where ONNX can; others come as they are, to be inspected at least. The
    standard operator Attention is replaced by the operators that define it, so that its map exists; Einsum is
    replaced by MatMul where it is a product, so that its axes are known. External data must lie in the file's folder
    or below. Models larger than ``inline_bytes`` with their data leave large tensors in their files, which
    onnxruntime maps: nothing above 2 GB is ever serialised.

    Raises:
        ShdError: ``graph-invalid`` for a file that cannot be read or parsed, that refers to data outside its
            folder, whose shapes are absurd, or that needs operators from a custom library.
    """
    file = Path(path)
    try:
        model = onnx.load(file, load_external_data=False)
    except (OSError, ValueError) as error:  # the latter for a name with NUL
        remedy = "shd-torch export FOLDER --out teacher.onnx makes one of a Hugging Face model"
        raise graph_invalid(f"teacher graph {file} must be a readable file: {error}: {remedy}") from error
    except DecodeError as error:
        raise graph_invalid(
            f"teacher graph {file} is not a complete ONNX file ({error}): copy or export it again"
        ) from error
    if not model.graph.node or not model.opset_import:
        raise graph_invalid(f"teacher graph {file} holds no ONNX graph: copy or export it again")
    tensors = list(all_tensors(model))
    size = check_external_data(tensors, file)
    _check_tensors(tensors, model.graph.input, file)
    if model.functions:
        _check_functions(model.functions, list(all_nodes(model.graph)), file)
        try:
            model = onnx.inliner.inline_local_functions(model)
        except Exception as error:  # the inliner raises what its C++ throws
            raise graph_invalid(
                f"teacher graph {file} has functions that call one another wrongly: {error}"
            ) from error
    graphs = list(all_graphs(model.graph))
    nodes, opset = [node for graph in graphs for node in graph.node], opset_version(model)
    foreign = {node.domain for node in nodes} - _KNOWN_DOMAINS
    if foreign:
        raise graph_invalid(
            f"teacher graph {file} needs operators of {', '.join(sorted(foreign))}, and custom operator "
            "libraries are never loaded: re-export the model with standard operators"
        )
    _check_joined(nodes, [tensor for graph in graphs for tensor in graph.initializer], file)
    _check_by_runtime(model, file)
    is_whole = size < inline_bytes
    load_external_data(model, file, everything=is_whole)
    if opset < MIN_OPSET and is_whole:  # it cannot convert what it cannot see
        model = _modernise(model, opset)
    if any(node.op_type == "Attention" and node.domain in STANDARD_DOMAINS for node in nodes):
        # By its own definition; a provider may fuse it without ever forming the map. What cannot be replaced,
        # ``find_sites`` reports as it is.
        with contextlib.suppress(Exception):
            model = onnx.inliner.inline_selected_functions(model, [("", "Attention")], inline_schema_functions=True)
    return rewrite_einsum(model) if opset_version(model) >= MIN_OPSET else model


def _modernise(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model in a newer operator set where ONNX can convert it, else as it is: later steps then refuse it."""
    # onnxruntime knew LayerNormalization before ONNX did, under the same name and with the same meaning: such nodes
    # are put out of the converter's sight, which has no rule for an operator of the future.
    old = onnx.ModelProto()
    old.CopyFrom(model)
    for node in all_nodes(old.graph):
        is_early = node.domain in STANDARD_DOMAINS and node.op_type in _EARLY
        if is_early and not onnx.defs.has(node.op_type, max_inclusive_version=opset):
            node.domain = _ASIDE
    old.opset_import.add(domain=_ASIDE, version=1)
    try:
        new = onnx.version_converter.convert_version(old, _TARGET_OPSET)
    except Exception:  # the converter raises what its C++ throws
        return model
    for node in all_nodes(new.graph):
        if node.domain == _ASIDE:
            node.domain = ""
    entries = [entry for entry in new.opset_import if entry.domain != _ASIDE]
    del new.opset_import[:]
    new.opset_import.extend(entries)
    return new


_MOST_JOINED: Final = 2**20  # inference writes down shapes that are joined, entry by entry
_MOST_NODES: Final = 100_000
_MOST_NESTED: Final = 128  # the inliner calls itself
_SHAPE_ARITHMETIC: Final = kinds(
    "Abs Add Cast Concat Div Gather Identity Max Min Mul Neg Pow ReduceProd ReduceSum Reshape Shape Size "
    "Slice Squeeze Sub Transpose Unsqueeze"
)
_PACKED_BITS: Final = (2, 4)  # an entry of a field is a byte, which holds several
_COMPLEX: Final = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)  # two entries a number


def _check_tensors(tensors: Iterable[onnx.TensorProto], inputs: Iterable[onnx.ValueInfoProto], file: Path) -> None:
    """Tensors must have as many numbers as their shapes, and no shape in the graph may be absurd."""
    for tensor in tensors:
        if min(tensor.dims, default=0) < 0 or not _holds(tensor, file.parent):
            raise graph_invalid(
                f"tensor {tensor.name!r} of teacher graph {file} must hold the numbers of its shape "
                f"{list(tensor.dims)[:8]}, no more and no less: copy or export it again"
            )
    for value in inputs:
        shape = [axis.dim_value for axis in value.type.tensor_type.shape.dim if axis.HasField("dim_value")]
        fits = min(shape, default=0) >= 0 and math.prod(shape) <= MOST_ENTRIES
        rule, got = f"have at most {MOST_ENTRIES} entries", f"{shape[:8]}: export it again, with dynamic axes"
        need(fits, "graph-invalid", f"input {value.name!r} of teacher graph {file}", rule, got)


def _check_functions(functions: Iterable[onnx.FunctionProto], nodes: Sequence[onnx.NodeProto], file: Path) -> None:
    """Local functions may not call one another so often, or so deep, that a few of them make an endless graph."""
    calls = {
        (function.domain, function.name): Counter((node.domain, node.op_type) for node in function_nodes(function))
        for function in functions
    }
    sizes: dict[tuple[str, str], tuple[int, int]] = {}

    def measure(name: tuple[str, str], above: int) -> tuple[int, int]:
        """Nodes after inlining, and how deep calls lie in one another."""
        if name not in sizes and name in calls:
            sizes[name] = 1, _MOST_NESTED + 1  # as long as it is measured: one that calls itself is too deep
            if above < _MOST_NESTED:
                callees = [(*measure(inner, above + 1), count) for inner, count in calls[name].items()]
                nodes_inside = sum(size * count for size, _, count in callees)
                sizes[name] = min(nodes_inside, _MOST_NODES + 1), 1 + max((deep for _, deep, _ in callees), default=0)
        return sizes.get(name, (1, 0))

    measured = [measure((node.domain, node.op_type), 0) for node in nodes]
    total, depth = sum(size for size, _ in measured), max(deep for _, deep in measured)
    need(
        total <= _MOST_NODES and depth <= _MOST_NESTED,
        "graph-invalid",
        f"functions of teacher graph {file}",
        f"make at most {_MOST_NODES} nodes, and call one another at most {_MOST_NESTED} deep",
        f"{total if total <= _MOST_NODES else 'more'}, {depth} deep or more",
        remedy="export the model without functions",
    )


def _check_joined(nodes: Iterable[onnx.NodeProto], constants: Iterable[onnx.TensorProto], file: Path) -> None:
    """Shapes that are joined may not be too long: inference writes them down, entry by entry."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in constants}
    most = max(_MOST_JOINED, 8 * sum(sizes.values()))
    for node in nodes:
        # Tensors that depend on the inputs have sizes of the inputs, and count as one.
        carriers = node.input[node.op_type == "Gather" :] if node.op_type in _SHAPE_ARITHMETIC else []
        joined = [sizes.get(name, 1) for name in carriers]
        size = sum(joined) if node.op_type == "Concat" else max(joined, default=1)  # of itself it grows without bound
        got = f"one of {size} entries at node {node.name!r}: export it again"
        need(size <= most, "graph-invalid", f"teacher graph {file}", f"join tensors to {most} at most", got)
        sizes.update(dict.fromkeys(node.output, size))


def _holds(tensor: onnx.TensorProto, folder: Path) -> bool:
    """Whether a tensor's data has the size of its shape; a weight may be of any size that is there."""
    count, kind = math.prod(tensor.dims), tensor.data_type
    outside = onnx.external_data_helper.uses_external_data(tensor)
    if kind == onnx.TensorProto.STRING:
        return not outside and not tensor.raw_data and len(tensor.string_data) == count
    try:
        bits = round(ir.DataType(kind).itemsize * 8)
        field = onnx.helper.tensor_dtype_to_field(kind)
    except (KeyError, TypeError, ValueError):  # no data type
        return False
    size = -(-count * bits // 8)
    if tensor.HasField("segment"):
        return False
    if outside:
        info = onnx.external_data_helper.ExternalDataInfo(tensor)
        length = info.length
        if length is None:
            length = (folder / info.location).stat().st_size - (info.offset or 0)
        return bool(length == size)
    if tensor.HasField("raw_data"):
        return bool(len(tensor.raw_data) == size)
    entries = size if bits in _PACKED_BITS else count * (2 if kind in _COMPLEX else 1)
    return bool(len(getattr(tensor, field)) == entries)


def _check_by_runtime(model: onnx.ModelProto, file: Path) -> None:
    """Refuse a graph that onnxruntime rejects: it checks wiring and each operator's inputs, attributes and types.

    Nothing is computed, no weight is read: those without data are inputs here.
    """
    onnxruntime = import_package(
        "onnxruntime", "reading a teacher needs onnxruntime: pip install '.[teacher]' (in a checkout)"
    )
    trial = copy_skeleton(model)
    input_names = {value.name for value in trial.graph.input}
    for number in reversed(range(len(trial.graph.initializer))):
        tensor = trial.graph.initializer[number]
        if not is_small(tensor) or tensor.external_data:
            if tensor.name not in input_names:
                trial.graph.input.append(
                    onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                )
            del trial.graph.initializer[number]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(file.parent))
    try:
        onnxruntime.InferenceSession(trial.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class but Exception
        # An operator that only other builds of it run, or one that needs the numbers of its weights.
        if type(error).__name__ not in ("NotImplemented", "RuntimeException"):
            raise graph_invalid(
                f"teacher graph {file} is broken, as onnxruntime says: {error}: copy or export it again"
            ) from error
