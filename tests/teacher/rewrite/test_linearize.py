"""Activations dropped from a teacher's graph: it equals the teacher with the identity in their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.refusals import refusal

onnx = pytest.importorskip("onnx", reason="teachers are ONNX graphs")
ort = pytest.importorskip("onnxruntime", reason="a graph is judged by running it")
pytest.importorskip("typer", reason="the commands need typer")

from support.attention_graphs import GraphBuilder  # noqa: E402  (after the skips)
from support.calls import run_killed  # noqa: E402
from support.commands import shd  # noqa: E402

from shd_ref import ShdError  # noqa: E402  (after the skips)
from shd_ref.conformance import load_tolerances  # noqa: E402
from shd_ref.teacher import find_sites, linearize_graph, load_teacher, save_graph  # noqa: E402

D, F = 96, 100  # weights of more than 64 KiB, which are not read with the graph
RNG = np.random.default_rng(0)
WEIGHTS = {
    name: RNG.normal(size=shape) / shape[0] ** 0.5
    for name, shape in {
        "qkv": (D, D),
        "first": (D, F),
        "second": (F, D),
        "b1": (F,),
        "b2": (D,),
        "slope": (F,),
    }.items()
}
Activation = Callable[[GraphBuilder, str], str]


def gelu(body: GraphBuilder, h: str) -> str:
    scaled = body.op("Div", h, np.array(2**0.5))
    erf = body.op("Add", body.op("Erf", scaled), 1.0)
    return body.op("Mul", body.op("Mul", h, erf), 0.5)


def quick_gelu(body: GraphBuilder, h: str) -> str:
    return body.op("Mul", h, body.op("Sigmoid", body.op("Mul", h, 1.702)))


def make_graph(
    activation: Activation | None,
    *,
    biases: str = "both",
    gemm: bool = False,
    dtype: Any = np.float64,
    scales: Mapping[str, float] | None = None,
) -> Any:
    """One layer: attention of one head, then an FFN with a residual; weights as initialisers."""
    body = GraphBuilder()
    for name, array in WEIGHTS.items():
        body.const(((scales or {}).get(name, 1.0) * array).astype(dtype), name)
    query = body.op("MatMul", "x", "qkv")
    probs = body.op("Softmax", body.op("MatMul", query, body.op("Transpose", query, perm=[0, 2, 1])), axis=-1)
    x = body.op("Add", "x", body.op("MatMul", body.op("MatMul", probs, query), "qkv"))

    def linear(value: str, weight: str, bias: str | None) -> str:
        if gemm:
            return body.op("Gemm", value, weight, *([] if bias is None else [bias]))
        product = body.op("MatMul", value, weight)
        return product if bias is None else body.op("Add", product, bias)

    rows = body.op("Reshape", x, [-1, D]) if gemm else x
    h = linear(rows, "first", "b1" if biases in ("both", "first") else None)
    out = linear(activation(body, h) if activation else h, "second", "b2" if biases in ("both", "second") else None)
    out = body.op("Reshape", out, body.op("Shape", x)) if gemm else out
    body.op("Add", x, out, name="y")
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = onnx.helper.make_graph(
        body.nodes,
        "layer",
        [onnx.helper.make_tensor_value_info("x", kind, ["batch", "length", D])],
        [onnx.helper.make_tensor_value_info("y", kind, ["batch", "length", D])],
        body.initializers,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture
def files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the graph were above 2 GB."""
    monkeypatch.setattr("shd_ref.teacher.rewrite.linearize.INLINE_BYTES", 0)


