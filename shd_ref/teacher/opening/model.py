"""ONNX models: packages, kinds of operators, graphs and tensors, weights in memory or in files, saving."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.drafts import drafting, hash_file, put
from shd_ref.cache.storage.storage import write_errors
from shd_ref.errors import ShdError, graph_invalid

try:
    import onnx
    import onnx.compose
    import onnx.external_data_helper
    import onnx.inliner
    import onnx.reference
    import onnx.shape_inference
    import onnx.version_converter
    import onnx_ir as ir
    from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
except ImportError as error:
    raise ShdError(
        "dependency-missing",
        f"shd_ref.teacher needs the package {error.name}: pip install '.[teacher]' (in a checkout)",
    ) from error

__all__ = ["DecodeError", "Message", "ir", "onnx"]


def kinds(names: str) -> frozenset[str]:
    """Kinds of operators, written with spaces between."""
    return frozenset(names.split())


STANDARD_DOMAINS: Final = ("", "ai.onnx")
CONTRIB_DOMAIN: Final = "com.microsoft"

MAP_CARRIERS: Final = kinds(
    "Cast DequantizeLinear Dropout DynamicQuantizeLinear Identity Mul QuantizeLinear Reshape Slice Trilu Where"
)
"""Operators that the map may pass through between the softmax and its product with V."""

LAYOUT_OPS: Final = kinds(
    "Cast DequantizeLinear Dropout DynamicQuantizeLinear Flatten Identity QuantizeLinear Reshape Squeeze "
    "Transpose Unsqueeze"
)
"""Operators that only move numbers, between the heads' outputs and W_o, or around V."""

MOVING_OPS: Final = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Of these, the ones that give a number another place."""

SIZE_OPS: Final = frozenset({"Shape", "Size"})
"""Operators that read no number of a tensor but its sizes."""

REPEAT_OPS: Final = frozenset({"Concat", "Expand", "Gather", "Tile"})

ADDING_OPS: Final = frozenset({"Add", "Sub", "Sum"})
SCALING_OPS: Final = frozenset({"Div", "Mul"})

LOGIT_OPS: Final = kinds(
    "Add Cast Clip Concat DequantizeLinear Div Identity Max Mul QuantizeLinear Reshape Sub Tanh Transpose Where"
)
"""Backward from the softmax: scale, mask, softcap and sink on the way to ``Q K^T``."""

PRODUCTS: Final = frozenset({"MatMul", "FusedMatMul"})
INTEGER_PRODUCTS: Final = frozenset({"MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat"})
OPAQUE_PRODUCTS: Final = frozenset({"Einsum"})
"""Products whose axes only their equation names."""

FUSED_OPS: Final = kinds(
    "Attention DecoderAttention DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention "
    "GroupQueryAttention LongformerAttention MultiHeadAttention PackedAttention PackedMultiHeadAttention "
    "PagedAttention QAttention QOrderedAttention SparseAttention"
)


MIN_OPSET: Final = 13
"""The oldest operator set that can be squeezed; ``load_teacher`` converts older graphs where ONNX can."""
OLD_OPSET: Final = (
    f"model must use ONNX operator set {MIN_OPSET} or later; got {{}}, which ONNX cannot convert with these "
    "operators: re-export it with opset 18"
)
"""Why a graph's operator set cannot be squeezed."""


_ROUNDING: Final = ("DynamicQuantize", "MatMulNBits", "QAttention", "QGemm", "QLinear", "QuantizeLinear")
"""Parts of the names of operators that round computed numbers to integers; DequantizeLinear is none of them."""


def rounds_in_run(model: onnx.ModelProto, operators: tuple[str, ...] = _ROUNDING) -> bool:
    """Whether a graph rounds computed numbers to integers, where a last bit, and so a fusion, may decide."""
    return any(part in node.op_type for node in all_nodes(model.graph) for part in operators)


def shares_scales(model: onnx.ModelProto) -> bool:
    """Whether samples that run together share the scales that round them: each then differs from itself alone."""
    return rounds_in_run(model, ("DynamicQuantize",))


def opset_version(model: onnx.ModelProto) -> int:
    """The version of the standard operators that a graph uses."""
    return max((entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS), default=0)


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and the bodies of its control flow."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from all_graphs(body)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of all these."""
    yield from (node for inner in all_graphs(graph) for node in inner.node)


