"""A trained student goes out as ONNX: attention as one operator, equal to PyTorch, and timed beside its teacher."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript", reason="export needs onnxscript")
onnxruntime = pytest.importorskip("onnxruntime", reason="graphs are checked in onnxruntime")
pytest.importorskip("cyclopts", reason="the commands need cyclopts")

from support.commands import invoke  # noqa: E402  (after the skips)
from support.shrink.models import make_data, make_teacher  # noqa: E402  (after the skips)

import shd_torch.export as export  # noqa: E402
from shd_ref import ShdError  # noqa: E402  (after the skips)
from shd_torch.cli import load_app  # noqa: E402
from shd_torch.shrink import shrink  # noqa: E402
from shd_torch.shrink.folders import count_positions, read_config  # noqa: E402


@pytest.mark.slow
def test_a_dropped_student_from_its_folder(tmp_path: Path) -> None:
    """Heads merged, one attention and two FFNs dropped; the command finds its loader by itself."""
    teacher, data = make_teacher("bert", layers=2).float(), make_data("bert")
    made = shrink(teacher, data, heads=2, drop_attention=[1], drop_activations=[0, 1], out=tmp_path / "student")
    words = ["export", str(tmp_path / "student"), "--student", "--out", str(tmp_path / "student.onnx")]
    result = invoke(load_app(), [*words, "--int8"])
    assert result.exit_code == 0, result.output
    assert "1 fused attention nodes, 0 softmax nodes, opset 24" in result.output
    assert "student.int8.onnx: 8 products in int8" in result.output
    session = onnxruntime.InferenceSession(tmp_path / "student.onnx", providers=["CPUExecutionProvider"])
    other = make_data("bert", samples=3, length=13, seed=5)
    (output,) = session.run(None, {name: part.numpy() for name, part in other.items()})
    np.testing.assert_allclose(output, made.student.eval()(**other).logits.detach().numpy(), atol=1e-5)
    refused = invoke(load_app(), [*words[:2], *words[3:], "--int8"])
    assert (refused.exit_code, "--int8 must go with --student" in refused.output) == (1, True)


@pytest.mark.parametrize(("family", "most"), [("bert", 40), ("roberta", 39), ("gpt2", 40), ("llama", None)])
def test_lengths_beyond_the_positions_are_refused_first(family: str, most: int | None, tmp_path: Path) -> None:
    """Before a graph is made; RoBERTa's positions begin behind that of padding, rotary ones do not end."""
    make_teacher(family, layers=1).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert (config.max_position_embeddings, count_positions(config)) == (40, most)
    if most:
        refused = invoke(load_app(), ["time", str(tmp_path), "--beside", str(tmp_path), "--length", str(most + 1)])
        assert (refused.exit_code, f"--length must be at most {most}" in refused.output) == (1, True)


def test_a_students_positions_are_counted_before_transformers_knows_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(make_teacher("roberta"), make_data("roberta"), drop_attention=[1], out=tmp_path / "student")
    mapping: Any = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    monkeypatch.setattr(mapping, "_extra_content", {})  # as in a new process
    refused = invoke(load_app(), ["time", str(tmp_path / "student"), "--length", "40"])
    assert (refused.exit_code, "--length must be at most 39" in refused.output) == (1, True)


@pytest.mark.slow
def test_attention_is_spelled_out_where_it_cannot_be_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime without the operator refuses the first graph."""
    compare, calls = export._compare, []

    def refuse(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise ShdError("export-failed", "no such operator")
        return compare(*given)

    monkeypatch.setattr(export, "_compare", refuse)
    student = shrink(make_teacher("vit", layers=1).float(), _images(), heads=2).student
    report = export.export_student(student, _images(), tmp_path / "student.onnx")
    assert (report.num_fused, report.num_softmax, report.opset) == (0, 1, 20)
    assert report.max_difference is not None
    assert student.config._attn_implementation == "sdpa"


def test_quantize_dynamic_by_its_defaults(tmp_path: Path) -> None:
    """It selects operators by name: fused attention must not be taken for com.microsoft's."""
    from onnxruntime.quantization import quantize_dynamic

    data = make_data("llama")
    report = export.export_student(make_teacher("llama", layers=1).float(), data, tmp_path / "student.onnx")
    assert (report.num_fused, report.num_softmax) == (1, 0)
    quantize_dynamic(report.path, tmp_path / "int8.onnx")
    paths = report.path, tmp_path / "int8.onnx"
    sessions = [onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in paths]
    inputs = {name: part.numpy() for name, part in data.items()}
    before, after = (session.run(None, inputs)[0].reshape(-1) for session in sessions)
    assert 0 < np.linalg.norm(after - before) < 0.2 * np.linalg.norm(before)


def test_norms_are_not_fused_with_additions(tmp_path: Path) -> None:
    """onnxruntime's operator for both takes several times as long as the two."""
    onnx = pytest.importorskip("onnx")
    data = make_data("bert")
    report = export.export_student(make_teacher("bert", layers=2).float(), data, tmp_path / "student.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(report.path, options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert not [name for name in operators if name.startswith("Skip")]
    assert operators.count("Sum") >= 3, operators


HEADS = {
    "bert": "BertForSequenceClassification",
    "dinov2": "Dinov2ForImageClassification",  # its head reads all positions
}


@pytest.mark.parametrize("family", HEADS)
def test_what_the_head_does_not_read_is_not_computed(family: str, tmp_path: Path) -> None:
    """The last attention has one query for each sample; the outputs are the model's at another batch and length."""
    onnx, transformers = pytest.importorskip("onnx"), pytest.importorskip("transformers")
    model = make_teacher(family, layers=2)
    model = getattr(transformers, HEADS[family])(model.config).eval()
    data = {name: part.float() if part.is_floating_point() else part for name, part in make_data(family).items()}
    report = export.export_student(model, data, tmp_path / "model.onnx")
    assert report.num_fused == 2
    graph = onnx.load(report.path)
    outputs = [node.output[0] for node in graph.graph.node if node.op_type.startswith("FusedAttention")]
    graph.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in outputs)
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    other = make_data(family, samples=3, length=7, seed=4)
    other = {name: part.float() if part.is_floating_point() else part for name, part in other.items()}
    logits, *states = session.run(None, {name: part.numpy() for name, part in other.items()})
    np.testing.assert_allclose(logits, model(**other).logits.detach().numpy(), atol=1e-5)
    lengths = [array.shape[1] for array in states]
    assert lengths == [lengths[0], lengths[0] if family == "dinov2" else 1]
    assert lengths[0] > 1


def _images() -> dict[str, Any]:
    return {name: part.float() for name, part in make_data("vit").items()}
