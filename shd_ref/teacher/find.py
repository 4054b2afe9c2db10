"""Find the attention of a teacher's ONNX graph by following data, not by matching patterns.

A site starts at a ``Softmax`` over the last axis. Forward from it, the first product with something that is not a
weight is ``map @ V``; forward from that, the first product with a weight is the output projection W_o. Which axis
holds the heads is not guessed either: the layout operators between the two products are replayed on an array of
indices, and W_o's rows say where every number came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError

try:
    import onnx
    import onnx.inliner
    import onnx.shape_inference
    import onnx.version_converter
    import onnx_ir as ir
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_model, uses_external_data
    from onnx.reference import ReferenceEvaluator
except ImportError as error:
    raise ShdError(
        "dependency-missing",
        f"shd_ref.teacher needs the package {error.name}: pip install 'squeezing-heads[teacher]'",
    ) from error

Layout: TypeAlias = Literal["batch-heads", "heads-batch", "batch-folded", "heads-folded"]
"""Axes of the map before (L, S): ``B, H``; ``H, B``; ``B * H`` with heads inside; ``H * B`` with samples inside."""

_HEAD_AXES: Final[dict[Layout | None, int]] = {"batch-heads": 1, "heads-batch": 0}

_Test: TypeAlias = Callable[[ir.Node], bool]

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

# What the map may pass through between the softmax and its product with V.
_MAP_CARRIERS: Final = frozenset(
    {"Cast", "DequantizeLinear", "Dropout", "Identity", "Mul", "QuantizeLinear", "Reshape", "Slice", "Where"}
)
# What only moves numbers, between the heads' outputs and W_o, or around V.
_LAYOUT_OPS: Final = frozenset(
    {
        "Cast",
        "DequantizeLinear",
        "Dropout",
        "Flatten",
        "Identity",
        "QuantizeLinear",
        "Reshape",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
_REPEAT_OPS: Final = frozenset({"Concat", "Expand", "Gather", "Tile"})
_CONSTANT_OPS: Final = frozenset(
    {"Cast", "DequantizeLinear", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
# Backward from the softmax: scale, mask, softcap and sink on the way to Q K^T.
_LOGIT_OPS: Final = frozenset(
    {"Add", "Cast", "Clip", "Concat", "Div", "Identity", "Max", "Mul", "Reshape", "Sub", "Tanh", "Where"}
)
_PRODUCTS: Final = frozenset({"MatMul", "FusedMatMul"})
_INTEGER_PRODUCTS: Final = frozenset({"MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat"})
_FUSED_OPS: Final = frozenset(
    {
        "Attention",
        "DecoderAttention",
        "DecoderMaskedMultiHeadAttention",
        "DecoderMaskedSelfAttention",
        "GroupQueryAttention",
        "LongformerAttention",
        "MultiHeadAttention",
        "PackedAttention",
        "PackedMultiHeadAttention",
        "PagedAttention",
        "QAttention",
        "SparseAttention",
    }
)
_CONTRIB: Final = "com.microsoft"
_KNOWN_DOMAINS: Final = frozenset({"", "ai.onnx", "ai.onnx.ml", _CONTRIB})
_FLOATS: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
MIN_OPSET: Final = 13
"""The oldest operator set that can be squeezed; ``load_teacher`` converts older graphs where ONNX can."""

_TARGET_OPSET: Final = 18
_MAX_BYTES: Final = 2**31
_PROBE_BATCH: Final = 2
_PROBE_LENGTH: Final = 3


@dataclass(frozen=True)
class AttentionSite:
    """One attention block of a teacher graph.

    Attributes:
        layer: position among the graph's attention sites, from 0.
        name: name of the softmax (or fused operator) node, made unique.
        op_type: ``"Softmax"`` or the fused operator.
        probs: name of the map's tensor; empty where ``supported`` is False and no map exists.
        values: name of V's tensor, as the product consumes it; empty likewise.
        layout: how the map's and V's leading axes hold samples and heads; None where unknown.
        num_heads: H.
        num_kv_heads: value heads before they are repeated for grouped queries.
        shared_values: V has a single head, which the product broadcasts to all.
        d_k: width of a query head.
        d_v: width of a value head.
        d_model: D, columns of W_o.
        dtype: of the map, such as ``"float32"``; None where shape inference does not tell.
        cross: True where queries and keys come from different tensors; None where undecided.
        output_projection: W_o ``(H * d_v, D)``, rows in head order, float32 or float64.
        supported: whether ``squeeze_graph`` can squeeze this site.
        reason: why not, and what to do about it.
    """

    layer: int
    name: str
    op_type: str
    probs: str = ""
    values: str = ""
    layout: Layout | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    shared_values: bool = False
    d_k: int | None = None
    d_v: int | None = None
    d_model: int | None = None
    dtype: str | None = None
    cross: bool | None = None
    output_projection: NDArray[Any] | None = field(default=None, repr=False, compare=False)
    supported: bool = False
    reason: str | None = None

    @property
    def folded(self) -> bool:
        """Whether the heads are folded into the batch axis: maps ``(B * H, L, S)``."""
        return self.layout in ("batch-folded", "heads-folded")


def load_teacher(path: str | Path) -> onnx.ModelProto:
    """Read an ONNX model from a file that is not trusted, with its external data, local functions inlined.

    Graphs of old operator sets are converted where ONNX can; others come as they are, to be inspected at least.

    Args:
        path: the ``.onnx`` file; external data must lie in its folder or below.

    Raises:
        ShdError: ``graph-invalid`` for a file that cannot be read or parsed, that refers to data outside its
            folder, or that needs operators from a custom library; ``graph-unsupported`` above 2 GB.
    """
    file = Path(path)
    try:
        model = onnx.load(file, load_external_data=False)
    except OSError as error:
        raise ShdError("graph-invalid", f"teacher graph {file} must be a readable file: {error}") from error
    except DecodeError as error:
        raise ShdError(
            "graph-invalid", f"teacher graph {file} is not a complete ONNX file ({error}): copy or export it again"
        ) from error
    if not model.graph.node or not model.opset_import:
        raise ShdError("graph-invalid", f"teacher graph {file} holds no ONNX graph: copy or export it again")
    _check_external_data(model, file)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    foreign = {node.domain for node in _all_nodes(model.graph)} - _KNOWN_DOMAINS
    if foreign:
        raise ShdError(
            "graph-invalid",
            f"teacher graph {file} needs operators of {', '.join(sorted(foreign))}, and custom operator "
            "libraries are never loaded: re-export the model with standard operators",
        )
    load_external_data_for_model(model, str(file.parent))
    return _modernise(model)


def find_sites(model: onnx.ModelProto) -> tuple[AttentionSite, ...]:
    """Every attention site of a graph, in the order in which data flows; nothing is changed.

    Shapes come from ONNX shape inference; where that leaves the heads undecided, one probe run with tiny inputs
    measures them. A softmax that never meets a product (a classifier's, a router's) is no site.

    Args:
        model: a graph without local functions, see ``load_teacher``.

    Returns:
        All sites, supported or not: an unsupported one has its ``reason``.

    Raises:
        ShdError: ``graph-invalid`` for a graph that is no graph.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except onnx.shape_inference.InferenceError:
        inferred = model  # a graph that inference rejects can still be probed
    graph = ir.from_proto(inferred).graph
    try:
        graph.sort()
    except ValueError as error:
        raise ShdError("graph-invalid", f"the graph's nodes feed one another in a circle: {error}") from error
    opset = graph.opset_imports.get("", 1)
    walks = [walk for node in graph for walk in _walk(node, opset)]
    shapes: Shapes = _static_shapes(inferred)
    measures = [_measure(walk, shapes) for walk in walks]
    probe_error = None
    # Symbolic sizes can mislead; only heads that fall into place are believed without a probe.
    undecided = [
        w for w, m in zip(walks, measures, strict=True) if w.reason is None and (m is None or m.layout is None)
    ]
    if undecided:
        names = {name for walk in walks if walk.reason is None for name in walk.tensors()}
        try:
            shapes = probe_shapes(model, sorted(names))
        except ShdError as error:
            probe_error = str(error)
        else:
            measures = [_measure(walk, shapes) for walk in walks]
    names_seen: set[str] = set()
    return tuple(
        _site(layer, walk, measure, _unique(walk.node, layer, names_seen), probe_error)
        for layer, (walk, measure) in enumerate(zip(walks, measures, strict=True))
    )


