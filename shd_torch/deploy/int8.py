"""A graph with its products in int8, in operators of onnxruntime, and what that costs in quality."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, import_package, need
from shd_torch.deploy.inputs import GraphInputs, open_graph, require_runtime, run_graph
from shd_torch.shrink.folders import check_positions

_EXTERNAL_DATA_BYTES: Final = 1 << 30  # a protobuf file ends at 2 GiB
DRAWN_SAMPLES: Final = (8, 32)
"""Number and greatest length of the random samples that a graph is compared on where no data are given."""
_CALIBRATION_SAMPLES: Final = (32, 64)
_MOST_COMPARED: Final = 64  # samples of the data
_ALONE: Final = 8  # samples that are run alone as well
_LOWEST_OPSET: Final = 11  # with DynamicQuantizeLinear


@dataclass(frozen=True)
class Int8Report:
    """The files of ``quantize_graph``, and how far its first output is from the float graph's.

    Attributes:
        path: the ONNX file.
        data_path: the file of weights next to it, or None where they are inside.
        num_products: how many products have int8 weights.
        bytes_before: size of the float graph with its weights.
        bytes_after: size of the int8 graph with its weights.
        is_random: whether it was compared on random inputs, not on data.
        num_rows: output vectors that were compared, those of padding left out.
        cosine: mean cosine between the two graphs' output vectors; of single numbers their correlation.
        agreement: share of rows in which the largest logit is the same; None where the output is no logits, or one.
        kl: mean divergence from the float to the int8 distribution, in nats per row; None as ``agreement``.
        alone: least cosine between a row of a sample that is run alone and the same row in a batch: what activation
            functions give is rounded in a range that all samples of a run share. 1.0 where the graph has no batch.
    """

    path: Path
    data_path: Path | None
    num_products: int
    bytes_before: int
    bytes_after: int
    is_random: bool
    num_rows: int
    cosine: float
    agreement: float | None
    kl: float | None
    alone: float

    def describe(self) -> str:
        """The cost in quality, in a few words."""
        text = f"cosine {self.cosine:.4f}"
        if self.agreement is not None and self.kl is not None:
            text = f"same largest logit in {100 * self.agreement:.1f}%, KL {self.kl:.2g} nats, {text}"
        kind = "random inputs" if self.is_random else "data"
        alone = f"a sample alone and in a batch: at least {self.alone:.4f}"
        return f"{text} to the float graph over {self.num_rows} rows of {kind}; {alone}"


def quantize_graph(
    graph: str | os.PathLike[str], out: str | os.PathLike[str], inputs: Mapping[str, NDArray[Any]] | None = None
) -> Int8Report:
    """Write a graph with its products in int8, run both and compare them.

    ``MatMul`` and ``Gemm`` with constant weights get int8 weights with one scale per output channel. Channels of
    activations with outliers are divided, and rows of the weights multiplied in turn; activations are rounded in a
    constant range after norms and attention and where there are no outliers, and in the range of the run elsewhere;
    the mean error of a product goes into its bias. Embeddings, norms and attention stay in float. Integer sums are
    the same on every processor: none saturates.

    Args:
        graph: an ``.onnx`` file.
        out: where to write the new graph; a large one has its weights in a file next to it.
        inputs: arrays of samples by name, 16 or more of the data that the graph will see: every second one gives
            ranges and means, the others, at most 64, are compared; all do both if the graph fixes their number.
            Default: random token ids and pixels; then all ranges are those of the run, and quality is lower.

    Raises:
        ShdError: ``dependency-missing`` (onnx, onnx-ir, onnxruntime), ``read-failed``, ``inputs-invalid``,
            ``write-failed``, ``export-failed`` where no product has constant weights or the graph cannot be
            quantised, ``not-finite`` where either graph gives NaN or infinity. ``out`` is then left as it was.
    """
    require_runtime()
    import_package("onnx_ir", "onnx-ir must be installed: pip install '.[cpu]' (in a checkout)")
    import onnx_ir as ir

    from shd_ref.teacher.opening.model import saving_graph
    from shd_torch.deploy.products import Product, find_sites, measure, plan, rewrite

    source, target = Path(graph), Path(out)
    if target.suffix != ".onnx" or target.resolve() == source.resolve():
        raise ShdError("argument-value", f"out must end in .onnx and be another file than {source}; got {target}")
    reader = GraphInputs(source)
    arrays, calibration = _split_samples(inputs, reader)
    expected = run_graph(reader.session, arrays, source)[0]
    del reader.session  # its weights need no memory next to those that are rounded
    model, before = ir.load(source), count_bytes(source)
    sites = find_sites(model)
    need(bool(sites), "export-failed", str(source), "hold a float product with constant weights", "none")
    opset = model.opset_imports.get("", 0)
    need(opset >= _LOWEST_OPSET, "export-failed", str(source), f"have opset {_LOWEST_OPSET} or higher", opset)
    measure(model, sites, calibration, reader)
    products: dict[ir.Value, Product] = {}
    for site in sites:
        plan(site, products, has_ranges=inputs is not None, has_means=inputs is not None or "input_ids" in arrays)
        products |= {product.output: product for product in site.products}
    rewrite(model, sites)
    estimate = before - 3 * sum(product.rounded.size for product in products.values())  # of four bytes, one stays
    with saving_graph(model, target, large=estimate > _EXTERNAL_DATA_BYTES) as (written, data_path):
        after, session = count_bytes(written), open_graph(written)
        output = run_graph(session, arrays, target)[0]
        quality = _compare(expected, output, arrays, is_logits=reader.output.endswith("logits"), name=source)
        alone = _compare_alone(session, output, arrays, reader)
    return Int8Report(target, data_path, len(products), before, after, inputs is None, *quality, alone)


def count_bytes(graph: Path) -> int:
    """Bytes of a graph with its files of weights."""
    import onnx

    tensors = onnx.load(graph, load_external_data=False).graph.initializer
    entries = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    return sum((graph.parent / name).stat().st_size for name in {graph.name, *entries})


def _split_samples(
    inputs: Mapping[str, NDArray[Any]] | None, reader: GraphInputs
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Samples to compare on, and others to find ranges by."""
    if inputs is None:
        (count, length), (more, longer) = DRAWN_SAMPLES, _CALIBRATION_SAMPLES
        return reader.draw(count, reader.longest(length)), reader.draw(more, reader.longest(longer), seed=1)
    arrays = _match_inputs(inputs, reader)
    if len(next(iter(arrays.values()))) < 2 or not reader.has_batch:
        return arrays, arrays
    compared = {name: array[: 2 * _MOST_COMPARED : 2] for name, array in arrays.items()}
    return compared, {name: array[1::2] for name, array in arrays.items()}


