"""Graphs in onnxruntime: products in int8 and what that costs, and times of several graphs by turns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from support.commands import invoke
from support.faults import file_size_limit, permissions_count
from support.refusals import refusal

from shd_torch import deploy
from shd_torch.cli import load_app
from shd_torch.deploy.timing import estimate_round, find_busy

WIDTH, VOCABULARY = 16, 11
TEXT = "int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask"


def write_graph(
    path: Path, *, products: int = 2, inputs: str = TEXT, end: str = "Identity", positions: int | None = None
) -> Path:
    """Embedded tokens or pixels, ``products`` with constant weights, and an operator that makes logits of them.

    With ``positions`` a table of so many is added to the tokens.
    """
    random = np.random.default_rng(0)
    arrays = {"table": random.standard_normal((VOCABULARY, WIDTH)), "last": np.array([-1]), "same": np.array([0, 0])}
    arrays |= {f"weight_{i}": random.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5 for i in range(products)}
    arrays |= {"places": random.standard_normal((positions or 1, WIDTH)), "zero": np.array(0), "one": np.array(1)}
    lines = ["state_0 = Identity (pixels)"]
    if "input_ids" in inputs:
        lines = ["ids = Reshape (input_ids, same)", "state_0 = Gather (table, ids)"]
    if positions is not None:
        lines = ["ids = Reshape (input_ids, same)", "words = Gather (table, ids)", "axes = Shape (input_ids)"]
        lines += ["length = Gather (axes, one)", "steps = Range (zero, length, one)"]
        lines += ["rows_of_places = Gather (places, steps)", "state_0 = Add (words, rows_of_places)"]
    if "attention_mask" in inputs:
        lines[-1] = lines[-1].replace("state_0", "tokens")
        lines += ["mask = Cast <to = 1> (attention_mask)", "rows = Unsqueeze (mask, last)"]
        lines += ["state_0 = Mul (tokens, rows)"]
    lines += [f"state_{i + 1} = MatMul (state_{i}, weight_{i})" for i in range(products)]
    lines += [f"logits = {end} (state_{products})"]
    text = f"g ({inputs}) => (float[a, b, {WIDTH}] logits) {{ {' '.join(lines)} }}"
    graph = onnx.parser.parse_graph(text)
    for name, array in arrays.items():
        if any(name in node.input for node in graph.node):
            kind = np.int64 if name in ("last", "same", "zero", "one") else np.float32
            graph.initializer.append(onnx.numpy_helper.from_array(array.astype(kind), name))
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return write_graph(tmp_path / "graph.onnx")


def test_a_busy_machine_is_noticed() -> None:
    assert find_busy([(1.0, 0.95), (0.1, 0.05)]) is None  # by what takes longest
    assert find_busy([(1.0, 2.0)]) is None  # two threads
    assert "waited for it 40% of their time" in str(find_busy([(1.0, 0.6)]))


@pytest.mark.parametrize(("run", "turn"), [(1e-4, 0.04), (0.01, 0.15), (0.2, 0.4), (0.6, 0.6)])
def test_the_length_of_estimate_round_is_known_after_the_first(run: float, turn: float) -> None:
    """Runs that warm up, then those that count, at most 200 of each; a long run needs no others before it."""
    assert estimate_round({(1, 1, 8): {"graph": [(run, run)]}}) == pytest.approx(turn)


def test_times_by_turns(graph: Path, tmp_path: Path) -> None:
    slow, told = write_graph(tmp_path / "slow.onnx", products=100), []
    times = deploy.time_graphs(
        {"fast": graph, "slow": slow},
        batch=[1, 3],
        length=[5],
        threads=[1, 2],
        rounds=6,
        progress=lambda done, total: told.append((done, total)),
    )
    settings = [(entry.threads, entry.batch, entry.length, entry.graph) for entry in times]
    assert settings == [(t, b, 5, name) for t in (1, 2) for b in (1, 3) for name in ("fast", "slow")]
    assert told == [(done, 48) for done in range(1, 49)]
    for entry in times:
        for interval in (entry.wall, entry.processor, entry.times_faster):
            assert 0 < interval.low <= interval.median <= interval.high
        if entry.graph == "fast":
            assert entry.times_faster == deploy.Interval(1.0, 1.0, 1.0)
        else:
            assert entry.times_faster.high < 1


@pytest.mark.parametrize(("count", "first"), [(6, 1), (8, 1), (9, 2), (15, 4), (20, 6), (100, 40)])
def test_intervals_are_order_statistics(count: int, first: int) -> None:
    """By the binomial table: the interval between these ranks holds the median with at least 95%."""
    values = np.random.default_rng(0).permutation(np.arange(1, count + 1)).tolist()
    assert deploy.Interval.of(values) == deploy.Interval((count + 1) / 2, first, count + 1 - first)


def test_axes_that_a_graph_fixes(tmp_path: Path) -> None:
    images = write_graph(tmp_path / "images.onnx", inputs=f"float[batch, 4, {WIDTH}] pixels")
    single = write_graph(tmp_path / "single.onnx", inputs="int64[1, 4] input_ids")
    (entry,) = deploy.time_graphs({"images": images}, batch=[2], rounds=6)
    assert (entry.batch, entry.length) == (2, None)
    (entry,) = deploy.time_graphs({"single": single}, rounds=6)
    assert (entry.batch, entry.length) == (None, None)
    with refusal("argument-value", "length must be left out: images has no dynamic axis"):
        deploy.time_graphs({"images": images}, length=[5])
    with refusal("argument-value", "batch must be left out: single"):
        deploy.time_graphs({"images": images, "single": single}, batch=[1])


def test_what_cannot_be_timed(graph: Path, tmp_path: Path) -> None:
    for options in ({"rounds": 5}, {"batch": [0]}, {"length": []}, {"threads": [0]}, {"reference": "other"}):
        with refusal("argument-value", f"{next(iter(options))} must"):
            deploy.time_graphs({"graph": graph}, **options)  # type: ignore[arg-type]
    with refusal("read-failed"):
        deploy.time_graphs({"none": tmp_path / "none.onnx"})
    words = write_graph(tmp_path / "words.onnx", inputs="int64[batch, sequence] input_ids, string[batch] words")
    with refusal("inputs-invalid", r"must take tensors of numbers; words is a tensor\(string\)"):
        deploy.time_graphs({"words": words})
    short = write_graph(tmp_path / "short.onnx", inputs=TEXT.replace("sequence] attention", "5] attention"))
    with refusal("inputs-invalid", "short must run with inputs of"):
        deploy.time_graphs({"short": short})


def test_int8_products(graph: Path, tmp_path: Path) -> None:
    report = deploy.quantize_graph(graph, tmp_path / "graph.int8.onnx")
    assert (report.num_products, report.is_random, report.num_rows) == (2, True, 8 * 32)
    assert report.bytes_before == graph.stat().st_size
    assert report.cosine > 0.99
    assert report.agreement is not None
    assert report.agreement > 0.9
    assert report.kl is not None
    assert 0 < report.kl < 0.01
    assert "256 rows of random inputs" in report.describe()
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(report.path).graph.initializer}
    assert weights["table"].dtype == np.float32
    integers = [array.astype(int) for array in weights.values() if array.dtype == np.int8]
    assert [array.shape for array in integers] == [(WIDTH, WIDTH)] * 2
    for array in integers:
        # Two products of neighbours with 8 bits of an activation fit into 16, also where a processor saturates.
        assert 120 < np.abs(array).reshape(-1, 2, WIDTH).sum(1).max() <= 128
    scales = [array for name, array in weights.items() if name.endswith("/scales")]
    assert [array.shape for array in scales] == [(WIDTH,)] * 2


def test_int8_is_compared_on_data(graph: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(VOCABULARY, size=(6, 4))
    mask = np.ones_like(ids)
    mask[0, 2:] = mask[2, 3:] = 0
    out = tmp_path / "int8.onnx"
    report = deploy.quantize_graph(graph, out, {"input_ids": ids, "attention_mask": mask, "other": ids})
    assert (report.is_random, report.num_rows) == (False, 9)
    sessions = [onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in (graph, out)]
    ids, mask = ids[::2], mask[::2]  # the others were calibrated on
    a, b = (session.run(None, {"input_ids": ids, "attention_mask": mask})[0][mask > 0] for session in sessions)
    a, b = a.astype(np.float64), b.astype(np.float64)

    def cosines(a: Any, b: Any) -> Any:
        return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)

    assert report.cosine == pytest.approx(cosines(a, b).mean(), abs=1e-6)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    assert report.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-3, abs=1e-9)
    alone = [
        sessions[1].run(None, {"input_ids": i[None, m > 0], "attention_mask": m[None, m > 0]})[0]
        for i, m in zip(ids, mask, strict=True)
    ]
    assert report.alone == pytest.approx(cosines(np.concatenate(alone, 1)[0].astype(float), b).min(), abs=1e-6)
    assert deploy.quantize_graph(graph, out, {"input_ids": ids}).num_rows == 8
    with refusal("inputs-invalid", "input_ids is missing"):
        deploy.quantize_graph(graph, out, {"attention_mask": mask})


def test_int8_of_a_graph_that_fixes_its_sizes(tmp_path: Path) -> None:
    """Its samples are neither parted nor cut, though half of each is padding."""
    ids = np.random.default_rng(1).integers(VOCABULARY, size=(4, 6))
    mask = np.ones_like(ids)
    mask[:, 3:] = 0
    for batch, length in (("4", "6"), ("batch", "6"), ("4", "sequence")):
        inputs = TEXT.replace("batch", batch).replace("sequence", length)
        fixed = write_graph(tmp_path / "fixed.onnx", inputs=inputs)
        report = deploy.quantize_graph(fixed, tmp_path / "int8.onnx", {"input_ids": ids, "attention_mask": mask})
        assert report.num_rows == (6 if batch == "batch" else 12)
        assert report.cosine > 0.99


def test_int8_of_layers_that_share_weights(tmp_path: Path) -> None:
    """They are stored once, and are what each layer multiplies by."""
    source, out = write_graph(tmp_path / "graph.onnx", products=3), tmp_path / "int8.onnx"
    model = onnx.load(source)
    for node in model.graph.node:
        if node.op_type == "MatMul":
            node.input[1] = "weight_0"
    onnx.save(model, source)
    ids = np.random.default_rng(1).integers(VOCABULARY, size=(16, 8))
    report = deploy.quantize_graph(source, out, {"input_ids": ids})
    weights = [t for t in onnx.load(out).graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert (report.num_products, len(weights)) == (3, 1)
    assert report.cosine > 0.99


BLOCKS = {
    "norm": ("y = MatMul (n, up)  a = Gelu (y)  logits = MatMul (a, down)", {"n": ["QuantizeLinear"]}),
    "norm that others read": (
        "y = MatMul (n, up)  a = Gelu (y)  d = MatMul (a, down)  logits = Add (d, n)",
        {"n": ["Mul", "Add"]},
    ),
    "gate": (
        "y = MatMul (n, up)  s = Sigmoid (y)  g = Mul (y, s)  u = MatMul (n, gate)  a = Mul (g, u)"
        "  logits = MatMul (a, down)",
        {"n": ["QuantizeLinear"], "a": ["DynamicQuantizeLinear"]},
    ),
}
"""Lines of a graph, and which operators read its values in int8: a division of channels has one of its own where
others read the same norm."""


@pytest.mark.parametrize("block", BLOCKS)
def test_int8_of_channels_with_outliers(block: str, tmp_path: Path) -> None:
    """A tenth of the squared error of onnxruntime's dynamic quantisation, by operators that cost next to nothing."""
    from onnxruntime.quantization import quantize_dynamic

    random = np.random.default_rng(0)
    lines, readers = BLOCKS[block]
    width, inner = 32, 64
    scale = np.where(np.arange(width) % 8 == 3, 20.0, 1.0)  # of the norm: four channels with outliers
    arrays = {
        "scale": scale,
        "shift": random.standard_normal(width),
        "up": random.standard_normal((width, inner)) / scale[:, None] / 6,
        "gate": random.standard_normal((width, inner)) / scale[:, None] / 6,
        "down": random.standard_normal((inner, width)) / 8,
    }
    shape = f"float[batch, length, {width}]"
    norm = "n = LayerNormalization (pixels, scale, shift)"
    text = f"g ({shape} pixels) => ({shape} logits) {{ {norm} {lines} }}"
    graph = onnx.parser.parse_graph(text)
    names = {name for node in graph.node for name in node.input}
    graph.initializer.extend(
        onnx.numpy_helper.from_array(array.astype(np.float32), name)
        for name, array in arrays.items()
        if name in names
    )
    path, rival, out = (tmp_path / f"{name}.onnx" for name in ("float", "rival", "int8"))
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), path)
    quantize_dynamic(
        path, rival, per_channel=True, reduce_range=True, weight_type=onnxruntime.quantization.QuantType.QInt8
    )
    pixels = random.standard_normal((2, 40, 16, width)).astype(np.float32)
    deploy.quantize_graph(path, out, {"pixels": pixels[0]})
    run = [onnxruntime.InferenceSession(p).run(None, {"pixels": pixels[1]})[0] for p in (path, rival, out)]
    rival_error, error = (np.square(other - run[0]).mean() for other in run[1:])
    assert error < rival_error / 10
    nodes = onnx.load(out).graph.node
    assert {name: [node.op_type for node in nodes if name in node.input] for name in readers} == readers