def run(model: Any, x: NDArray[Any]) -> NDArray[Any]:
    (y,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    return np.asarray(y)


def check_close(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    """As an exported graph is compared with its model."""
    allowed = load_tolerances()["graph"]["probs"]["float32"] * max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(found, wanted, atol=allowed, rtol=0)


@pytest.mark.parametrize(
    ("activation", "gemm", "biases"),
    [
        *product([gelu], [False, True], ["both", "first", "second", "none"]),
        (quick_gelu, False, "both"),
        (lambda body, h: body.op("Relu", h), True, "both"),
    ],
)
def test_the_merge_is_the_graph_without_the_activation(
    activation: Activation, gemm: bool, biases: str, tmp_path: Path
) -> None:
    onnx.save(make_graph(activation, biases=biases, gemm=gemm), tmp_path / "teacher.onnx")
    made = linearize_graph(load_teacher(tmp_path / "teacher.onnx"), [0])
    assert made.sizes == {0: (D, F, D)}
    save_graph(made.model, tmp_path / "smaller.onnx", tmp_path / "teacher.onnx")
    found = onnx.load(tmp_path / "smaller.onnx")
    onnx.checker.check_model(found, full_check=True)
    assert {"first", "second"}.isdisjoint(one.name for one in found.graph.initializer)
    for shape in ((1, 3, D), (4, 7, D)):
        x = RNG.normal(size=shape)
        wanted = run(make_graph(None, biases=biases, gemm=gemm), x)
        np.testing.assert_allclose(run(found, x), wanted, atol=1e-10)
        assert np.abs(run(found, x) - run(onnx.load(tmp_path / "teacher.onnx"), x)).max() > 0.01
    with pytest.raises(ShdError, match="none in this graph"):  # there is nothing left to drop
        linearize_graph(load_teacher(tmp_path / "smaller.onnx"), [0])


@pytest.mark.parametrize(
    ("activation", "layers", "code", "says"),
    [
        (
            lambda body, h: body.op("Mul", h, body.op("Sigmoid", body.op("MatMul", "x", "first"))),
            [0],
            "shrink",
            "gated",
        ),
        (lambda body, h: body.op("PRelu", h, "slope"), [0], "shrink", "has weights"),
        (gelu, [1], "layers", "0 in this graph; got 1"),
        (gelu, [], "layers", "rising"),
        (gelu, [0, 0], "layers", "rising"),
        (lambda body, h: body.op("Identity", h), [0], "layers", "none in this graph"),
        (lambda body, h: body.op("Mul", h, 0.25), [0], "layers", "none in this graph"),
        (lambda body, h: body.op("Softmax", h, axis=-1), [0], "layers", "none in this graph"),
    ],
)
def test_refusals(activation: Activation, layers: list[int], code: str, says: str, tmp_path: Path) -> None:
    onnx.save(make_graph(activation), tmp_path / "teacher.onnx")
    with pytest.raises(ShdError, match=says) as error:
        linearize_graph(load_teacher(tmp_path / "teacher.onnx"), layers)
    assert error.value.code.startswith(code)


@pytest.mark.parametrize("added", ["constant", "computed"])
def test_what_a_product_adds_must_be_a_bias(added: str, tmp_path: Path) -> None:
    """A Gemm may add a number a row, or a tensor that the graph computes: neither may be left out of the merge."""
    model = make_graph(gelu, gemm=True)
    graph = model.graph
    (number, second) = [(n, node) for n, node in enumerate(graph.node) if node.op_type == "Gemm"][-1]
    if added == "constant":
        graph.initializer.append(onnx.numpy_helper.from_array(np.arange(float(D))[:, None], "added"))
    else:
        first = next(node for node in graph.node if node.op_type == "Gemm")
        graph.node.insert(number, onnx.helper.make_node("Sigmoid", [first.input[0]], ["added"]))
    second.input[2] = "added"
    onnx.save(model, tmp_path / "teacher.onnx")
    with refusal("shrink-unsupported", "which is no bias"):
        linearize_graph(load_teacher(tmp_path / "teacher.onnx"), [0])


def test_a_graph_that_became_small_holds_its_weights(tmp_path: Path) -> None:
    """A teacher that was just too large to be read as a whole: the new graph must not lean on its files."""
    onnx.save(make_graph(gelu), tmp_path / "teacher.onnx", save_as_external_data=True, size_threshold=0)
    made = linearize_graph(load_teacher(tmp_path / "teacher.onnx", inline_bytes=0), [0])
    (tmp_path / "other").mkdir()
    save_graph(made.model, tmp_path / "other" / "smaller.onnx", tmp_path / "teacher.onnx")
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["smaller.onnx"]
    x = RNG.normal(size=(2, 5, D))
    found = run(onnx.load(tmp_path / "other" / "smaller.onnx"), x)
    np.testing.assert_allclose(found, run(make_graph(None), x), atol=1e-10)


def test_weights_stay_in_files(tmp_path: Path, files_only: None) -> None:
    """As of a graph above 2 GB: nothing large is in either graph, and other weights are copied as they are."""
    teacher = make_graph(gelu)
    onnx.save(teacher, tmp_path / "teacher.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    before = (tmp_path / "weights").read_bytes()
    made = linearize_graph(load_teacher(tmp_path / "teacher.onnx", inline_bytes=0), [0])
    save_graph(made.model, tmp_path / "smaller.onnx", tmp_path / "teacher.onnx")
    assert (tmp_path / "weights").read_bytes() == before
    data = data_of(tmp_path / "smaller.onnx")
    assert re.fullmatch(r"smaller\.onnx\.[0-9a-f]{16}\.data", data)
    assert {file.name for file in tmp_path.iterdir()} == {"teacher.onnx", "weights", "smaller.onnx", data}
    bare = onnx.load(tmp_path / "smaller.onnx", load_external_data=False)
    assert all(one.data_location == onnx.TensorProto.EXTERNAL for one in bare.graph.initializer if len(one.dims) == 2)
    assert "data_folder" not in str(bare.metadata_props)
    x = RNG.normal(size=(2, 5, D))
    np.testing.assert_allclose(run(onnx.load(tmp_path / "smaller.onnx"), x), run(make_graph(None), x), atol=1e-10)
    for place in ("teacher.onnx", "weights"):
        with refusal("argument-value"):
            save_graph(made.model, tmp_path / place, tmp_path / "teacher.onnx")


def data_of(graph: Path) -> str:
    bare = onnx.load(graph, load_external_data=False)
    tensors = filter(onnx.external_data_helper.uses_external_data, bare.graph.initializer)
    (name,) = {onnx.external_data_helper.ExternalDataInfo(one).location for one in tensors}
    return str(name)


def test_a_killed_writer_leaves_a_whole_graph(tmp_path: Path, files_only: None) -> None:
    """The earlier one before the graph has its name, the new one after; the next writer takes the rest away."""
    x, out = RNG.normal(size=(2, 5, D)), tmp_path / "smaller.onnx"
    made = []
    for scale in (1.0, 2.0):
        scales = {"first": scale}
        onnx.save(make_graph(gelu, scales=scales), tmp_path / f"{scale}.onnx")
        made.append(
            (linearize_graph(load_teacher(tmp_path / f"{scale}.onnx"), [0]).model, tmp_path / f"{scale}.onnx")
        )
        wanted = run(make_graph(None, scales=scales), x)
        if scale == 1.0:
            first = wanted
            save_graph(made[0][0], out, made[0][1])
    earlier = data_of(out)
    for calls in (1, 2, 3, 4):  # weights written, at their place; the graph written, at its place
        assert run_killed(lambda: save_graph(made[1][0], out, made[1][1]), "sync", calls)
        np.testing.assert_allclose(run(onnx.load(out), x), first if calls < 4 else wanted, atol=1e-10)
    assert (tmp_path / earlier).exists()
    save_graph(made[0][0], out, made[0][1])  # names the weights that were left, and removes the others
    assert data_of(out) == earlier
    np.testing.assert_allclose(run(onnx.load(out), x), first, atol=1e-10)
    assert {file.name for file in tmp_path.iterdir()} == {"1.0.onnx", "2.0.onnx", "smaller.onnx", earlier}


def test_data_that_only_looks_like_a_graphs_own_stays(tmp_path: Path) -> None:
    """Weights of an earlier graph at this place that are the teacher's, or of another name."""
    kept = {"location": "out.onnx.data", "save_as_external_data": True, "size_threshold": 0}
    onnx.save(make_graph(gelu), tmp_path / "teacher.onnx", **kept)
    (tmp_path / "out.onnx").write_bytes((tmp_path / "teacher.onnx").read_bytes())
    made = linearize_graph(load_teacher(tmp_path / "teacher.onnx", inline_bytes=0), [0])
    save_graph(made.model, tmp_path / "out.onnx", tmp_path / "teacher.onnx")
    assert (tmp_path / "out.onnx.data").exists()
    (tmp_path / "out.onnx").write_text("no graph")
    save_graph(made.model, tmp_path / "out.onnx", tmp_path / "teacher.onnx")
    x = RNG.normal(size=(2, 5, D))
    np.testing.assert_allclose(run(onnx.load(tmp_path / "out.onnx"), x), run(make_graph(None), x), atol=1e-10)


def test_the_command(tmp_path: Path) -> None:
    onnx.save(make_graph(gelu, dtype=np.float32), tmp_path / "teacher.onnx")
    words = ("linearize", tmp_path / "teacher.onnx", "--drop-activations", 0, "--out")
    assert f"layer 0: {D} -> {F} -> {D} became {D} -> {D}" in shd(*words, tmp_path / "smaller.onnx")
    x = RNG.normal(size=(3, 5, D)).astype(np.float32)
    (found,) = ort.InferenceSession(tmp_path / "smaller.onnx").run(None, {"x": x})
    check_close(found, run(make_graph(None, dtype=np.float32), x))
    assert "--out must be another file" in shd(*words, tmp_path / "teacher.onnx", code=1)


@pytest.mark.parametrize(("name", "layers"), [("gpt2", 2)])
def test_exported_teachers(name: str, layers: int, tmp_path: Path) -> None:
    """Against the model itself with ``nn.Identity`` in place of its activations, at another batch and length."""
    torch = pytest.importorskip("torch", reason="exports come from torch")
    pytest.importorskip("transformers", reason="these teachers come from transformers")
    from support.exported_models import trace
    from support.shrink.models import make_data, make_teacher

    from shd_torch.export import example_inputs
    from shd_torch.shrink.families import FAMILIES

    model, family = make_teacher(name, layers=layers).float(), FAMILIES[name]
    trace(model, example_inputs(model), tmp_path / "teacher.onnx")
    made = linearize_graph(load_teacher(tmp_path / "teacher.onnx"), [layers - 1])
    assert list(made.sizes) == [layers - 1]
    save_graph(made.model, tmp_path / "smaller.onnx", tmp_path / "teacher.onnx")
    assert family.activation is not None
    place, _, activation = family.activation.rpartition(".")
    setattr(family.layers_of(model)[-1].get_submodule(place), activation, torch.nn.Identity())
    data = make_data(name, samples=3, length=7)
    data = {key: part.float() if part.is_floating_point() else part for key, part in data.items()}
    with torch.no_grad():
        wanted = model(**data).logits.numpy()
    feeds = {key: part.numpy() for key, part in data.items()}
    (found,) = ort.InferenceSession(tmp_path / "smaller.onnx").run(None, feeds)
    check_close(found, wanted)
    assert [site.supported for site in find_sites(load_teacher(tmp_path / "smaller.onnx"))] == [True] * layers


def test_a_product_that_its_dtype_cannot_hold_is_refused() -> None:
    scales = dict.fromkeys(("first", "second"), 3000.0)
    with refusal("shrink-unsupported", "does not fit float16; export the teacher in float32"):
        linearize_graph(make_graph(gelu, dtype=np.float16, scales=scales), (0,))
