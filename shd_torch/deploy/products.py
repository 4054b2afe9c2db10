"""Products of a graph in int8: which there are, the rows that they meet, and how rows and weights are rounded.

In the order of work: ``find_sites`` lists the products with constant weights by the value that they read;
``measure`` runs the float graph and keeps rows of these values; ``plan`` divides channels with outliers by what the
weights can bear, chooses ranges and rounds the weights; ``rewrite`` puts integer products in their places.

Sources: SmoothQuant (arXiv 2211.10438) for the division of channels; bias correction after arXiv 1906.04721.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from shd_ref.cache.storage.storage import write_errors
from shd_torch.deploy.inputs import GraphInputs, open_graph, run_graph

Floats = NDArray[np.float32]

_NORMS: Final = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
_PASSING: Final = ("Reshape", "Slice", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_EXPONENTS: Final = tuple(round(0.1 * i, 1) for i in range(1, 11))  # SmoothQuant's alpha: how much the weights bear
_CLIPS: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # shares of the data's range that a fixed one may have
_WORTH: Final = {"norm": 0.8, "attention": 0.3, "other": 0.3}
"""The error, as a share of the one before, at which a division is worth a separate ``Mul``.

It takes 0.3% of the time after a norm, and four times as much in the middle of an FFN. There a share below this also
tells values with outliers, whose range differs from text to text, from those of which one range fits all.
"""
_KEPT_BYTES: Final = 1 << 29  # of rows, all sites together
_RUN_BYTES: Final = 1 << 28  # of the values that one run of the float graph gives
_MOST_SAMPLES: Final = 16  # of a run
_MOST_ROWS: Final = 7000  # beyond, the mean error of a product no longer changes
_SEARCHED_ROWS: Final = (64, 1000)
_SEARCHED_COST: Final = 1e8  # multiplications of one trial: seconds for a large model, not minutes
_SMALLEST: Final = 1e-12  # in place of a zero that is divided by: columns of zeros, and products without error


@dataclass
class Product:
    """One ``MatMul`` or ``Gemm`` with constant weights, and the ``Add`` of its bias."""

    node: ir.Node
    weight: ir.Value
    is_transposed: bool
    bias: ir.Value | None = None
    add: ir.Node | None = None
    rounded: NDArray[np.int8] = field(init=False)  # (K, N), of ``plan``
    scales: Floats = field(init=False)  # (N,)
    offset: Floats = field(init=False)  # (N,), the bias less the mean error

    def read(self) -> Floats:
        """The weights as ``(K, N)``."""
        matrix = np.asarray(_constant(self.weight), np.float32)
        return matrix.T if self.is_transposed else matrix

    @property
    def output(self) -> ir.Value:
        """The product with its bias."""
        return (self.add or self.node).outputs[0]


@dataclass
class Site:
    """A value that products read, with rows of it: ``(rows, K)``, and the range of each channel over all rows."""

    source: ir.Value
    products: list[Product]
    kind: str = "other"
    shares_weights: bool = False  # with products of another value, as where layers are the same
    rows: Floats = field(init=False)
    low: Floats = field(init=False)
    high: Floats = field(init=False)
    divisor: Floats | None = None  # that a separate Mul applies
    range: tuple[float, float] | None = None  # None: each run finds its own


def find_sites(model: ir.Model) -> list[Site]:
    """The values that are multiplied with constant weights, in the order of the graph."""
    sites: dict[ir.Value, Site] = {}
    for node in model.graph:
        if (product := _product(node)) is not None and (source := node.inputs[0]) is not None:
            site = sites.setdefault(source, Site(source, [], _kind(source)))
            site.products.append(product)
    counts = Counter(product.weight for site in sites.values() for product in site.products)
    for site in sites.values():
        site.shares_weights = any(counts[product.weight] > 1 for product in site.products)
    return list(sites.values())


def _product(node: ir.Node) -> Product | None:
    if node.domain or node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    array = _constant(weight)
    if weight is None or array is None or array.ndim != 2 or array.dtype != np.float32:
        return None
    if node.op_type == "Gemm":
        attributes = {name: node.attributes[name].value for name in node.attributes}
        if attributes.get("alpha", 1.0) != 1 or attributes.get("beta", 1.0) != 1 or attributes.get("transA", 0):
            return None
        is_transposed, bias = bool(attributes.get("transB", 0)), node.inputs[2] if len(node.inputs) > 2 else None
        size = array.shape[0 if is_transposed else 1]
        return Product(node, weight, is_transposed, bias) if bias is None or _is_vector(bias, size) else None
    product, users = Product(node, weight, False), list(node.outputs[0].uses())
    if len(users) == 1 and users[0].node.op_type == "Add" and not node.outputs[0].is_graph_output():
        add = users[0].node
        bias = add.inputs[1 - users[0].idx]
        if bias is not None and _is_vector(bias, array.shape[1]):
            product.add, product.bias = add, bias
    return product


def _constant(value: ir.Value | None) -> NDArray[Any] | None:
    return None if value is None or value.const_value is None or value.is_graph_input() else value.const_value.numpy()


def _is_vector(value: ir.Value, size: int) -> bool:
    array = _constant(value)
    return array is not None and array.shape == (size,) and array.dtype == np.float32


def _kind(source: ir.Value) -> str:
    """Norms' outputs and averages of values have known bounds; activation functions have rare outliers."""
    node = source.producer()
    while node is not None and node.op_type in _PASSING and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None:
        return "other"
    if node.op_type in _NORMS or (node.op_type == "Mul" and any(_scales_channels(v) for v in node.inputs)):
        return "norm"
    is_average = node.op_type == "MatMul" and all(_constant(v) is None for v in node.inputs)
    return "attention" if is_average or "Attention" in node.op_type else "other"


