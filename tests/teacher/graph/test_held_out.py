"""One small attention block as the common tools write it: exporters, optimiser, quantisers, converter to half.

Nothing here is built to suit the walker: each graph comes from a tool with its default options.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="the graphs are exported from torch")
pytest.importorskip("onnxscript", reason="torch exports through onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
quantization = pytest.importorskip("onnxruntime.quantization")

from support.attention_graphs import reason_of, squeeze_and_compare  # noqa: E402
from support.exporter import quicken_exports  # noqa: E402  (after the skips)

from shd_ref.teacher import AttentionSite, find_sites, load_teacher  # noqa: E402

quicken_exports()
WIDTH, HEADS = 16, 4


class Attention(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is imported by name
    """Self-attention by the operators that a textbook uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = torch.nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Any) -> list[Any]:
        batch, length, _ = x.shape
        return [layer(x).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for layer in self.projections]

    def attend(self, query: Any, key: Any, value: Any) -> Any:
        return torch.softmax(query @ key.transpose(-1, -2) / 2, -1) @ value

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        return self.output(self.attend(*self.heads(x)).transpose(1, 2).reshape(batch, length, WIDTH))


class Fused(Attention):
    """By PyTorch's own fused function, with a causal mask."""

    def attend(self, query: Any, key: Any, value: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class ByEinsum(Attention):
    """By two einsums."""

    def attend(self, query: Any, key: Any, value: Any) -> Any:
        probs = torch.softmax(torch.einsum("bhld,bhsd->bhls", query, key) / 2, -1)
        return torch.einsum("bhls,bhsd->bhld", probs, value)


class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
    """PyTorch's own module, attending to the first positions only."""

    def __init__(self, memory: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.memory = memory

    def forward(self, x: Any) -> Any:
        read = x if self.memory is None else x[:, : self.memory]
        return self.attention(x, read, read, need_weights=False)[0]


def export(module: Any, path: Path, *, dynamo: bool) -> Path:
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=3)}
    how: dict[str, Any] = {"dynamo": True, "dynamic_shapes": (axes,), "verbose": False}
    if not dynamo:
        how = {"dynamo": False, "opset_version": 14, "dynamic_axes": {"x": {0: "batch", 1: "length"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn of themselves
        torch.onnx.export(module.eval(), (torch.randn(2, 5, WIDTH),), str(path), input_names=["x"], **how)
    return path


def exported(make: Callable[[], Any], *, dynamo: bool) -> Callable[[Path], Path]:
    return lambda folder: export(make(), folder / "teacher.onnx", dynamo=dynamo)


def plain(folder: Path) -> Path:
    return export(Attention(), folder / "plain.onnx", dynamo=False)


def dynamic_int8(**options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        quantization.quantize_dynamic(plain(folder), folder / "teacher.onnx", **options)
        return folder / "teacher.onnx"

    return make


class Samples(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
    """Three batches, as static quantisation wants them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.batches = iter([{"x": rng.normal(size=(2, 5, WIDTH)).astype(np.float32)} for _ in range(3)])

    def get_next(self) -> Any:
        return next(self.batches, None)


def static_int8(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        form = getattr(quantization.QuantFormat, name)
        quantization.quantize_static(plain(folder), folder / "teacher.onnx", Samples(), quant_format=form)
        return folder / "teacher.onnx"

    return make


def optimised(folder: Path) -> Path:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "teacher.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(plain(folder)), options, providers=["CPUExecutionProvider"])
    return folder / "teacher.onnx"


def half(folder: Path) -> Path:
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    onnx.save(float16.convert_float_to_float16(onnx.load(plain(folder)), keep_io_types=True), folder / "teacher.onnx")
    return folder / "teacher.onnx"


SQUEEZED: dict[str, Callable[[Path], Path]] = {
    "traced": exported(Attention, dynamo=False),
    "fused function, traced": exported(Fused, dynamo=False),
    "cross attention": exported(lambda: Module(2), dynamo=True),
    "einsum, traced": exported(ByEinsum, dynamo=False),
    "int8 weights": dynamic_int8(),
    "int8 weights per channel": dynamic_int8(per_channel=True),
    "quantised and dequantised": static_int8("QDQ"),
    "optimised": optimised,
    "half": half,
}


# torch.export takes seconds to start.
SLOW = [pytest.param(name, marks=pytest.mark.slow) if "cross" in name else name for name in SQUEEZED]


@pytest.mark.parametrize("name", SLOW)
def test_supported_graphs_equal_the_reference_on_their_own_maps(name: str, tmp_path: Path) -> None:
    model = load_teacher(SQUEEZED[name](tmp_path))
    (site,) = find_sites(model)
    assert site.supported, site.reason
    assert (site.num_heads, site.num_kv_heads, site.d_k, site.d_v, site.d_model) == (4, 4, 4, 4, 16)
    check_projection(name, site)
    x = 2 * np.random.default_rng(0).normal(size=(3, 7, WIDTH)).astype(np.float32)
    tensors, factors = squeeze_and_compare(model, {model.graph.input[0].name: x}, heads=2)
    assert tensors["probs"].shape == (3, HEADS, 7, 2 if name == "cross attention" else 7)
    assert (factors.supported, factors.num_kv_heads) == (True, HEADS)


def check_projection(name: str, site: AttentionSite) -> None:
    """W_o is the module's own weight, as closely as the graph holds it."""
    weight = (Module().attention.out_proj if "cross" in name else Attention().output).weight.detach().numpy().T
    atol = (
        1.5 * np.abs(weight).max() / 127 if "int8" in name or "quantised" in name else 1e-3 if name == "half" else 0
    )
    assert site.output_projection is not None
    np.testing.assert_allclose(site.output_projection, weight, atol=atol)


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "int8 products": (dynamic_int8(extra_options={"MatMulConstBOnly": False}), "meet in MatMulInteger"),
    "int8 operators": (static_int8("QOperator"), "QLinearSoftmax"),
    "module with sizes traced in": (exported(Module, dynamo=False), "left the sizes of its example in the constants"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_graphs_are_refused_for_the_right_reason(name: str, tmp_path: Path) -> None:
    make, reason = REFUSED[name]
    assert reason in reason_of(load_teacher(make(tmp_path)))
