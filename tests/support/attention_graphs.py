"""Small attention graphs, written node by node, in the forms that exporters give them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from shd_ref import value_outputs
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import (
    AttentionSite,
    PrecomputeOptions,
    compare_with_reference,
    find_factors,
    find_sites,
    open_session,
    projection_of,
    squeeze_graph,
)
from shd_ref.teacher.graph.factors import SiteFactors
from shd_ref.teacher.opening.body import FLOAT, Body
from shd_ref.teacher.rewrite.function import add_factors, site_tensors
from shd_ref.teacher.rewrite.squeeze import assemble_graph

IR_VERSION = 9  # of the oldest onnxruntime that the project supports

Change = Callable[["GraphBuilder", str], str]


class GraphBuilder:
    """Appends nodes and initialisers under readable names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def op(self, op_type: str, *inputs: Any, name: str = "", domain: str = "", **attributes: Any) -> str:
        """Inputs are names of tensors; anything else is a constant."""
        names = [value if isinstance(value, str) else self.const(value) for value in inputs]
        output = name or f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, names, [output], name=output, domain=domain, **attributes))
        return output

    def const(self, array: Any, name: str = "") -> str:
        name = name or f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def project(self, context: str, rows: int, columns: int, seed: int = 0) -> str:
        """Heads ``(B, H, L, d)`` joined, times random weights."""
        flat = self.op("Reshape", self.op("Transpose", context, perm=[0, 2, 1, 3]), [0, 0, rows])
        return self.op("MatMul", flat, random_projection(rows, columns, seed))

    def model(
        self, inputs: dict[str, tuple[int, Sequence[str | int]]], outputs: Sequence[str], opset: int = 18
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "teacher",
            [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.initializers,
        )
        opsets = [helper.make_opsetid("", opset)]
        if any(node.domain == "com.microsoft" for node in self.nodes):
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def random_projection(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=(rows, columns)) / np.sqrt(rows)).astype(np.float32)


def bare_attention(
    num_heads: int, d_v: int = 4, d_model: int = 10, *, num_layers: int = 1, opset: int = 18
) -> onnx.ModelProto:
    """Softmax(logits), zero where NaN, times V, times W_o: logits and V are inputs, so tests decide every map.

    Inputs ``logits_i (B, H, L, S)``, ``values_i (B, H, S, d_v)`` and ``mask (B, L)``.
    """
    build = GraphBuilder()
    inputs: dict[str, tuple[int, Sequence[str | int]]] = {"mask": (TensorProto.INT64, ["batch", "rows"])}
    outputs = []
    for layer in range(num_layers):
        logits, values = f"logits_{layer}", f"values_{layer}"
        inputs[logits] = (TensorProto.FLOAT, ["batch", num_heads, "rows", "keys"])
        inputs[values] = (TensorProto.FLOAT, ["batch", num_heads, "keys", d_v])
        raw = build.op("Softmax", logits, axis=-1, name=f"softmax_{layer}")
        probs = build.op("Where", build.op("IsNaN", raw), np.float32(0), raw, name=f"probs_{layer}")
        context = build.op("MatMul", probs, values)
        outputs.append(build.project(context, num_heads * d_v, d_model, layer))
    return build.model(inputs, outputs, opset)