def _match_inputs(inputs: Mapping[str, NDArray[Any]], reader: GraphInputs) -> dict[str, NDArray[Any]]:
    """The arrays that the graph takes, as it takes them; a mask that is not given is all ones."""
    ids = inputs.get("input_ids")
    mask = {} if ids is None else {"attention_mask": np.ones(ids.shape, np.int64)}
    arrays = {**mask, **inputs}
    missing = sorted(reader.dtypes.keys() - arrays.keys())
    if missing:
        rule = f"data must hold the inputs of {reader.path}"
        raise ShdError("inputs-invalid", f"{rule}; {', '.join(missing)} is missing")
    if ids is not None and ids.ndim == 2:
        check_positions(inputs, reader.longest(ids.shape[1]))
    return {name: np.asarray(arrays[name]).astype(dtype) for name, dtype in reader.dtypes.items()}


def _compare(
    expected: NDArray[Any], output: NDArray[Any], inputs: Mapping[str, NDArray[Any]], *, is_logits: bool, name: Path
) -> tuple[int, float, float | None, float | None]:
    """Rows, cosine, agreement and KL in the order of ``Int8Report``."""
    for array, kind in ((expected, "float"), (output, "int8")):
        if not np.isfinite(array).all():
            raise ShdError("not-finite", f"{name} must give finite output; as {kind} it gives NaN or infinity")
    mask = inputs.get("attention_mask")
    counted = np.ones(expected.shape[:-1], bool)
    if mask is not None and expected.ndim > 2 and mask.shape == expected.shape[:2]:
        counted = mask.astype(bool)
    a, b = expected[counted].astype(np.float64), output[counted].astype(np.float64)
    cosine = float(_cosines(a, b).mean())
    if not is_logits or a.shape[-1] == 1:  # one logit is always the largest
        return len(a), cosine, None, None
    log_p, log_q = (x - x.max(-1, keepdims=True) for x in (a, b))
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (log_p, log_q))
    kl = float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())
    return len(a), cosine, float((a.argmax(-1) == b.argmax(-1)).mean()), kl


def _compare_alone(
    session: Any, output: NDArray[Any], inputs: Mapping[str, NDArray[Any]], reader: GraphInputs
) -> float:
    """The least cosine of rows between samples alone and in their batch."""
    from shd_torch.deploy.products import without_padding

    pairs = []
    for index in range(min(_ALONE, len(output)) if reader.has_batch else 0):
        sample = without_padding({name: array[index : index + 1] for name, array in inputs.items()}, reader)
        alone = run_graph(session, sample, reader.path)[0][0]
        rows, others = (a.reshape(-1, a.shape[-1]).astype(np.float64) for a in (alone, output[index][: len(alone)]))
        if rows.shape == others.shape:  # not where a further axis was cut with the padding
            pairs.append((rows, others))
    return min(1.0, *_cosines(*map(np.concatenate, zip(*pairs, strict=True))).tolist()) if pairs else 1.0


def _cosines(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """One for each pair of rows; for rows of one number, such as scores, one in all: their correlation."""
    if a.shape[-1] == 1:
        a, b = a.T - a.mean(), b.T - b.mean()
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.asarray((a * b).sum(-1) / np.maximum(norms, np.finfo(np.float64).tiny))