def function_nodes(function: onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a local function, the bodies of its control flow included."""
    for node in function.node:
        yield node
        for body in bodies(node):
            yield from all_nodes(body)


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Initialisers and tensors in attributes, also of bodies and local functions; sparse ones as their parts."""
    nodes = [*all_nodes(model.graph), *(node for function in model.functions for node in function_nodes(function))]
    sparse = []
    for graph in (model.graph, *(graph for node in nodes for graph in bodies(node))):
        yield from graph.initializer
        sparse += graph.sparse_initializer
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from attribute.tensors
        if attribute.HasField("t"):
            yield attribute.t
        sparse += [*attribute.sparse_tensors, *([attribute.sparse_tensor] * attribute.HasField("sparse_tensor"))]
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of a control-flow operator."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


_SMALL: Final = 2**10  # entries of a constant that may be a shape, whose numbers count
_DATA: Final = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def copy_skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which large initialisers have a name, a type and a shape, and no data."""
    skeleton = onnx.ModelProto()
    _copy_fields(model, skeleton, "graph")
    _copy_fields(model.graph, skeleton.graph, "initializer")
    for tensor in model.graph.initializer:
        copied = skeleton.graph.initializer.add()
        if is_small(tensor):
            copied.CopyFrom(tensor)
        else:
            _copy_fields(tensor, copied, *_DATA)
    return skeleton


def restore_weights(skeleton: onnx.ModelProto, model: onnx.ModelProto, *, but: Collection[str] = frozenset()) -> None:
    """Copy the model's large weights back into a skeleton, in place."""
    whole = {tensor.name: tensor for tensor in model.graph.initializer if not is_small(tensor)}
    for tensor in skeleton.graph.initializer:
        if tensor.name in whole and tensor.name not in but:
            tensor.CopyFrom(whole[tensor.name])


def is_small(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor is small enough to stay: it may be a shape, whose values matter."""
    return bool(math.prod(tensor.dims) <= _SMALL)


def _copy_fields(source: Message, target: Message, *left_out: str) -> None:
    for field, value in source.ListFields():
        if field.name in left_out:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


MOST_ENTRIES: Final = 2**28  # a mask of 16384 x 16384
_MOST_ACTIVATIONS: Final = 2**36  # of one tensor that depends on the inputs, for the machines there are


def infer_shapes(model: onnx.ModelProto, *, data_prop: bool = True) -> onnx.ModelProto:
    """A skeleton with the results of shape inference, for models of any size; the model where it contradicts itself.

    No tensor that follows from constants may be absurdly large: onnxruntime makes it before it runs anything.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(copy_skeleton(model), data_prop=data_prop)
    except Exception:  # inference raises what its C++ throws
        return model
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in inferred.graph.initializer}
    folded = set(sizes) | {tensor.values.name for tensor in inferred.graph.sparse_initializer}
    for node in inferred.graph.node:
        if all(name in folded for name in node.input if name):
            folded.update(node.output)
    weights = sum(sizes.values())
    for value in inferred.graph.value_info:
        dims = value.type.tensor_type.shape.dim
        size = math.prod(dim.dim_value if dim.HasField("dim_value") else 1 for dim in dims)
        most = max(MOST_ENTRIES if value.name in folded else _MOST_ACTIVATIONS, weights)
        if size > most:
            rule = f"tensor {value.name!r} of the teacher graph must have at most {most} entries"
            got = f"{[dim.dim_value for dim in dims][:8]}: export it with dynamic axes in place of large fixed ones"
            raise graph_invalid(f"{rule}; got {got}")
    return inferred


INLINE_BYTES: Final = 2**28
"""Models whose data files are together smaller than this are read into memory as a whole."""

_SMALL_BYTES: Final = 2**16  # of a tensor that may be a shape or an axis, which inference needs in the graph
_FOLDER: Final = "squeezing_heads.data_folder"


def check_external_data(tensors: Iterable[onnx.TensorProto], file: Path) -> int:
    """External data must exist, be complete, and lie in the model's folder or below; their size in bytes."""
    folder = file.parent.resolve()
    sizes = {file: file.stat().st_size}
    for tensor in filter(onnx.external_data_helper.uses_external_data, tensors):
        try:
            info = onnx.external_data_helper.ExternalDataInfo(tensor)
            target = (folder / info.location).resolve()
            first, length = info.offset or 0, info.length or 0
            outside, missing = not target.is_relative_to(folder), not target.is_file()
        except (ValueError, OSError) as error:  # numbers that cannot be read, names that no file can have
            raise graph_invalid(
                f"teacher graph {file} describes the data of {tensor.name!r} wrongly ({error}): export it again"
            ) from error
        if outside:
            raise graph_invalid(
                f"teacher graph {file} refers to {info.location!r}, outside its own folder: "
                "put the model and its data files, not links to them, into one folder"
            )
        if missing or min(first, length) < 0 or target.stat().st_size < first + length:
            raise graph_invalid(
                f"teacher graph {file} needs {first + length} bytes of {info.location!r}, which is missing or "
                "shorter: copy the model again together with its data files"
            )
        sizes[target] = target.stat().st_size
    return sum(sizes.values())


def load_external_data(model: onnx.ModelProto, file: Path, *, everything: bool) -> None:
    """Read checked external data, all or small tensors; for the others the model keeps the folder."""
    for number in reversed(range(len(model.metadata_props))):
        if model.metadata_props[number].key == _FOLDER:  # the file has no say in this
            del model.metadata_props[number]
    folder = str(file.parent.resolve())
    if not everything:
        model.metadata_props.add(key=_FOLDER, value=folder)
    for tensor in all_tensors(model):
        if onnx.external_data_helper.uses_external_data(tensor):
            length = onnx.external_data_helper.ExternalDataInfo(tensor).length
            if everything or (length is not None and length < _SMALL_BYTES):
                onnx.external_data_helper.load_external_data_for_tensor(tensor, folder)
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]