def encoder_layer(
    *,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    kv_repeat: str = "expand",
    d_v: int = 3,
    mask: str | None = "add",
    nan_guard: bool = False,
    float16: bool = False,
    layout: str = "batch-heads",
    projection: str = "matmul",
    sequence_first: bool = False,
    head_mask: bool = False,
    opset: int = 18,
) -> onnx.ModelProto:
    """One self-attention layer on ``x (B, L, D)`` with ``mask (B, L)``, in the form that the options describe.

    With ``sequence_first`` the layout "batch-folded" reads ``x (L, B, D)``, as torch's layers do by default.
    """
    d_model = num_heads * d_v
    num_kv_heads = num_kv_heads or num_heads
    dtype = np.float16 if float16 else np.float32
    build = GraphBuilder()
    turned = layout == "batch-folded" and not sequence_first
    source = build.op("Transpose", "x", perm=[1, 0, 2]) if turned else "x"
    source = build.op("Cast", source, to=TensorProto.FLOAT16) if float16 else source

    def heads(name: str, count: int, seed: int) -> str:
        matrix = random_projection(d_model, count * d_v, seed).astype(dtype)
        projected = build.op("MatMul", source, matrix)
        if layout == "batch-folded":  # torch.nn.MultiheadAttention: (L, B, H d) -> (B H, L, d)
            sizes = build.op("Slice", build.op("Shape", source), [0], [1])
            shape = build.op("Concat", sizes, [-1, d_v], axis=0)
            return build.op("Transpose", build.op("Reshape", projected, shape), perm=[1, 0, 2], name=name)
        split = build.op("Reshape", projected, [0, 0, count, d_v])
        order = [2, 0, 1, 3] if layout in ("heads-batch", "heads-folded") else [0, 2, 1, 3]
        split = build.op("Transpose", split, perm=order)
        if layout == "heads-folded":  # (H B, L, d)
            rows = build.op("Slice", build.op("Shape", split), [2], [4])
            shape = build.op("Concat", [-1], rows, axis=0)
            split = build.op("Reshape", split, shape)
        return _repeat_heads(build, split, num_heads, count, kv_repeat) if count < num_heads else split

    query, key, values = heads("q", num_heads, 1), heads("k", num_kv_heads, 2), heads("v", num_kv_heads, 3)
    key = build.op("Transpose", key, perm=[0, 2, 1] if "folded" in layout else [0, 1, 3, 2])
    logits = build.op("MatMul", query, key)
    if mask is not None and layout == "batch-heads":
        logits = _mask_logits(build, logits, mask, -np.inf if nan_guard else -3e4, float16)
    if float16:  # transformers computes the softmax in float32
        logits = build.op("Cast", logits, to=TensorProto.FLOAT)
    probs = build.op("Softmax", logits, axis=-1, name="softmax")
    if nan_guard:
        probs = build.op("Where", build.op("IsNaN", probs), np.float32(0), probs, name="guarded")
    if head_mask:
        probs = build.op("Mul", probs, np.ones((1, num_heads, 1, 1), np.float32), name="head_masked")
    if float16:
        probs = build.op("Cast", probs, to=TensorProto.FLOAT16)
    context = build.op("MatMul", probs, values, name="context")
    flat = _join_heads(build, context, source, layout, num_heads, d_v)
    output = _project(build, flat, random_projection(d_model, d_model + 2, 4).astype(dtype), projection)
    output = build.op("Cast", output, to=TensorProto.FLOAT) if float16 else output
    inputs: dict[str, tuple[int, Sequence[str | int]]] = {
        "x": (TensorProto.FLOAT, ["batch", "length", d_model]),
        "mask": (TensorProto.INT64, ["batch", "length"]),
    }
    return build.model(inputs, [output], opset)


def _repeat_heads(build: GraphBuilder, split: str, num_heads: int, num_kv_heads: int, how: str) -> str:
    groups = num_heads // num_kv_heads
    if how == "gather":
        return build.op("Gather", split, np.repeat(np.arange(num_kv_heads), groups), axis=1)
    sizes = build.op("Slice", build.op("Shape", split), [2], [4])
    wide = build.op("Unsqueeze", split, [2])
    if how == "tile":
        wide = build.op("Tile", wide, [1, 1, groups, 1, 1])
    else:
        shape = build.op("Concat", [1, 1, groups], sizes, axis=0)
        wide = build.op("Expand", wide, shape)
    shape = build.op("Concat", [-1, num_heads], sizes, axis=0)
    return build.op("Reshape", wide, shape)


def _mask_logits(
    build: GraphBuilder, logits: str, mask: str, low: float, float16: bool = False, source: str = "mask"
) -> str:
    dtype = np.float16 if float16 else np.float32
    column = build.op("Unsqueeze", source, [1, 2])  # (B, 1, 1, L)
    if mask == "where":
        allowed = build.op("Cast", column, to=TensorProto.BOOL)
        return build.op("Where", allowed, logits, np.array([low], dtype))
    if mask in ("causal", "window"):
        allowed = build.op("And", build.op("Cast", column, to=TensorProto.BOOL), _behind(build, source, mask))
        return build.op("Add", logits, build.op("Where", allowed, np.zeros(1, dtype), np.array([low], dtype)))
    ones = build.op("Cast", column, to=TensorProto.FLOAT16 if float16 else TensorProto.FLOAT)
    off = build.op("Sub", np.ones(1, dtype), ones)
    penalty = build.op("Mul", off, np.array([-1e4], dtype))
    return build.op("Add", logits, penalty)


