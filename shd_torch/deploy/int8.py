"""A graph with its products in int8, by onnxruntime's dynamic quantisation, and what that costs in quality."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.storage import write_errors
from shd_ref.errors import ShdError
from shd_torch.deploy.inputs import GraphInputs, open_graph, require_runtime, run_graph
from shd_torch.shrink.folders import check_positions

_INTEGER_PRODUCTS: Final = ("MatMulInteger", "DynamicQuantizeMatMul")
_EXTERNAL_DATA_BYTES: Final = 1 << 30  # a protobuf file ends at 2 GiB
DRAWN_SAMPLES: Final = (8, 32)
"""Number and greatest length of the random samples that a graph is compared on where no data are given."""


@dataclass(frozen=True)
class Int8Report:
    """What ``quantize_graph`` wrote, and how far its first output is from the float graph's.

    Attributes:
        path: the ONNX file.
        data_path: the file of weights beside it, or None where they are inside.
        num_products: how many products have int8 weights.
        bytes_before: size of the float graph with its weights.
        bytes_after: size of the int8 graph with its weights.
        is_random: whether it was compared on random inputs, not on data.
        num_rows: output vectors that were compared, those of padding left out.
        cosine: mean cosine between the two graphs' output vectors.
        agreement: share of rows in which the largest logit is the same; None where the output is no logits.
        kl: mean divergence from the float to the int8 distribution, in nats per row; None as ``agreement``.
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

    def describe(self) -> str:
        """The cost in quality, in a few words."""
        text = f"cosine {self.cosine:.4f}"
        if self.agreement is not None and self.kl is not None:
            text = f"same largest logit in {100 * self.agreement:.1f}%, KL {self.kl:.2g} nats, {text}"
        return (
            f"{text} to the float graph over {self.num_rows} rows of {'random inputs' if self.is_random else 'data'}"
        )


def quantize_graph(
    graph: str | os.PathLike[str], out: str | os.PathLike[str], inputs: Mapping[str, NDArray[Any]] | None = None
) -> Int8Report:
    """Write a graph with its products in int8, run both and compare them.

    ``MatMul`` and ``Gemm`` with constant weights get int8 weights with one scale per output channel; activations are
    quantised while the graph runs. Embeddings, norms and attention stay in float. Weights use 7 of the 8 bits, as
    onnxruntime advises for processors without VNNI, where sums of two 16-bit products saturate: the graph then gives
    the same output on every processor.

    Args:
        graph: an ``.onnx`` file.
        out: where to write the new graph; weights of a large one lie beside it, as ``export_student`` writes them.
        inputs: arrays by name to compare on. Default: random token ids and pixels.

    Raises:
        ShdError: ``dependency-missing`` (onnx, onnxruntime), ``read-failed``, ``inputs-invalid``, ``write-failed``,
            ``export-failed`` where no product has constant weights or the graph cannot be quantised, ``not-finite``
            where either graph gives NaN or infinity. ``out`` is then left as it was.
    """
    require_runtime()
    import onnx
    import onnx_ir as ir
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from shd_ref.teacher.opening.model import saving_graph

    source, target = Path(graph), Path(out)
    if target.suffix != ".onnx" or target.resolve() == source.resolve():
        raise ShdError("argument-value", f"out must end in .onnx and be another file than {source}; got {target}")
    reader = GraphInputs(source)
    samples, length = DRAWN_SAMPLES
    arrays = reader.draw(samples, reader.longest(length)) if inputs is None else _fit(inputs, reader, source)
    expected = run_graph(open_graph(source), arrays, source)[0]
    before = _size(source)
    with tempfile.TemporaryDirectory() as folder, write_errors(folder):
        draft = Path(folder) / "int8.onnx"
        disabled = logging.root.manager.disable
        try:
            logging.disable(logging.WARNING)  # advice to preprocess, which would inline fused attention
            quantize_dynamic(
                onnx.load(source),  # of a path it writes a copy beside it, which a full disk cuts in silence
                draft,
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                reduce_range=True,
                weight_type=QuantType.QInt8,
                use_external_data_format=before > _EXTERNAL_DATA_BYTES,
            )
        except OSError:
            raise
        except Exception as error:  # onnx's and onnxruntime's exceptions share no base class
            raise ShdError("export-failed", f"{source} must be quantised by onnxruntime; got {error}") from error
        finally:
            logging.disable(disabled)
        model = ir.load(draft)
        num_products = sum(node.op_type in _INTEGER_PRODUCTS for node in model.graph.all_nodes())
        if not num_products:
            raise ShdError("export-failed", f"{source} must hold a float product with constant weights; it has none")
        after = _size(draft)
        with saving_graph(model, target, large=after > _EXTERNAL_DATA_BYTES) as (written, data_path):
            output = run_graph(open_graph(written), arrays, target)[0]
            quality = _compare(expected, output, arrays, is_logits=reader.output.endswith("logits"), name=source)
    return Int8Report(target, data_path, num_products, before, after, inputs is None, *quality)


def _fit(inputs: Mapping[str, NDArray[Any]], reader: GraphInputs, graph: Path) -> dict[str, NDArray[Any]]:
    """The arrays that the graph takes, as it takes them; a mask that is not given is all ones."""
    ids = inputs.get("input_ids")
    mask = {} if ids is None else {"attention_mask": np.ones(ids.shape, np.int64)}
    arrays = {**mask, **inputs}
    missing = sorted(reader.dtypes.keys() - arrays.keys())
    if missing:
        raise ShdError("inputs-invalid", f"data must hold the inputs of {graph}; {', '.join(missing)} is missing")
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
    has_padding = mask is not None and expected.ndim > 2 and mask.shape == expected.shape[:2]
    keep = mask.astype(bool) if has_padding and mask is not None else np.ones(expected.shape[:-1], bool)
    a, b = expected[keep].astype(np.float64), output[keep].astype(np.float64)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosine = float(np.mean((a * b).sum(-1) / np.maximum(norms, np.finfo(np.float64).tiny)))
    if not is_logits:
        return len(a), cosine, None, None
    log_p, log_q = (x - x.max(-1, keepdims=True) for x in (a, b))
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (log_p, log_q))
    kl = float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())
    return len(a), cosine, float((a.argmax(-1) == b.argmax(-1)).mean()), kl


def _size(graph: Path) -> int:
    """Bytes of a graph with its weights."""
    import onnx

    tensors = onnx.load(graph, load_external_data=False).graph.initializer
    entries = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    return sum((graph.parent / name).stat().st_size for name in {graph.name, *entries})