def hash_teacher(path: str | Path) -> str:
    """SHA-256 of a model file that ``load_teacher`` passed, continued over that of each of its data files by name."""
    file = Path(path)
    digest = hashlib.sha256(file.read_bytes())
    model = onnx.load(file, load_external_data=False)
    tensors = filter(onnx.external_data_helper.uses_external_data, all_tensors(model))
    for location in sorted({onnx.external_data_helper.ExternalDataInfo(tensor).location for tensor in tensors}):
        with (file.parent / location).open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


def data_folder(model: onnx.ModelProto) -> str | None:
    """Where the data lies that a loaded model left in its files; None where it left none."""
    return next((entry.value for entry in model.metadata_props if entry.key == _FOLDER), None)


_BY_ENTRY: Final = kinds(
    "Abs Add Cast Clip DequantizeLinear Div Exp Log Max Min Mul Neg Pow Reciprocal Sigmoid Softplus Sqrt Sub Sum Tanh"
)
_CONSTANT_OPS: Final = _BY_ENTRY | kinds(
    "Concat Gemm Identity LpNormalization MatMul ReduceL2 ReduceMean ReduceSum ReduceSumSquare Reshape Slice Split "
    "Squeeze Transpose Unsqueeze"
)
"""Operators that compute weights in graphs that no optimiser has folded: adapters that are merged as the graph runs,
norms and scales of weights, gates that are learned numbers."""

_MOST_HELD: Final = 2**27  # entries of all constants that one of them is computed from; more for large weights
_MOST_PRODUCTS: Final = 2**38  # multiplications of one product: ten seconds or so


def read_graph(model: onnx.ModelProto, inferred: onnx.ModelProto | None = None) -> ir.Graph:
    """The model's graph in the order in which data flows; ``const_value`` of a tensor wherever the graph fixes it.

    With the shapes that were ``inferred``, if any. Weights are the model's own, not copies.
    A tensor of weights is computed when its ``numpy()`` is called, and not kept: a copy of every weight
    that an exporter left to be transposed would fill the memory.
    """
    try:
        graph = ir.from_proto(model if inferred is None else inferred).graph
        weights = {tensor.name: tensor for tensor in model.graph.initializer if not is_small(tensor)}
        for name in graph.initializers.keys() & weights.keys() if inferred is not None else ():
            graph.initializers[name].const_value = ir.from_proto(weights[name])
        graph.sort()
        for node in graph.all_nodes():
            sources = [source for source in node.inputs if source is not None]
            if node.op_type == "Constant":
                node.outputs[0].const_value = ir.convenience.get_const_tensor(node.outputs[0])
            elif node.op_type in _CONSTANT_OPS and node.domain in STANDARD_DOMAINS and sources:
                for value in node.outputs if all(source.const_value is not None for source in sources) else ():
                    shape, kind = value.shape or ir.Shape(()), value.dtype or ir.DataType.FLOAT
                    value.const_value = ir.LazyTensor(functools.partial(_compute, value), kind, shape)
    except (ir.serde.SerdeError, TypeError, ValueError) as error:  # the last also where nodes feed one another
        raise graph_invalid(
            f"the teacher graph is broken, or runs in a circle: {error}: copy or export it again"
        ) from error
    folder = data_folder(model)
    if folder is not None:
        ir.external_data.set_base_dir(graph, folder)
    return graph


