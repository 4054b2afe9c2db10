"""Export: the graph is the model, at any batch and length, and the model is left as it was."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import transformers
from support.binding.architectures import make_inputs
from support.binding.models import HF_MODELS, NUM_LAYERS, PlainBlock, PlainViT, hf_model
from support.calls import run_killed
from support.refusals import refusal
from torch import Tensor, nn

import shd_torch.export
from shd_ref.teacher import find_sites, load_teacher
from shd_torch import export_teacher
from shd_torch.export import load_hf_model


def run(path: Path, inputs: dict[str, Tensor]) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return torch.from_numpy(result)


def count_softmax(path: Path) -> int:
    return sum(node.op_type == "Softmax" for node in onnx.load(path).graph.node)


@pytest.mark.slow
def test_hf_graph_is_the_model(tmp_path: Path) -> None:
    """``test_architectures`` has others."""
    model = hf_model("gpt2", num_hidden_layers=1).train()
    report = export_teacher(model, make_inputs("gpt2"), tmp_path / "deep" / "teacher.onnx")
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    inputs = make_inputs("gpt2", batch=5, length=11, seed=3)
    with torch.no_grad():
        output = model.eval()(**inputs)
    assert report.output == next(iter(output))
    torch.testing.assert_close(run(report.path, inputs), output[report.output], atol=2e-5, rtol=1e-4)
    assert report.num_softmax == count_softmax(report.path) == 1
    assert report.max_difference is not None
    assert report.tolerance is not None
    assert report.max_difference <= report.tolerance
    assert report.data_path is None
    assert [path.name for path in report.path.parent.iterdir()] == ["teacher.onnx"]
    assert str(Path(__file__).parent).encode() not in report.path.read_bytes()  # no paths of this machine
    assert report.inputs == {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}
    graph = onnx.load(report.path).graph
    assert [i.name for i in graph.input] == list(report.inputs)
    assert [o.name for o in graph.output] == [report.output]
    assert {o.version for o in onnx.load(report.path).opset_import if not o.domain} == {18}


@pytest.mark.slow
def test_mixtures_of_experts(tmp_path: Path) -> None:
    """By no loop over the experts that the example happens to choose; afterwards the model has its own way again."""

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    model = transformers.MixtralModel(transformers.MixtralConfig(**sizes)).eval()
    before = model.config._experts_implementation
    torch.manual_seed(1)
    ids = {batch: torch.randint(0, 50, (batch, length)) for batch, length in ((2, 8), (5, 11))}
    report = export_teacher(
        model, {"input_ids": ids[2], "attention_mask": torch.ones_like(ids[2])}, tmp_path / "teacher.onnx"
    )
    assert model.config._experts_implementation == before
    inputs = {"input_ids": ids[5], "attention_mask": torch.ones_like(ids[5])}
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    torch.testing.assert_close(run(report.path, inputs), expected, atol=2e-5, rtol=1e-4)
    (site,) = find_sites(load_teacher(report.path))
    assert (site.supported, site.num_heads, site.num_kv_heads) == (True, 4, 2)


def test_plain_module_from_a_single_sample(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = PlainViT()
    model.blocks[0].eval()
    flags = [module.training for module in model.modules()]
    report = export_teacher(model, torch.randn(1, 3, 16, 16), tmp_path / "vit.onnx")
    assert [module.training for module in model.modules()] == flags
    images = torch.randn(7, 3, 16, 16)
    torch.testing.assert_close(
        run(report.path, {"images": images}), model.eval()(images).detach(), atol=2e-5, rtol=1e-4
    )
    assert (report.output, report.num_softmax) == ("output", NUM_LAYERS)
    assert report.inputs == {"images": ("batch", 3, 16, 16)}


class Decoder(nn.Module):
    """Causal SDPA over embedded tokens; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.block = PlainBlock(32, 4, causal=True)

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> tuple[Tensor, None]:
        hidden = self.embedding(tokens)
        return self.block(hidden if scale is None else hidden * scale), None


def test_dynamic_axes_may_be_named_and_causal_attention_is_decomposed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    inputs = {"tokens": torch.randint(0, 50, (2, 6)), "scale": torch.rand(2, 6, 1)}
    axes = {"tokens": {1: "length"}, "scale": {1: "length"}}
    report = export_teacher(model, inputs, tmp_path / "decoder.onnx", dynamic=axes)
    assert report.inputs == {"tokens": (2, "length"), "scale": (2, "length", 1)}
    assert (report.num_softmax, report.opset) == (1, 18)
    longer = {"tokens": torch.randint(0, 50, (2, 13)), "scale": torch.rand(2, 13, 1)}
    torch.testing.assert_close(run(report.path, longer), model(**longer)[0].detach(), atol=2e-5, rtol=1e-4)