@pytest.mark.parametrize(
    ("options", "code"), [({"end": "Log"}, "not-finite"), ({"products": 0}, "export-failed")], ids=["nan", "none"]
)
def test_int8_that_is_refused(options: dict[str, Any], code: str, tmp_path: Path) -> None:
    graph, out = write_graph(tmp_path / "graph.onnx", **options), tmp_path / "int8.onnx"
    out.write_bytes(b"an older graph")
    with refusal(code):
        deploy.quantize_graph(graph, out)
    assert out.read_bytes() == b"an older graph"
    with refusal("argument-value"):
        deploy.quantize_graph(graph, graph)
    assert {path.name for path in tmp_path.iterdir()} == {"graph.onnx", "int8.onnx"}


def test_inputs_are_drawn_within_the_positions_of_a_model(graph: Path, tmp_path: Path) -> None:
    short = write_graph(tmp_path / "short.onnx", positions=11)
    assert deploy.quantize_graph(short, tmp_path / "int8.onnx").num_rows == 8 * 11
    lengths = [entry.length for entry in deploy.time_graphs({"long": graph, "short": short}, batch=[1], rounds=6)]
    assert lengths == [11, 11]
    told: list[int] = []
    with refusal("argument-value", "length must be at most 11, the longest text that short takes; got 12"):
        deploy.time_graphs({"long": graph, "short": short}, length=[3, 12], progress=lambda *_: told.append(1))
    assert not told
    (entry,) = deploy.time_graphs({"short": short}, batch=[1], length=[11], rounds=6)
    assert entry.length == 11