def probe_shapes(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Measure tensors' shapes by running the graph once on the CPU with inputs of batch 2 and length 3.

    Integers are fed as ones (as zeros at the second attempt, for tables of one row), floats as ones.

    Raises:
        ShdError: ``graph-unsupported`` where the graph does not run on such inputs.
    """
    from shd_ref.teacher.session import open_session

    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_session(probe.SerializeToString(), num_threads=1)
    failure: Exception | None = None
    for fill in (1, 0):
        feeds = {
            value.name: np.full(_probe_shape(value), fill, dtype=onnx.helper.tensor_dtype_to_np_dtype(_dtype(value)))
            for value in model.graph.input
            if value.name not in {tensor.name for tensor in model.graph.initializer}
        }
        try:
            outputs = session.run(list(names), feeds)
        except Exception as error:  # onnxruntime raises its own types, which share no base class
            failure = error
            continue
        return {name: tuple(np.shape(output)) for name, output in zip(names, outputs, strict=True)}
    raise ShdError(
        "graph-unsupported",
        f"the graph does not run on a probe of batch {_PROBE_BATCH} and length {_PROBE_LENGTH} ({failure}): "
        "re-export it with dynamic batch and sequence axes, or with its shapes inferred",
    )


@dataclass(frozen=True)
class _Walk:
    """What following the data from one node brought, before any size is known."""

    node: ir.Node
    reason: str | None = None
    probs: ir.Value | None = None
    values: ir.Value | None = None
    context: ir.Value | None = None  # the heads' outputs, map @ V
    path: tuple[ir.Node, ...] = ()  # layout operators from the context to W_o
    weight: NDArray[Any] | None = None
    query: ir.Value | None = None
    cross: bool | None = None
    repeats: tuple[ir.Node, ...] = ()  # operators that repeat V's heads

    def tensors(self) -> Iterator[str]:
        """Names of all tensors whose shapes decide the sizes."""
        values = [self.probs, self.values, self.context, self.query]
        values += [node.outputs[0] for node in (*self.path, *self.repeats)]
        values += [value for node in self.repeats for value in _data_inputs(node)]
        yield from (_name(value) for value in values if value is not None and _constant(value) is None)


@dataclass(frozen=True)
class _Measure:
    layout: Layout | None  # None: W_o's rows are not in head order
    num_heads: int
    num_kv_heads: int
    shared_values: bool
    d_k: int | None
    d_v: int


def _walk(node: ir.Node, opset: int) -> Iterator[_Walk]:
    """The walk that starts at this node, if any does."""
    if node.op_type in _FUSED_OPS and node.domain in ("", "ai.onnx", _CONTRIB):
        yield _Walk(
            node,
            f"{node.op_type} is fused, so its attention map never exists as a tensor: "
            "re-export with attention fusion off (eager attention, opset 18, no transformer optimiser)",
        )
    elif node.op_type == "Softmax" and node.domain in ("", "ai.onnx") and _over_last_axis(node, opset):
        yield from _walk_softmax(node)


def _walk_softmax(softmax: ir.Node) -> Iterator[_Walk]:
    product, place = _follow(softmax.outputs[0], _MAP_CARRIERS, _is_value_product)
    if product is None:
        return
    if product.op_type in _INTEGER_PRODUCTS:
        yield _Walk(softmax, f"map and values meet in {product.op_type}: use the float or the QDQ form of the model")
        return
    if place != 0 or not _is_plain(product):
        yield _Walk(
            softmax,
            f"map and values meet in {product.op_type} with the map transposed or scaled: "
            "re-export with eager attention, so that the graph holds MatMul(map, values)",
        )
        return
    probs, values = (_before_rounding(value) for value in _operands(product))
    projection, path = _follow_path(product.outputs[0])
    common: dict[str, Any] = {"node": softmax, "probs": probs, "values": values, "context": product.outputs[0]}
    if projection is None:
        yield _Walk(
            reason="the heads' outputs reach no MatMul or Gemm with a constant weight, so there is no output "
            "projection: export the model with its weights inside, up to and including the attention block",
            **common,
        )
        return
    logits = _trace_back(softmax.inputs[0], _LOGIT_OPS, _is_value_product)
    yield _Walk(
        path=path,
        weight=_projection_weight(projection),
        query=None if logits is None else logits.inputs[0],
        cross=None if logits is None else _is_cross(logits),
        repeats=_repeats(values),
        **common,
    )


def _measure(walk: _Walk, shapes: Shapes) -> _Measure | None:
    """Heads, widths and layout from the shapes; None where a shape is missing or contradicts another."""
    if walk.reason is not None or walk.weight is None:
        return None
    probs, values, context, query = (
        None if value is None else shapes.get(_name(value))
        for value in (walk.probs, walk.values, walk.context, walk.query)
    )
    if probs is None or values is None or context is None or len(context) not in (3, 4):
        return None
    d_v = context[-1]
    num_heads, rest = divmod(walk.weight.shape[0], d_v)
    repeats = _repeat_factor(walk.repeats, shapes)
    indices = _replay(walk.path, context, shapes)
    if rest or repeats is None or indices is None or num_heads % repeats:
        return None
    layout = _layout(indices.reshape(-1, walk.weight.shape[0]), context, num_heads)
    one_head = tuple(1 if axis == _HEAD_AXES.get(layout) else size for axis, size in enumerate(context[:-2]))
    shared = values[:-2] == one_head != context[:-2]
    if probs[:-2] != context[:-2] or not (shared or values[:-2] == context[:-2]):
        return None
    return _Measure(
        layout=layout,
        num_heads=num_heads,
        num_kv_heads=1 if shared else num_heads // repeats,
        shared_values=shared,
        d_k=None if query is None else query[-1],
        d_v=d_v,
    )


def _site(layer: int, walk: _Walk, measure: _Measure | None, name: str, probe_error: str | None) -> AttentionSite:
    weight = walk.weight
    reason = walk.reason
    if reason is None and measure is None:
        reason = f"the number of heads cannot be determined: {probe_error or 'the shapes contradict each other'}"
    if reason is None and measure is not None and measure.layout is None:
        reason = (
            "the rows of the output projection are not in head order: "
            "re-export with eager attention, so that heads are joined before their projection"
        )
    return AttentionSite(
        layer=layer,
        name=name,
        op_type=walk.node.op_type,
        probs="" if walk.probs is None else _name(walk.probs),
        values="" if walk.values is None else _name(walk.values),
        layout=None if measure is None else measure.layout,
        num_heads=_attribute(walk.node, "num_heads", "q_num_heads") if measure is None else measure.num_heads,
        num_kv_heads=_attribute(walk.node, "kv_num_heads") if measure is None else measure.num_kv_heads,
        shared_values=measure is not None and measure.shared_values,
        d_k=None if measure is None else measure.d_k,
        d_v=None if measure is None else measure.d_v,
        d_model=None if weight is None else int(weight.shape[1]),
        dtype=_dtype_name(walk.probs),
        cross=walk.cross,
        output_projection=weight,
        supported=reason is None,
        reason=reason,
    )


# --- following data ---------------------------------------------------------------------------------------------


def _follow(value: ir.Value, carriers: frozenset[str], found: _Test) -> tuple[ir.Node | None, int]:
    """Breadth first to the nearest consumer that ``found`` accepts, and at which input it consumes."""
    queue = [value]
    for current in queue:
        for node, place in current.uses():
            if found(node):
                return node, place
            if node.op_type in carriers and place in _data_places(node) and node.outputs[0] not in queue:
                queue.append(node.outputs[0])
    return None, 0


def _follow_path(value: ir.Value) -> tuple[ir.Node | None, tuple[ir.Node, ...]]:
    """The first product with a weight behind layout operators, and those operators in order."""
    queue: list[tuple[ir.Value, tuple[ir.Node, ...]]] = [(value, ())]
    for current, path in queue:
        for node, place in current.uses():
            if place == 0 and _projection_weight(node) is not None:
                return node, path
            if node.op_type in _LAYOUT_OPS and place == 0:
                queue.append((node.outputs[0], (*path, node)))
    return None, ()


def _trace_back(value: ir.Value | None, carriers: frozenset[str], found: _Test) -> ir.Node | None:
    """Breadth first to the nearest producer that ``found`` accepts."""
    queue = [value]
    for current in queue:
        node = None if current is None else current.producer()
        if node is None:
            continue
        if found(node):
            return node
        if node.op_type in carriers:
            queue.extend(source for source in node.inputs if source not in queue)
    return None


def _is_value_product(node: ir.Node) -> bool:
    """A product of two computed tensors, such as ``Q K^T`` and ``map @ V``."""
    products = _PRODUCTS | _INTEGER_PRODUCTS
    return node.op_type in products and all(_constant(value) is None for value in _operands(node))


def _is_weight_product(node: ir.Node) -> bool:
    return node.op_type in ("Gemm", *_PRODUCTS) and any(_constant(value) is not None for value in node.inputs[:2])


def _operands(product: ir.Node) -> tuple[ir.Value, ir.Value]:
    places = (0, 3) if product.op_type == "QLinearMatMul" else (0, 1)
    left, right = (product.inputs[place] for place in places)
    if left is None or right is None:
        raise ShdError("graph-invalid", f"node {product.name!r} ({product.op_type}) lacks an operand")
    return left, right


def _is_plain(product: ir.Node) -> bool:
    """Whether a product multiplies its operands as they are."""
    flags = ("transA", "transB", "transBatchA", "transBatchB")
    return not any(_attribute(product, flag) for flag in flags) and _float_attribute(product, "alpha") == 1.0


def _projection_weight(node: ir.Node) -> NDArray[Any] | None:
    """W_o as ``(in, out)`` if the node multiplies its first input by a constant matrix."""
    if node.op_type not in ("Gemm", *_PRODUCTS):
        return None
    weight = _constant(node.inputs[1])
    if weight is None or weight.ndim != 2 or _attribute(node, "transA"):
        return None
    matrix = weight.T if _attribute(node, "transB") else weight
    wide: NDArray[Any] = np.array(matrix, dtype=np.float64 if weight.dtype == np.float64 else np.float32, order="C")
    wide *= _float_attribute(node, "alpha")
    return wide


def _is_cross(logits: ir.Node) -> bool | None:
    """Whether Q and K are projections of different tensors; None where their projections are not found."""
    # Everything a projection may pass through on its way to Q K^T: biases, scales, head splits, rotary embedding.
    between = _LAYOUT_OPS | _LOGIT_OPS | _REPEAT_OPS | {"Neg", "Slice", "Split"}
    projections = [_trace_back(value, between, _is_weight_product) for value in _operands(logits)]
    sources = [_projection_source(node) for node in projections if node is not None]
    return None if len(sources) < 2 else sources[0] is not sources[1]


def _projection_source(projection: ir.Node) -> ir.Value | None:
    value = next(value for value in projection.inputs[:2] if _constant(value) is None)
    while value is not None and (node := value.producer()) is not None and node.op_type in _LAYOUT_OPS:
        value = node.inputs[0]
    return value


def _before_rounding(value: ir.Value) -> ir.Value:
    """The same numbers before trailing casts and quantisers: the widest float tensor."""
    widest, current = value, value
    while (node := current.producer()) is not None and node.op_type in ("Cast", "DequantizeLinear", "QuantizeLinear"):
        source = node.inputs[0]
        if source is None:
            break
        current = source
        if current.dtype in _FLOATS:
            widest = current
    return widest


def _repeats(values: ir.Value) -> tuple[ir.Node, ...]:
    """Operators behind V, back to its projection, that may repeat value heads for grouped queries."""
    found: list[ir.Node] = []
    node = values.producer()
    while node is not None and node.op_type in _LAYOUT_OPS | _REPEAT_OPS:
        # A Concat of different tensors joins past values or rotary halves: it repeats nothing.
        if node.op_type != "Concat" or len(set(node.inputs)) == 1:
            found.append(node)
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return tuple(node for node in found if node.op_type in _REPEAT_OPS)


def _data_inputs(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs[:1] if value is not None]


def _data_places(node: ir.Node) -> tuple[int, ...]:
    return {"Where": (1, 2), "Mul": (0, 1)}.get(node.op_type, (0,))


# --- constants and attributes -----------------------------------------------------------------------------------


def _constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The value as an array where the graph fixes it, through layout and dequantisation of weights."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return tensor.numpy()
    node = value.producer()
    if node is None or node.op_type not in _CONSTANT_OPS or node.domain not in ("", "ai.onnx"):
        return None
    inputs = [_constant(source) for source in node.inputs]
    if any(array is None for array, source in zip(inputs, node.inputs, strict=True) if source is not None):
        return None
    feeds = {_name(s): a for s, a in zip(node.inputs, inputs, strict=True) if s is not None}
    return np.asarray(next(iter(ReferenceEvaluator(ir.to_proto(node)).run(None, feeds))))


def _over_last_axis(softmax: ir.Node, opset: int) -> bool:
    axis = _attribute(softmax, "axis")
    axis = (-1 if opset >= 13 else 1) if axis is None else axis
    shape = softmax.outputs[0].shape
    # Maps have at least three axes, so without a known rank a later axis than 1 is taken for the last.
    return axis == -1 or (axis >= 2 if shape is None else axis == len(shape) - 1)


def _attribute(node: ir.Node, *names: str) -> int | None:
    return next((node.attributes[name].as_int() for name in names if name in node.attributes), None)


def _float_attribute(node: ir.Node, name: str) -> float:
    return node.attributes[name].as_float() if name in node.attributes else 1.0


def _name(value: ir.Value) -> str:
    if not value.name:
        raise ShdError("graph-invalid", "a tensor of the graph has no name: export the model again")
    return value.name


def _dtype_name(value: ir.Value | None) -> str | None:
    return None if value is None or value.dtype is None else str(value.dtype.numpy().name)


def _unique(node: ir.Node, layer: int, seen: set[str]) -> str:
    name = node.name or f"{node.op_type}_{layer}"
    while name in seen:
        name = f"{name}_{layer}"
    seen.add(name)
    return name


# --- sizes ------------------------------------------------------------------------------------------------------


def _static_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors whose dimensions are all numbers or names, each name bound to its own small number."""
    numbers: dict[str, int] = {}
    shapes = {}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if not value.type.tensor_type.HasField("shape") or not all(d.dim_param or d.dim_value for d in dims):
            continue
        shapes[value.name] = tuple(
            numbers.setdefault(d.dim_param, len(numbers) + _PROBE_BATCH) if d.dim_param else d.dim_value for d in dims
        )
    return shapes


def _repeat_factor(nodes: Iterable[ir.Node], shapes: Shapes) -> int | None:
    """How often value heads are repeated: elements out over elements in, whatever the axis."""
    factor = 1
    for node in nodes:
        sizes = [shapes.get(_name(value)) for value in (*_data_inputs(node), node.outputs[0])]
        if sizes[0] is None or sizes[1] is None:
            return None
        factor *= max(1, int(np.prod(sizes[1]) // np.prod(sizes[0])))
    return factor


def _replay(path: Iterable[ir.Node], context: tuple[int, ...], shapes: Shapes) -> NDArray[np.int64] | None:
    """Apply the layout operators to an array of the context's flat indices."""
    indices = np.arange(np.prod(context)).reshape(context)
    for node in path:
        if node.op_type == "Transpose":
            order = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
            indices = indices.transpose(order)
        elif node.op_type in ("Flatten", "Reshape", "Squeeze", "Unsqueeze"):
            shape = shapes.get(_name(node.outputs[0]))
            if shape is None or np.prod(shape) != indices.size:
                return None
            indices = indices.reshape(shape)
    return indices


def _layout(rows: NDArray[np.int64], context: tuple[int, ...], num_heads: int) -> Layout | None:
    """The reading of the context's leading axes under which every row of indices is the heads in order."""
    indices = np.arange(np.prod(context)).reshape(context)
    batch, rest = divmod(context[0], num_heads)
    readings: dict[Layout, NDArray[np.int64]] = {}
    if len(context) == 4:
        readings = {"batch-heads": indices, "heads-batch": indices.swapaxes(0, 1)}
    elif not rest:
        readings = {
            "batch-folded": indices.reshape(batch, num_heads, *context[1:]),
            "heads-folded": indices.reshape(num_heads, batch, *context[1:]).swapaxes(0, 1),
        }
    # Rows may stand in any order: (B, L) or (L, B).
    wanted = rows[np.argsort(rows[:, 0])]
    for layout, reading in readings.items():
        if reading.shape[1] != num_heads:
            continue
        joined = reading.swapaxes(1, 2).reshape(-1, rows.shape[1])  # (B * L, H * d_v)
        if np.array_equal(joined[np.argsort(joined[:, 0])], wanted):
            return layout
    return None


def _probe_shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_value or (_PROBE_LENGTH if axis else _PROBE_BATCH) for axis, d in enumerate(dims))


def _dtype(value: onnx.ValueInfoProto) -> int:
    return value.type.tensor_type.elem_type


def opset_version(model: onnx.ModelProto) -> int:
    """The version of the standard operators that a graph uses."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def _modernise(model: onnx.ModelProto) -> onnx.ModelProto:
    if opset_version(model) >= MIN_OPSET:
        return model
    try:
        return onnx.version_converter.convert_version(model, _TARGET_OPSET)
    except RuntimeError:
        # A contrib operator has no conversion. ``squeeze_graph`` refuses the old graph, with the remedy.
        return model


# --- untrusted files --------------------------------------------------------------------------------------------


def _check_external_data(model: onnx.ModelProto, file: Path) -> None:
    """External data must exist, be complete, lie in the model's folder, and fit into one message with the model."""
    folder = file.parent.resolve()
    sizes = {file: file.stat().st_size}
    for tensor in _all_tensors(model):
        if not uses_external_data(tensor):
            continue
        try:
            info = ExternalDataInfo(tensor)
        except ValueError as error:
            raise ShdError(
                "graph-invalid",
                f"teacher graph {file} describes the data of {tensor.name!r} wrongly ({error}): export it again",
            ) from error
        target = (folder / info.location).resolve()
        if not target.is_relative_to(folder):
            raise ShdError(
                "graph-invalid",
                f"teacher graph {file} refers to {info.location!r}, outside its own folder: "
                "put the model and its data files, not links to them, into one folder",
            )
        end = (info.offset or 0) + (info.length or 0)
        if not target.is_file() or target.stat().st_size < end:
            raise ShdError(
                "graph-invalid",
                f"teacher graph {file} needs {end} bytes of {info.location!r}, which is missing or shorter: "
                "copy the model again together with its data files",
            )
        sizes[target] = target.stat().st_size
    if sum(sizes.values()) >= _MAX_BYTES:
        raise ShdError(
            "graph-unsupported",
            f"teacher graph {file} and its data must be smaller than 2 GB, which protobuf allows at most; got "
            f"{sum(sizes.values()) / 2**30:.1f} GB: export the teacher in float16",
        )


def _all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    nodes = [*_all_nodes(model.graph), *(node for function in model.functions for node in function.node)]
    yield from (tensor for graph in _all_graphs(model.graph) for tensor in graph.initializer)
    for node in nodes:
        for attribute in node.attribute:
            yield from attribute.tensors
            if attribute.HasField("t"):
                yield attribute.t


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    yield from (node for part in _all_graphs(graph) for node in part.node)


def _all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and the bodies of its control flow."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_graphs(attribute.g)
            for body in attribute.graphs:
                yield from _all_graphs(body)