def is_computed(value: ir.Value | None) -> TypeGuard[ir.Value]:
    """Whether a tensor is there, and no constant."""
    return value is not None and value.const_value is None


def fixed_input(node: ir.Node, slot: int) -> NDArray[Any] | None:
    """An operator's input, where the graph fixes it."""
    value = node.inputs[slot] if 0 <= slot < len(node.inputs) else None
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _compute(value: ir.Value) -> ir.Tensor[Any]:
    """A constant from those that the graph states."""
    arrays: dict[ir.Value, NDArray[Any]] = {}
    entries, most = 0, _MOST_HELD
    waiting = [value]  # not by recursion: a graph may be as deep as its author likes
    while waiting:
        current, node = waiting[-1], waiting[-1].producer()
        constant = None if isinstance(current.const_value, ir.LazyTensor) else current.const_value
        sources = () if node is None or constant is not None else node.inputs
        inputs = [source for source in sources if source is not None]
        unknown = [source for source in inputs if source not in arrays]
        if unknown:
            waiting += unknown
            continue
        waiting.pop()
        if current in arrays:
            continue
        try:
            if constant is not None:
                arrays[current] = constant.numpy()
                most += 8 * arrays[current].size
            elif node is not None:
                entries = _count_entries(node, [arrays[source] for source in inputs], entries, most)
                arrays.update(zip(node.outputs, run_operator(node, arrays), strict=False))
        except ShdError:
            raise
        except Exception as error:  # the evaluator raises what NumPy and its own operators raise
            name = "a constant" if node is None else f"node {node.name!r} ({node.op_type})"
            raise graph_invalid(
                f"constants of the graph must be what its operators take; {name} cannot be computed: {error}: copy "
                "or export the model again"
            ) from error
    return ir.Tensor(arrays[value])


def run_operator(node: ir.Node, known: dict[ir.Value, NDArray[Any]]) -> list[NDArray[Any]]:
    """The outputs of an operator on arrays in place of its inputs."""
    feeds = {str(source.name): known[source] for source in node.inputs if source is not None}
    version = None if node.graph is None else node.graph.opset_imports.get("")
    opsets = None if version is None else {"": version}
    with np.errstate(all="ignore"):  # NaN and infinity are found where they are used
        outputs = onnx.reference.ReferenceEvaluator(ir.to_proto(node), opsets=opsets).run(None, feeds)
    return [np.asarray(output) for output in outputs]


def _count_entries(node: ir.Node, inputs: list[NDArray[Any]], in_memory: int, most: int) -> int:
    """Entries in memory with this operator's result, so that its cost is known before it is computed."""
    sizes = [array.size for array in inputs]
    entries, products = max(sizes, default=0), 0
    if node.op_type in _BY_ENTRY - {"DequantizeLinear"}:
        entries = math.prod(np.broadcast_shapes(*(array.shape for array in inputs)))
    elif node.op_type == "Concat":
        entries = sum(sizes)
    elif node.op_type in ("Gemm", "MatMul"):
        left, right = (array.shape for array in inputs[:2])
        if node.op_type == "Gemm":
            left = left[::-1] if node.attributes.get_int("transA") else left
            right = right[::-1] if node.attributes.get_int("transB") else right
        rows = math.prod(left[-2:-1])
        columns = right[-1] if len(right) > 1 else 1
        entries = math.prod(np.broadcast_shapes(left[:-2], right[:-2])) * rows * columns
        products = entries * left[-1]
    if in_memory + entries > most or products > _MOST_PRODUCTS:
        raise graph_invalid(
            f"constants of the graph must follow from one another within {most} entries and {_MOST_PRODUCTS} "
            f"multiplications; node {node.name!r} ({node.op_type}) needs more: export it with its constants folded"
        )
    return in_memory + entries