def test_int8_needs_no_room_beside_its_source(tmp_path: Path) -> None:
    """Nothing is written there, which a kill would leave; without room for the draft it is a failed write."""
    (tmp_path / "read-only").mkdir()
    source = write_graph(tmp_path / "read-only" / "graph.onnx")
    source.parent.chmod(0o555)
    with permissions_count():
        deploy.quantize_graph(source, tmp_path / "int8.onnx")
    source.parent.chmod(0o755)
    with refusal("write-failed"), file_size_limit(100):
        deploy.quantize_graph(source, tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def run(*words: object, code: int = 0) -> str:
    result = invoke(load_app(), ["time", *words], columns=80)
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_prints_and_returns_the_same(graph: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, input_ids=np.ones((2, 3), np.int64))
    settings = "--batch", "2", "--length", "3,4", "--rounds", "6"
    text = run(graph, "--int8", "--beside", graph, "--data", data, *settings)
    rows = [line.split("  ")[0] for line in text.splitlines() if "teacher" in line or "graph" in line]
    assert text.count("batch 2, length") == 2
    assert rows.count("teacher, as it is") == rows.count("teacher, int8") == 2
    assert "over 3 rows of data" in text
    document = json.loads(run(graph, "--beside", graph, *settings, "--json"))
    assert document["reference"] == "teacher, as it is"
    names = [str(graph), "teacher, as it is", "teacher, int8"]
    assert [entry["graph"] for entry in document["times"]] == names * 2
    assert list(document["int8"]) == ["teacher, int8"]


def test_what_the_command_refuses(graph: Path, tmp_path: Path) -> None:
    short = write_graph(tmp_path / "short.onnx", positions=11)
    refused = " ".join(run(graph, "--beside", short, "--length", "4,12", code=1).split())
    assert "--length must be at most 11, the longest text that" in refused
    images = write_graph(tmp_path / "images.onnx", inputs=f"float[batch, 4, {WIDTH}] pixels")
    assert "--length must be left out" in " ".join(run(images, "--length", "5", code=1).split())
    assert "once" in run(graph, graph, code=1)
    assert "must go with --beside or --int8" in " ".join(run(graph, "--data", graph, code=1).split())
    assert "read-failed" in run(tmp_path / "none.onnx", code=1)
    assert "is left out" in " ".join(run(write_graph(graph, products=0), "--int8", "--rounds", "6").split())