def _behind(build: GraphBuilder, source: str, mask: str) -> str:
    """``(1, 1, L, L)``: whether a key is no later than a row, and in a window among the last three."""
    size = build.op("Gather", build.op("Shape", source), np.array(1))
    keys = build.op("Range", np.array(0), size, np.array(1))
    rows = build.op("Unsqueeze", keys, [1])
    seen = build.op("LessOrEqual", keys, rows)
    if mask == "window":
        seen = build.op("And", seen, build.op("Less", build.op("Sub", rows, keys), np.array(3)))
    return build.op("Unsqueeze", seen, [0, 1])


def attention_on_inputs(
    change_logits: Change | None = None,
    change_probs: Change | None = None,
    *,
    change_keys: Change | None = None,
    normalise: Change | None = None,
    multiply: Change | None = None,
    opset: int = 18,
    **inputs: tuple[int, Sequence[str | int]],
) -> onnx.ModelProto:
    """Attention of two heads of width 3 on inputs ``q (B, 2, rows, 3)`` and ``k (B, 2, keys, 3)``, which is V too.

    A change appends nodes and names their result: behind ``Q K^T``, the softmax or ``k``, or instead of the softmax
    (``normalise``) or the product with V (``multiply``). ``inputs`` are more inputs, or other shapes of q and k.
    """
    build = GraphBuilder()
    keys = "k" if change_keys is None else change_keys(build, "k")
    logits = build.op("MatMul", "q", build.op("Transpose", keys, perm=[0, 1, 3, 2]))
    logits = logits if change_logits is None else change_logits(build, logits)
    probs = build.op("Softmax", logits, axis=-1) if normalise is None else normalise(build, logits)
    probs = probs if change_probs is None else change_probs(build, probs)
    context = build.op("MatMul", probs, keys) if multiply is None else multiply(build, probs)
    output = build.project(context, 6, 5)
    shapes = {name: (TensorProto.FLOAT, ["batch", 2, axis, 3]) for name, axis in (("q", "rows"), ("k", "keys"))}
    return build.model({**shapes, **inputs}, [output], opset)


def attention_operator(
    opset: int = 23, *, num_kv_heads: int = 2, rank: int = 3, masked: bool = False, **attributes: Any
) -> onnx.ModelProto:
    """Self-attention of four heads by the standard operator Attention, with an output projection."""
    build = GraphBuilder()
    tensors = []
    for seed, count in enumerate((4, num_kv_heads, num_kv_heads), 1):
        heads = build.op("MatMul", "x", random_projection(12, count * 3, seed))
        if rank == 4:
            heads = build.op("Reshape", heads, [0, 0, count, 3])
            heads = build.op("Transpose", heads, perm=[0, 2, 1, 3])
        tensors.append(heads)
    if masked:
        column = build.op("Unsqueeze", "mask", [1, 2])
        row = build.op("Unsqueeze", build.op("Mul", "mask", [0]), [1, 3])
        tensors.append(build.op("Cast", build.op("Add", column, row), to=TensorProto.BOOL))  # (B, 1, L, L)
    counts = {"q_num_heads": 4, "kv_num_heads": num_kv_heads} if rank == 3 else {}
    output = build.op("Attention", *tensors, **counts, **attributes)
    if rank == 4:
        joined = build.op("Transpose", output, perm=[0, 2, 1, 3])
        output = build.op("Reshape", joined, [0, 0, 12])
    output = build.op("MatMul", output, random_projection(12, 14, 4))
    inputs: dict[str, tuple[int, Sequence[str | int]]] = {"x": (TensorProto.FLOAT, ["batch", "length", 12])}
    if masked:
        inputs["mask"] = (TensorProto.INT64, ["batch", "length"])
    return build.model(inputs, [output], opset)


def token_teacher(num_heads: int = 4, vocabulary: int = 50) -> onnx.ModelProto:
    """``encoder_layer`` on ``input_ids (B, L)`` and ``attention_mask (B, L)``."""
    model = encoder_layer(num_heads=num_heads, mask="where")
    graph = model.graph
    table = numpy_helper.from_array(3 * random_projection(vocabulary, num_heads * 3, 9), "table")
    graph.initializer.append(table)
    graph.node.insert(0, helper.make_node("Gather", ["table", "input_ids"], ["x"], name="embed"))
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = "attention_mask" if name == "mask" else name
    del graph.input[:]
    for name in ("input_ids", "attention_mask"):
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]))
    return model