Weights: TypeAlias = Mapping[str, NDArray[Any]]
"""Initialisers by name, not writable."""

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    onnx.TensorProto.FLOAT: np.dtype("<f4"),
    onnx.TensorProto.FLOAT16: np.dtype("<f2"),
    onnx.TensorProto.DOUBLE: np.dtype("<f8"),
    onnx.TensorProto.INT8: np.dtype("i1"),
    onnx.TensorProto.UINT8: np.dtype("u1"),
}
_LOCATION: Final = "weights in memory"  # not a file: onnxruntime is given the array before it looks for one


def take_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Weights]:
    """A copy of a teacher without its large weights, which sessions share; those in files stay there."""
    # An initialiser that is also an input may be overridden, and a body may define the same name for itself.
    others = {value.name for value in model.graph.input}
    for body in all_graphs(model.graph):
        if body is not model.graph:
            others |= {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
            others |= {name for node in body.node for name in node.output}
    weights = {
        tensor.name: np.frombuffer(tensor.raw_data, _DTYPES[tensor.data_type]).reshape(tuple(tensor.dims))
        for tensor in model.graph.initializer
        if tensor.name not in others and _is_whole(tensor)
    }
    bare = copy_skeleton(model)
    restore_weights(bare, model, but=weights)
    for tensor in bare.graph.initializer:
        if tensor.name in weights:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=_LOCATION)
    return bare, weights


def find_taken(model: onnx.ModelProto, weights: Weights) -> Weights:
    """The weights that such a graph reads: onnxruntime drops unused ones first, and then fails to find them."""
    read = {name for node in all_nodes(model.graph) for name in node.input}
    read |= {value.name for value in model.graph.output}
    return {
        tensor.name: weights[tensor.name]
        for tensor in model.graph.initializer
        if tensor.name in weights and tensor.name in read
    }


def put_back(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """A copy of such a graph with its weights inside."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        if tensor.name in weights:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = weights[tensor.name].tobytes()
    return whole


def _is_whole(tensor: onnx.TensorProto) -> bool:
    """Whether this is a large tensor whose data are in the graph, complete, in a type that NumPy has."""
    if is_small(tensor) or tensor.data_type not in _DTYPES or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return False
    size = math.prod(tensor.dims) * _DTYPES[tensor.data_type].itemsize
    return bool(min(tensor.dims) > 0 and len(tensor.raw_data) == size)


_DATA_SUFFIX: Final = re.compile(r"\.[0-9a-f]{16}\.data")


@contextmanager
def saving_graph(model: ir.Model, target: Path, *, large: bool) -> Iterator[tuple[Path, Path | None]]:
    """The draft of a graph, and the place of its weights next to it; both are in place when the block has not failed.

    The file of ``large`` weights is named after its hash, ``NAME.0123456789abcdef.data``, so that graph and weights
    change together at one rename, the graph's; whoever is killed before leaves the earlier graph, else replaced with
    its weights, as it was.
    """
    with drafting(target) as draft:
        data, weights_file = draft.with_name("data"), None
        ir.save(model, draft, external_data=data.name if large else None)
        if data.exists():
            weights_file = target.with_name(f"{target.name}.{hash_file(data)[:16]}.data")
            _name_data(draft, weights_file.name)
            data = data.rename(draft.with_name(weights_file.name))
        yield draft, weights_file
        if weights_file is not None:
            put(data, weights_file)
    with write_errors(target):
        for file in target.parent.iterdir():  # also of graphs that were never finished
            is_data = file.name.startswith(target.name) and _DATA_SUFFIX.fullmatch(file.name[len(target.name) :])
            if is_data and file != weights_file:
                file.unlink(missing_ok=True)


def _name_data(graph: Path, name: str) -> None:
    proto = onnx.load(graph, load_external_data=False)
    for tensor in all_tensors(proto):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    graph.write_bytes(proto.SerializeToString())