def _scales_channels(value: ir.Value | None) -> bool:
    array = _constant(value)
    return array is not None and array.ndim == 1 and array.size > 1


def measure(model: ir.Model, sites: Sequence[Site], inputs: Mapping[str, NDArray[Any]], reader: GraphInputs) -> None:
    """Run the float graph; give each site rows of its value, padding left out, and the range of each channel."""
    outputs = model.graph.outputs
    added = [site.source for site in sites if not (site.source.is_graph_output() or site.source.is_graph_input())]
    for value in added:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    with tempfile.TemporaryDirectory() as folder, write_errors(folder):
        path = Path(folder) / "measured.onnx"
        outputs.extend(added)
        try:
            ir.save(model, path, external_data="weights")
        finally:
            for _ in added:  # onnx_ir does not follow a deleted slice
                outputs.pop()
        session = open_graph(path)
    names = [output.name for output in session.get_outputs()]
    width = sum(site.products[0].read().shape[0] for site in sites)
    batches = list(_batches(inputs, width, reader))
    most = min(_MOST_ROWS, max(_SEARCHED_ROWS[0], _KEPT_BYTES // (4 * width)))
    random = np.random.default_rng(0)
    parts: dict[str, list[Floats]] = {}
    for batch in batches:
        values = dict(zip(names, run_graph(session, batch, reader.path), strict=True)) | dict(batch)
        for site in sites:
            rows = _rows(values[str(site.source.name)], batch)
            low, high = rows.min(0), rows.max(0)
            if site.source.name in parts:
                low, high = np.minimum(low, site.low), np.maximum(high, site.high)
            site.low, site.high = low, high
            chosen = random.permutation(len(rows))[: -(-most // len(batches))]
            parts.setdefault(str(site.source.name), []).append(rows[chosen])
    for site in sites:
        rows = np.concatenate(parts.pop(str(site.source.name)))
        site.rows = rows[random.permutation(len(rows))]


def _batches(
    inputs: Mapping[str, NDArray[Any]], width: int, reader: GraphInputs
) -> Iterator[dict[str, NDArray[Any]]]:
    """As many samples at a time as memory has room for; all, if the graph fixes how many it takes."""
    samples = len(next(iter(inputs.values())))
    length = max((array.shape[1] for array in inputs.values() if array.ndim == 2), default=_MOST_SAMPLES**2)
    size = min(_MOST_SAMPLES, max(1, _RUN_BYTES // (4 * width * length))) if reader.has_batch else samples
    for start in range(0, samples, size):
        yield without_padding({name: array[start : start + size] for name, array in inputs.items()}, reader)


def without_padding(inputs: Mapping[str, NDArray[Any]], reader: GraphInputs) -> dict[str, NDArray[Any]]:
    """Without the last columns, where they are padding in every sample and the graph takes fewer."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 2 or not mask.any():
        return dict(inputs)
    # A decoder's inputs have their own mask, also where both have as many columns.
    columns = {name for name in inputs if not name.startswith("decoder_")}
    if any(inputs[name].shape != mask.shape or isinstance(reader.shapes[name][1], int) for name in columns):
        return dict(inputs)
    length = int(np.flatnonzero(mask.any(0)).max()) + 1
    return {name: array[:, :length] if name in columns else array for name, array in inputs.items()}


def _rows(value: NDArray[Any], inputs: Mapping[str, NDArray[Any]]) -> Floats:
    """Rows of channels, those of padding left out."""
    rows: Floats = np.asarray(value, np.float32).reshape(-1, value.shape[-1])
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = inputs.get(name)
        if mask is not None and value.ndim in (2, 3) and len(rows) == mask.size > len(mask):
            counted = mask.reshape(-1).astype(bool)
            return rows[counted] if counted.any() else rows
    return rows


def plan(site: Site, before: Mapping[ir.Value, Product], *, has_ranges: bool, has_means: bool) -> None:
    """Divide channels where that lowers the error, choose the range, round the weights; ``rewrite`` applies it.

    Of the division, what the graph can take on without a new operator is applied at once: to a norm, or to one of the
    products ``before``, by their outputs. Where the rows do not have the data's ranges, each run finds its own; where
    they do not have its means, the mean error stays. Channels with outliers are the same for any rows; a range with
    outliers after an activation function is that of each run too.
    """
    weight = np.concatenate([product.read() for product in site.products], 1)
    fewest, most = _SEARCHED_ROWS
    subset = site.rows[: int(min(most, max(fewest, _SEARCHED_COST / weight.size)))]
    expected = subset @ weight
    largest = np.maximum(np.abs(site.low), np.abs(site.high))
    divisor, share = _find_divisor(subset, weight, expected, largest)
    if site.shares_weights:  # which would no longer be the same
        divisor = None
    if divisor is not None and not _absorb(site, divisor, before):
        site.divisor = divisor = divisor if share <= _WORTH[site.kind] else None
    if divisor is not None:
        weight = weight * divisor[:, None]
        site.rows, site.low, site.high = site.rows / divisor, site.low / divisor, site.high / divisor
        subset = subset / divisor
    rounded, scales = round_weights(weight)
    ends = float(min(site.low.min(), 0)), float(max(site.high.max(), 0))
    has_outliers = divisor is not None or share <= _WORTH["other"]
    if has_ranges and (site.kind != "other" or not has_outliers):
        restored = rounded * scales
        errors = {c: _error(round_rows(subset, c * ends[0], c * ends[1]) @ restored, expected) for c in _CLIPS}
        clip = min(_CLIPS, key=errors.__getitem__)
        site.range = ends = clip * ends[0], clip * ends[1]
    lost = np.zeros(len(scales), np.float32)
    if has_means:  # the mean over rows of a product is the product of the mean row
        lost += site.rows.mean(0) @ weight - round_rows(site.rows, *ends).mean(0) @ (rounded * scales)
    start = 0
    for product in site.products:
        part = slice(start, start + product.read().shape[1])
        start = part.stop
        product.rounded, product.scales = rounded[:, part], scales[part]
        bias = np.zeros(1) if product.bias is None else np.asarray(_constant(product.bias))
        product.offset = (lost[part] + bias).astype(np.float32)
    del site.rows


def _find_divisor(rows: Floats, weight: Floats, expected: Floats, largest: Floats) -> tuple[Floats | None, float]:
    """Of each channel, and the error with it as a share of the one without; None where none lowers it."""
    before = _error(round_rows(rows) @ _restored(weight), expected)
    best: tuple[Floats | None, float] = None, before
    inputs, outputs = np.maximum(largest, 1e-5), np.maximum(np.abs(weight).max(1), 1e-5)
    for exponent in _EXPONENTS:
        divisor = inputs**exponent / outputs ** (1 - exponent)
        # Only channels with outliers: what is enlarged as well fits the rows at hand, and no others.
        divisor = np.maximum(divisor / np.median(divisor), 1).astype(np.float32)
        error = _error(round_rows(rows / divisor) @ _restored(weight * divisor[:, None]), expected)
        if error < best[1]:
            best = divisor, error
    return best[0], best[1] / max(before, _SMALLEST)


def round_weights(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Integers ``(K, N)`` and the scale of each column.

    Processors without VNNI add the products of two neighbours in K in 16 bits, and saturate: 255 (|a| + |b|) stays
    below 2^15 if |a| + |b| is at most 128. So a column's scale is set by its largest neighbours, not by half the
    range of all: most columns keep 8 bits, and the sums are the same on every processor.
    """
    sizes = np.abs(weight)
    pairs = sizes if len(sizes) % 2 == 0 else np.pad(sizes, ((0, 1), (0, 0)))
    largest = np.maximum(sizes.max(0), (pairs[0::2] + pairs[1::2]).max(0))
    scales = (np.maximum(largest, _SMALLEST) / 127).astype(np.float32)
    return np.clip(np.round(weight / scales), -127, 127).astype(np.int8), scales


def round_rows(rows: Floats, low: float | None = None, high: float | None = None) -> Floats:
    """Rows as unsigned 8-bit integers give them back, in the range from ``low`` to ``high`` or that of all."""
    ends = float(rows.min()) if low is None else low, float(rows.max()) if high is None else high
    scale, zero = _scale_and_zero(min(ends[0], 0.0), max(ends[1], 0.0))
    return (np.clip(np.round(rows / scale) + np.float32(zero), 0, 255) - np.float32(zero)) * scale


def _scale_and_zero(low: float, high: float) -> tuple[np.float32, np.uint8]:
    scale = np.float32(max(high - low, 1e-8) / 255)
    return scale, np.uint8(np.clip(np.round(-low / scale), 0, 255))


def _restored(weight: Floats) -> Floats:
    rounded, scales = round_weights(weight)
    return rounded * scales


def _error(actual: Floats, expected: Floats) -> float:
    return float(np.square(actual - expected).mean())


def _absorb(site: Site, divisor: Floats, before: Mapping[ir.Value, Product]) -> bool:
    """Whether weights before the site took the division on, without any operator more."""
    value, readers = site.source, {product.node for product in site.products}
    while True:
        node = value.producer()
        if node is None or value.is_graph_output() or not readers.issuperset(value.consumers()):
            return False
        if node.op_type not in ("Reshape", "Identity") or node.inputs[0] is None:
            break
        value, readers = node.inputs[0], {node}  # channels stay last
    constants = [i for i, v in enumerate(node.inputs) if v is not None and _is_vector(v, divisor.size)]
    if (node.op_type in _NORMS and constants == [*range(1, len(node.inputs))]) or (
        node.op_type == "Mul" and len(constants) == 1
    ):
        for index in constants:  # tensors of other norms may be the same: each gets its own
            array = np.asarray(_constant(node.inputs[index])) / divisor
            node.replace_input_with(index, _register(node.graph, f"int8/{value.name}/divided_{index}", array))
        return True
    if node.op_type == "Mul":  # of a gate and a product, in Llama and its like
        for factor in filter(None, node.inputs):
            product = before.get(factor)
            is_read_once = len(factor.uses()) == 1 and not factor.is_graph_output()
            if product is not None and is_read_once and product.scales.shape == divisor.shape:
                product.scales, product.offset = product.scales / divisor, product.offset / divisor
                return True
    return False


def rewrite(model: ir.Model, sites: Sequence[Site]) -> None:
    """Put the integer products of onnxruntime in the places of the float ones."""
    graph = model.graph
    model.opset_imports.setdefault("com.microsoft", 1)
    weights: dict[tuple[ir.Value, bool], ir.Value] = {}  # products of layers that are the same share theirs
    for site in sites:
        value, name = site.source, f"int8/{site.source.name}"
        if site.divisor is not None:
            factors = _register(graph, f"{name}/factors", 1 / site.divisor)
            (value,) = _insert(graph, site, "Mul", [value, factors], [f"{name}/divided"])
        if site.range is None:
            outputs = [f"{name}/{part}" for part in ("integers", "scale", "zero")]
            integers, scale, zero = _insert(graph, site, "DynamicQuantizeLinear", [value], outputs)
        else:
            step, origin = _scale_and_zero(*site.range)
            scale = _register(graph, f"{name}/scale", np.asarray(step))
            zero = _register(graph, f"{name}/zero", np.asarray(origin))
            (integers,) = _insert(graph, site, "QuantizeLinear", [value, scale, zero], [f"{name}/integers"])
        for product in site.products:
            base, key = f"int8/{product.node.outputs[0].name}", (product.weight, product.is_transposed)
            if key not in weights:
                weights[key] = _register(graph, f"{base}/weight", product.rounded)
            scales = _register(graph, f"{base}/scales", product.scales)
            offset = _register(graph, f"{base}/offset", product.offset)
            operands = [integers, weights[key], scale, scales, zero, None, offset]
            node = ir.Node("com.microsoft", "MatMulIntegerToFloat", operands, name=base)
            old = [product.node, *filter(None, [product.add])]
            ir.convenience.replace_nodes_and_values(graph, product.node, old, [node], [product.output], node.outputs)
    for value in [value for value in graph.initializers.values() if not value.uses()]:
        if not (value.is_graph_output() or value.is_graph_input()):
            del graph.initializers[str(value.name)]


def _insert(
    graph: Any, site: Site, operator: str, inputs: Sequence[ir.Value], outputs: Iterable[str]
) -> Sequence[ir.Value]:
    """The outputs of a node before the products of a site, which is named as the first of them."""
    values = [ir.Value(name=name) for name in outputs]
    node = ir.Node("", operator, inputs, outputs=values, name=values[0].name)
    graph.insert_before(site.products[0].node, node)
    return node.outputs


def _register(graph: Any, name: str, array: NDArray[Any]) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(np.array(array, order="C"), name=name))
    graph.register_initializer(value)
    return value