def attend(build: GraphBuilder, rows: str, keys: str, mask: str | None, num_heads: int, seed: int) -> str:
    """Attention of heads of width 3 between two sequences, which may be one, with its projection."""
    width = num_heads * 3
    query, key, values = (
        build.op(
            "Transpose",
            build.op("Reshape", build.op("MatMul", source, weight), [0, 0, num_heads, 3]),
            perm=[0, 2, 3, 1] if place == 2 else [0, 2, 1, 3],
        )
        for place, source in ((1, rows), (2, keys), (3, keys))
        for weight in [2 * random_projection(width, width, 10 * seed + place)]
    )
    logits = build.op("MatMul", query, key)
    if mask is not None:
        logits = _mask_logits(build, logits, "where", -3e4, source=mask)
    context = build.op("MatMul", build.op("Softmax", logits, axis=-1), values)
    return build.project(context, width, width, 10 * seed + 4)


def language_model(
    *, num_layers: int = 2, num_heads: int = 4, vocabulary: int = 50, padding: int = 0, head: str = "positions"
) -> onnx.ModelProto:
    """Tokens, blocks of attention with a residual connection, and a head; ``padding`` classes have no mass.

    Logits are of all ``"positions"``, of the ``"last"`` one ``(B, 1, V)``, or of the ``"sample"`` ``(B, V)``.
    """
    width = num_heads * 3
    build = GraphBuilder()
    state = build.op("Gather", random_projection(vocabulary, width, 9), "input_ids", name="state_0")
    for layer in range(num_layers):
        output = attend(build, state, state, "attention_mask", num_heads, layer)
        state = build.op("Add", state, output, name=f"state_{layer + 1}")
    if head == "sample":
        state = build.op("ReduceMax", state, [1], keepdims=0)
    if head == "last":
        ends = (build.const(np.array([number])) for number in (-1, 2**31, 1))
        state = build.op("Slice", state, *ends)
    weight = np.pad(4 * random_projection(width, vocabulary, 8), [(0, 0), (0, padding)])
    bias = np.repeat(np.float32([0, -1e4]), [vocabulary, padding])
    build.op("Add", build.op("MatMul", state, weight), bias, name="logits")
    inputs = {name: (TensorProto.INT64, ["batch", "length"]) for name in ("input_ids", "attention_mask")}
    return build.model(inputs, ["logits"])


def _join_heads(build: GraphBuilder, context: str, source: str, layout: str, num_heads: int, d_v: int) -> str:
    width = np.array([0, 0, num_heads * d_v])
    if layout == "batch-folded":
        shape = build.op("Shape", source)
        return build.op("Reshape", build.op("Transpose", context, perm=[1, 0, 2]), shape)
    if layout == "heads-folded":
        rows = build.op("Slice", build.op("Shape", context), [1], [3])
        shape = build.op("Concat", [num_heads, -1], rows, axis=0)
        context = build.op("Reshape", context, shape)
    order = [0, 2, 1, 3] if layout == "batch-heads" else [1, 2, 0, 3]
    return build.op("Reshape", build.op("Transpose", context, perm=order), width)


def _project(build: GraphBuilder, flat: str, weight: NDArray[Any], projection: str) -> str:
    if projection == "matmul":
        return build.op("MatMul", flat, weight)
    if projection == "transposed":  # a Linear's weight, transposed in the graph
        return build.op("MatMul", flat, build.op("Transpose", weight.T.copy(), perm=[1, 0]))
    if projection == "gemm":
        rows = build.op("Reshape", flat, [-1, weight.shape[0]])
        bias = build.const(np.zeros(weight.shape[1], weight.dtype))
        return build.op("Gemm", rows, weight.T.copy(), bias, transB=1)
    raise ValueError(projection)


def run_session(session: Any, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """All outputs of a session by name."""
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def squeeze_and_compare(
    model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]], heads: int = 1, **options: Any
) -> tuple[dict[str, NDArray[Any]], SiteFactors]:
    """The first site's tensors by their names in a layer, and its factors, once every site is compared with NumPy.

    The graph's merged maps are those that the reference makes of the graph's own maps and values, and maps are the
    softmax of the queries and keys that are found for them.
    """
    sites = find_sites(model)
    assert sites
    assert all(site.supported for site in sites), [site.reason for site in sites]
    graph = squeeze_graph(model, tuple(enumerate(sites)), PrecomputeOptions(heads, **options), check_outputs=True)
    outputs = _run_on(graph.model, feeds)
    for layer in graph.layers:
        assert outputs[layer.names["probs"]].std() > 0.01, "maps that are all alike compare nothing"
    compare_with_reference(graph, outputs)
    factors = find_factors(model, sites)
    is_rounded = any(node.op_type == "QuantizeLinear" for node in model.graph.node)
    for found in factors:
        if found.supported and not is_rounded:
            _check_factors(model, found, feeds)
    names = graph.layers[0].names
    return {part: outputs[name] for part, name in names.items() if name in outputs}, factors[0]