@pytest.fixture
def files_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From how many bytes on weights have a file of their own."""
    return lambda size: monkeypatch.setattr(shd_torch.export, "_EXTERNAL_DATA_BYTES", size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        pytest.param(0, 0, id="large"),
        pytest.param(0, 1 << 30, id="shrunk", marks=pytest.mark.nightly),
        pytest.param(1 << 30, 0, id="grown", marks=pytest.mark.nightly),  # killed where "large" is, too
    ],
)
def test_an_interrupted_export_leaves_a_whole_one(
    earlier: int, later: int, tmp_path: Path, files_from: Callable[[int], None]
) -> None:
    """Killed before any step that writes to the disk, with weights beside the graph or inside of it."""
    torch.manual_seed(0)
    images, path = torch.randn(2, 8), tmp_path / "model.onnx"
    models = [nn.Sequential(nn.Linear(8, 300), nn.Softmax(-1)).eval() for _ in range(2)]
    outputs = [model(images).detach() for model in models]
    files_from(earlier)
    export_teacher(models[0], images, path)
    (other := tmp_path / "model.onnx.data").touch()  # somebody else's, by its name
    files_from(later)
    last = 2 if later else 4  # the graph, at its place; before them its weights, at their place
    for calls in range(1, last + 1):
        assert run_killed(lambda: export_teacher(models[1], images, path), "sync", calls)
        expected = outputs[0] if calls < last else outputs[1]
        torch.testing.assert_close(run(path, {"input": images}), expected, atol=2e-5, rtol=1e-4)
    report = export_teacher(models[1], images, path)
    torch.testing.assert_close(run(path, {"input": images}), outputs[1], atol=2e-5, rtol=1e-4)
    assert set(tmp_path.iterdir()) == {path, other} | ({report.data_path} if report.data_path else set())
    assert later or re.fullmatch(r"model\.onnx\.[0-9a-f]{16}\.data", str(report.data_path and report.data_path.name))


def test_without_onnxruntime_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    report = export_teacher(nn.Softmax(-1), torch.ones(2, 3), tmp_path / "softmax.onnx")
    assert (report.max_difference, report.tolerance) == (None, None)
    with refusal("dependency-missing", "cpu"):
        shd_torch.deploy.time_graphs({"softmax": report.path})


class Fails(nn.Module):
    """Returns what a function makes of the images."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images)


def raise_in_many_words(images: Tensor) -> Tensor:
    raise RuntimeError("first line\nsecond line\n" + "third line " * 100)


@pytest.mark.parametrize(
    ("function", "stage"),
    [
        (
            lambda images: images.reshape(2, 3).softmax(-1),
            r"Fails must (be traced|accept).*; got ",
        ),  # of no free batch
        (raise_in_many_words, r"Fails must run on the example inputs .*; got RuntimeError: first line: "),
        (lambda x: x if x.sum() > 0 else -x, r"Fails must be traced by torch\.export; got "),
        (torch.special.bessel_j0, r"Fails must be converted to ONNX; got "),
        (lambda x: x.bfloat16().sin().float(), r"Fails must run in onnxruntime at another .*; got "),
    ],
)
def test_a_failed_export_is_one_sentence(
    function: Callable[[Tensor], Tensor], stage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the model, the stage and the first line of the cause, with nothing printed beside it."""
    capfd.readouterr()
    with refusal("export-failed", stage + r".*take a model whose attention is plain") as caught:
        export_teacher(model := Fails(function), torch.randn(2, 3), tmp_path / "teacher.onnx")
    assert model.training
    message = str(caught.value)
    assert not {"\n", "\x1b"} & set(message)
    assert len(message) < 700
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_graph_that_differs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "teacher.onnx"
    path.write_bytes(b"an older graph")
    two_faced = Fails(lambda images: (2 if torch.compiler.is_exporting() else 1) * images.softmax(-1))
    with refusal("export-failed", "must give the model's output within"):
        export_teacher(two_faced, torch.randn(2, 3), path)
    assert path.read_bytes() == b"an older graph"
    assert [p.name for p in tmp_path.iterdir()] == ["teacher.onnx"]


def test_bad_arguments(tmp_path: Path) -> None:
    good: dict[str, Any] = {"example_inputs": torch.ones(2, 4, dtype=torch.int64), "path": tmp_path / "x.onnx"}
    for arguments, code in (
        ({"example_inputs": []}, "argument-shape"),
        ({"example_inputs": [torch.zeros(2, 4)] * 3}, "argument-shape"),
        ({"example_inputs": {"tokens": torch.tensor(1)}}, "argument-shape"),
        ({"dynamic": {"words": {0: "batch"}}}, "argument-value"),
        ({"dynamic": {"tokens": {2: "batch"}}}, "argument-value"),
    ):
        with refusal(code):
            export_teacher(Decoder(), **good | arguments)
    (tmp_path / "file").write_text("not a folder")
    with refusal("write-failed"):
        export_teacher(Decoder(), **good | {"path": tmp_path / "file" / "x.onnx"})


@pytest.mark.parametrize("name", HF_MODELS)
def test_load_hf_model(name: str, tmp_path: Path) -> None:
    """In float32, by eager attention, whatever kernels a configuration names; ``test_folders`` refuses."""
    model = hf_model(name)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "someone/kernels"}))
    loaded: Any = load_hf_model(tmp_path)
    assert (type(loaded), loaded.training, loaded.config._attn_implementation) == (type(model), False, "eager")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