def _check_factors(model: onnx.ModelProto, factors: SiteFactors, feeds: Mapping[str, NDArray[Any]]) -> None:
    body = Body("test/", 18)
    names = ("queries", "keys", "probs")
    for name, tensor in zip(names, (*add_factors(body, factors), site_tensors(body, factors.site)[0]), strict=True):
        body.output(body.op("Cast", tensor, to=FLOAT), name, FLOAT, rank=4)
    outputs = _run_on(assemble_graph(model, body), feeds)
    queries, keys, probs = (outputs[name].astype(np.float64) for name in names)
    heads = factors.site.num_heads or 0
    assert queries.shape == (*probs.shape[:3], factors.d)
    assert keys.shape == (probs.shape[0], factors.num_kv_heads, probs.shape[3], factors.d)
    logits = factors.scale * queries @ keys.repeat(heads // factors.num_kv_heads, axis=1).swapaxes(2, 3)
    powers = np.where(probs > 0, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    sums = powers.sum(axis=-1, keepdims=True)
    casts = [attribute.i for node in model.graph.node for attribute in node.attribute if attribute.name == "to"]
    limit = load_tolerances()["graph"]["probs"]["float16" if TensorProto.FLOAT16 in casts else "float32"]
    np.testing.assert_allclose(powers / np.where(sums > 0, sums, 1), probs, atol=limit)


def _run_on(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    session = open_session(model, num_threads=1)
    return run_session(session, {value.name: feeds[value.name] for value in session.get_inputs()})


def read_site(model: onnx.ModelProto, feeds: Mapping[str, NDArray[Any]], layer: int = 0) -> tuple[Any, Any]:
    """A site's maps ``(B, H, L, S)`` and value outputs, straight from onnxruntime."""
    site, whole = find_sites(model)[layer], onnx.ModelProto()
    whole.CopyFrom(model)
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in (site.probs, site.values))
    probs, values = open_session(whole, num_threads=1).run([site.probs, site.values], dict(feeds))
    return probs, value_outputs(values, projection_of(site))


def saved(model: onnx.ModelProto, folder: Path, name: str = "teacher.onnx") -> Path:
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / name)
    return folder / name


def only_site(model: onnx.ModelProto) -> AttentionSite:
    (site,) = find_sites(model)
    return site


def reason_of(model: onnx.ModelProto) -> str:
    """Why the only site cannot be squeezed."""
    site = only_site(model)
    assert not site.supported
    return str(site.reason)


def token_samples(count: int, length: int, *, least: int = 2, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Inputs of ``token_teacher`` and ``language_model``, of ``least`` to ``length`` tokens."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(length) < rng.integers(least, length + 1, count)[:, None]).astype(np.int64)
    return {"input_ids": rng.integers(0, 50, (count, length)), "attention_mask": mask}


def vector_samples(count: int, length: int, *, least: int = 2, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Inputs of ``encoder_layer``, of ``least`` to ``length`` positions."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(length) < rng.integers(least, length + 1, count)[:, None]).astype(np.int64)
    return {"x": 2 * rng.normal(size=(count, length, 12)).astype(np.float32), "mask": mask}


def bare_samples(count: int, rows: int, keys: int | None = None, *, num_layers: int = 1) -> dict[str, NDArray[Any]]:
    """Inputs of ``bare_attention`` of four heads."""
    rng, keys = np.random.default_rng(0), keys or rows
    arrays: dict[str, NDArray[Any]] = {"mask": np.ones((count, rows), np.int64)}
    for layer in range(num_layers):
        arrays[f"logits_{layer}"] = 2 * rng.normal(size=(count, 4, rows, keys)).astype(np.float32)
        arrays[f"values_{layer}"] = rng.normal(size=(count, 4, keys, 4)).astype(np.float32)
    return arrays
