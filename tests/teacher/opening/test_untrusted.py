"""Damaged graphs: the answer to any fault in a file is one error or a graph that runs, never a crash."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from support.attention_graphs import attention_operator, encoder_layer, only_site, reason_of, saved
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.teacher import PrecomputeOptions, RunOptions, find_sites, load_teacher, open_session, squeeze_graph
from shd_ref.teacher.precompute.engine import precompute

CODES = {"graph-invalid", "graph-unsupported"}
GRAPHS = {
    "encoder": encoder_layer(mask="where", nan_guard=True).SerializeToString(),
    "operator": attention_operator().SerializeToString(),
}


def use(path: Path) -> str:
    """Load, walk, squeeze and open a graph; the code of the error, or ``ok``."""
    try:
        model = load_teacher(path)
        sites = [site for site in find_sites(model) if site.supported]
        if sites:
            squeezed = squeeze_graph(model, tuple(enumerate(sites)), PrecomputeOptions(1))
            open_session(squeezed.model, num_threads=1)
    except ShdError as error:
        return error.code
    return "ok"


@pytest.mark.parametrize("name", GRAPHS)
def test_flipped_bits_never_crash(name: str, tmp_path: Path) -> None:
    whole, path = GRAPHS[name], tmp_path / "teacher.onnx"
    codes = []
    for seed in range(24):
        random = Random(seed)
        damaged = bytearray(whole)
        for _ in range(random.choice([1, 2, 4, 32])):
            damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        path.write_bytes(damaged)
        codes.append(use(path))
    assert set(codes) <= {"ok", *CODES}
    assert "graph-invalid" in codes, "the flips hit nothing that matters"


@pytest.mark.parametrize("name", GRAPHS)
def test_truncated_files_never_crash(name: str, tmp_path: Path) -> None:
    whole, path = GRAPHS[name], tmp_path / "teacher.onnx"
    for length in np.linspace(0, len(whole) - 1, 25, dtype=int):
        path.write_bytes(whole[:length])
        assert use(path) == "graph-invalid"


ATTRIBUTE_VALUES = (-1, 0, 1, 5, 2**62, -(2**63), "x", [1, 2, 3], 1.5, float("nan"))


def damage(model: onnx.ModelProto, random: Random) -> None:
    """One change that no exporter makes: to a node, its wiring, its attributes, a weight, an input or the version."""
    graph = model.graph
    node, other = random.choice(graph.node), random.choice(graph.node)
    tensor, value = random.choice(graph.initializer), random.choice(graph.input).type.tensor_type
    names = [*(name for each in graph.node for name in each.output), *(each.name for each in graph.initializer), ""]
    place = random.randrange(max(len(node.input), 1))
    array = onnx.numpy_helper.to_array(tensor)
    ones = np.ones(array.shape, np.int64)
    kinds = {
        "drop": lambda: graph.node.remove(node),
        "operator": lambda: setattr(node, "op_type", other.op_type),
        "domain": lambda: setattr(node, "domain", random.choice(["ai.onnx", "com.microsoft", "ai.onnx.ml"])),
        "rewire": lambda: node.input.__setitem__(place, random.choice(names)),
        "cut": lambda: node.input.__delitem__(slice(place, None)),
        "widen": lambda: node.input.append(random.choice(names)),
        "rename": lambda: node.output.__setitem__(0, random.choice(["", "elsewhere"])),
        "mute": lambda: node.ClearField("output"),
        "forget": lambda: node.ClearField("attribute"),
        "retype": lambda: node.attribute[0].CopyFrom(
            helper.make_attribute(node.attribute[0].name, random.choice(ATTRIBUTE_VALUES))
        ),
        "void": lambda: node.attribute[0].CopyFrom(
            onnx.AttributeProto(name=node.attribute[0].name, type=random.choice([1, 2, 3, 4, 6, 7]))
        ),
        "axes": lambda: tensor.CopyFrom(onnx.numpy_helper.from_array(array[None], tensor.name)),
        "flat": lambda: tensor.CopyFrom(onnx.numpy_helper.from_array(array.ravel(), tensor.name)),
        "hollow": lambda: tensor.CopyFrom(onnx.numpy_helper.from_array(array.ravel()[:0], tensor.name)),
        "integers": lambda: tensor.CopyFrom(onnx.numpy_helper.from_array(ones, tensor.name)),
        "size": lambda: tensor.dims.__setitem__(0, random.choice([-1, 0, 2**40, 7])),
        "dtype": lambda: setattr(value, "elem_type", random.choice([0, 7, 8, 9, 11, 16, 99])),
        "rank": lambda: value.shape.dim.add(),
        "dim": lambda: setattr(value.shape.dim[0], "dim_value", random.choice([-3, 1, 2**31, 4])),
        "shapeless": lambda: value.ClearField("shape"),
        "opset": lambda: setattr(model.opset_import[0], "version", random.choice([0, 1, 7, 12, 13, 24, 10**6])),
    }
    with contextlib.suppress(IndexError):  # nothing there to damage
        kinds[random.choice(sorted(kinds))]()


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_changed_by_hand_never_crash(name: str, tmp_path: Path) -> None:
    path, codes = tmp_path / "teacher.onnx", []
    for seed in range(100):
        random, model = Random(seed), onnx.load_from_string(GRAPHS[name])
        for _ in range(random.choice([1, 1, 2, 4])):
            damage(model, random)
        path.write_bytes(model.SerializeToString())
        try:
            find_sites(load_teacher(path))
        except ShdError as error:
            codes.append(error.code)
    assert set(codes) <= CODES
    assert 20 < len(codes) < 100


NARROW = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2, 27: 6, 28: 6}
"""Bits of a number of these types of ``TensorProto``; of others NumPy says."""


@pytest.mark.parametrize("more", [0, -1, 1])
@pytest.mark.parametrize("form", ["none", "raw", "field", "external", "external without length"])
def test_weights_of_every_type_hold_the_numbers_of_their_shape(form: str, more: int, tmp_path: Path) -> None:
    """Five numbers, as two and four bits do not fill their bytes with them, in data of a byte or an entry more."""
    path = tmp_path / "teacher.onnx"
    kinds = {kind for kind in TensorProto.DataType.values() if kind in {*ir.DataType}}
    for kind in {*kinds, 0, 99}:
        tensor, bits = TensorProto(name="odd", data_type=kind, dims=[5]), NARROW.get(kind, 8)
        if kind not in (0, TensorProto.STRING, 99, *NARROW):
            bits = 8 * helper.tensor_dtype_to_np_dtype(kind).itemsize
        size = -(-5 * bits // 8) + more
        if form == "raw":
            tensor.raw_data = bytes(size)
        elif form.startswith("external"):
            (tmp_path / "weights").write_bytes(bytes(size))
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="weights")
            if form == "external":
                tensor.external_data.add(key="length", value=str(size))
        elif form == "field":
            field = "int32_data" if kind in (0, 99) else helper.tensor_dtype_to_field(kind)
            packed, per_number = bits in (2, 4), 2 if kind in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
            entries = (size - more if packed else 5 * per_number) + more
            getattr(tensor, field).extend([b"" if field == "string_data" else 0] * entries)
        node = helper.make_node("Identity", ["odd"], ["y"])
        graph = helper.make_graph([node], "g", [], [onnx.ValueInfoProto(name="y")], [tensor])
        path.write_bytes(helper.make_model(graph).SerializeToString())
        is_whole = more == 0 and (form == "field" or (form != "none" and kind != TensorProto.STRING))
        try:
            load_teacher(path)
            said = ""
        except ShdError as error:
            said = str(error)
        # Not every type that ONNX has is one of onnxruntime's.
        assert not said or "no more and no less" in said or "as onnxruntime says" in said
        assert ("no more and no less" not in said) == (is_whole and kind not in (0, 99))


def whole(name: str, numbers: list[int] | int) -> TensorProto:
    return onnx.numpy_helper.from_array(np.array(numbers, np.int64), name)


BOMBS: dict[str, list[tuple[str, ...]]] = {
    "range": [("Range", "zero", "much", "one")],
    "computed": [("Mul", "many", "many"), ("ConstantOfShape", "0")],
    "expanded": [("Mul", "many", "many"), ("Expand", "one", "0")],
    "one-hot": [("OneHot", "pair", "much", "pair")],
    "tiled": [("Tile", "pair", "many")] + [("Tile", str(n), "many") for n in range(5)],
    "joined": [("Concat", "pair", "pair")] + [("Concat", str(n), str(n)) for n in range(40)],
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_few_nodes_that_make_much_of_nothing_are_refused(name: str, tmp_path: Path) -> None:
    """Before anything is computed: onnxruntime would, when it opens the graph."""
    model = encoder_layer()
    model.graph.initializer.extend(
        [whole("zero", 0), whole("one", 1), whole("much", 2**40), whole("many", [2**15]), whole("pair", [0, 1])]
    )
    for number, (op_type, *inputs) in enumerate(BOMBS[name]):
        more = {"axis": 0} if op_type == "Concat" else {}
        model.graph.node.insert(
            number, helper.make_node(op_type, inputs, [str(number)], name=f"bomb-{number}", **more)
        )
    path = tmp_path / "teacher.onnx"
    path.write_bytes(model.SerializeToString())
    with refusal("graph-invalid") as caught:
        find_sites(load_teacher(path))
    assert "entries" in str(caught.value)


def teacher_with_loop(body: list[onnx.NodeProto], trips: int) -> onnx.ModelProto:
    """A loop over a tensor of one zero before the attention, from ``carried`` to ``made``."""
    kinds = {"trip": TensorProto.INT64, "go": TensorProto.BOOL, "stays": TensorProto.BOOL}
    values = {name: helper.make_tensor_value_info(name, kind, []) for name, kind in kinds.items()}
    values |= {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("carried", "made")}
    inputs, outputs = ("trip", "go", "carried"), ("stays", "made")
    nodes = [helper.make_node("Identity", ["go"], ["stays"]), *body]
    graph = helper.make_graph(nodes, "body", [values[name] for name in inputs], [values[name] for name in outputs])
    model = encoder_layer()
    for node in model.graph.node:
        node.input[:] = ["moved" if name == "x" else name for name in node.input]
    model.graph.initializer.extend([whole("trips", trips), whole("axis", [0])])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "true"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, np.float32), "start"))
    added = [
        helper.make_node("Loop", ["trips", "true", "start"], ["looped"], body=graph),
        helper.make_node("ReduceSum", ["looped", "axis"], ["sum"]),
        helper.make_node("Add", ["x", "sum"], ["moved"]),
    ]
    for number, node in enumerate(added):
        model.graph.node.insert(number, node)
    return model


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that has no end is not waited for as long as a slow machine would have to."""
    monkeypatch.setattr("shd_ref.teacher.graph.inputs._LEAST_SECONDS", 0.5)


def test_a_loop_without_an_end_is_ended(impatient: None) -> None:
    step = helper.make_node("Add", ["carried", "carried"], ["made"])
    assert only_site(teacher_with_loop([step], 3)).supported
    assert "may have no end" in reason_of(teacher_with_loop([step], 10**12))


def teacher_with_logits(kind: str, attends: bool) -> onnx.ModelProto:
    """Logits that a hostile part of the graph is added to, behind attention or without any."""
    model = encoder_layer()
    (made,) = model.graph.output
    if not attends:
        del model.graph.node[:], model.graph.input[1:], model.graph.output[:]
        model.graph.node.append(helper.make_node("Identity", ["x"], [made.name]))
    bodies = {
        "endless": helper.make_node("Add", ["carried", "carried"], ["made"]),
        "doubling": helper.make_node("Concat", ["carried", "carried"], ["made"], axis=0),
    }
    if kind == "expanding":  # by the number of samples, which no check of constants can tell
        model.graph.initializer.extend([whole("many", [2**29]), whole("axis", [0]), whole("one", 1)])
        steps = [("Shape", "x"), ("Gather", "0", "axis"), ("Mul", "1", "many"), ("Cast", "one"), ("Expand", "3", "2")]
        nodes = [helper.make_node(op_type, inputs, [str(n)]) for n, (op_type, *inputs) in enumerate(steps)]
        nodes[3].attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
        nodes.append(helper.make_node("ReduceSum", ["4", "axis"], ["sum"]))
    else:
        looped = teacher_with_loop([bodies[kind]], 10**12 if kind == "endless" else 40)
        nodes = list(looped.graph.node)[:2]
        names = {name for node in nodes for name in node.input}
        model.graph.initializer.extend(tensor for tensor in looped.graph.initializer if tensor.name in names)
    model.graph.node.extend([*nodes, helper.make_node("Add", [made.name, "sum"], ["logits"])])
    model.graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, None))
    return model


@pytest.mark.parametrize("attends", [True, False])
@pytest.mark.parametrize("kind", ["endless", "doubling", "expanding"])
def test_a_run_begins_within_the_bounds_of_a_probe(kind: str, attends: bool, tmp_path: Path, impatient: None) -> None:
    """Also where nothing but logits is asked of a teacher, and no attention was probed."""
    model, rng = teacher_with_logits(kind, attends), np.random.default_rng(0)
    (tmp_path / "teacher.onnx").write_bytes(model.SerializeToString())
    data = {"x": rng.normal(size=(3, 4, 12)).astype(np.float32), "mask": np.ones((3, 4), np.int64)}
    attention = {"num_student_heads": 1} if attends else {"form": "none"}
    options, run = PrecomputeOptions(logits="float16", **attention), RunOptions(mask="mask" if attends else None)
    with refusal("graph-unsupported", "run on a few short samples within"):
        precompute(tmp_path / "teacher.onnx", data, tmp_path / "cache", options, run)
    assert not (tmp_path / "cache").exists()


HOSTILE = """
import sys, time
from pathlib import Path
import numpy as np
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.options import PrecomputeOptions
folder, length, started = sys.argv[1], int(sys.argv[2]), time.monotonic()
try:
    precompute(
        f"{folder}/teacher.onnx",
        {"x": np.ones((2, length, 12), np.float32), "mask": np.ones((2, length), np.int64)},
        f"{folder}/cache",
        PrecomputeOptions(form="none", logits="float16"),
    )
except ShdError as error:
    # Not getrusage: its peak includes that of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    print(error.code, time.monotonic() - started, peak / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("kind", "length"),
    # Ten seconds of one core; with less patience an endless one is tried above.
    [pytest.param("endless", 4, marks=pytest.mark.nightly), ("doubling", 4096)],
)
def test_a_hostile_teacher_takes_less_than_20_seconds_and_2_gib(kind: str, length: int, tmp_path: Path) -> None:
    model = teacher_with_logits(kind, attends=False)
    if length > 4:  # a length that the graph fixes earns it nothing
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = length
    (tmp_path / "teacher.onnx").write_bytes(model.SerializeToString())
    command = [sys.executable, "-c", HOSTILE, str(tmp_path), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    code, seconds, gibibytes = done.stdout.split()
    assert code == "graph-unsupported"
    assert float(seconds) < 20
    assert float(gibibytes) < 2


@pytest.mark.parametrize("depth", [30, 300])
def test_functions_that_double_are_refused(depth: int, tmp_path: Path) -> None:
    model, versions = encoder_layer(), [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    calls = 2 if depth == 30 else 1
    for number in range(depth):
        inner, domain = (f"F{number - 1}", "own") if number else ("Identity", "")
        nodes = [helper.make_node(inner, [f"v{n}"], [f"v{n + 1}"], domain=domain) for n in range(calls)]
        model.functions.append(helper.make_function("own", f"F{number}", ["v0"], [f"v{calls}"], nodes, versions))
    model.graph.node.append(helper.make_node(f"F{depth - 1}", [model.graph.output[0].name], ["last"], domain="own"))
    model.opset_import.append(helper.make_opsetid("own", 1))
    assert "functions" in refused(model, tmp_path)


def test_weights_far_behind_are_found(tmp_path: Path) -> None:
    """No depth of a graph is too much for the walk."""
    model = encoder_layer()
    weight = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [12, 14])
    wanted, weight.name = weight.name, "far"
    for number in range(1200):
        names = ["far" if number == 0 else f"far-{number}"], [wanted if number == 1199 else f"far-{number + 1}"]
        model.graph.node.insert(number, helper.make_node("Identity", *names))
    assert only_site(load_teacher(saved(model, tmp_path))).supported


def refused(model: onnx.ModelProto, folder: Path) -> str:
    (folder / "teacher.onnx").write_bytes(model.SerializeToString())
    with refusal("graph-invalid") as caught:
        load_teacher(folder / "teacher.onnx")
    return str(caught.value)


def without_a_source(model: onnx.ModelProto) -> None:
    model.graph.node[-1].input[0] = "nowhere"


def with_an_attribute_of_another_type(model: onnx.ModelProto) -> None:
    product = next(node for node in model.graph.node if node.op_type == "MatMul")
    product.op_type, product.domain = "FusedMatMul", "com.microsoft"
    product.attribute.append(helper.make_attribute("transA", "x"))


@pytest.mark.parametrize(
    ("change", "name"), [(without_a_source, "nowhere"), (with_an_attribute_of_another_type, "transA")]
)
def test_wiring_that_onnxruntime_refuses_is_named(
    change: Callable[[onnx.ModelProto], None], name: str, tmp_path: Path
) -> None:
    model = encoder_layer()
    change(model)
    assert name in refused(model, tmp_path)


def test_weights_beyond_reason_are_refused() -> None:
    for number in (np.nan, np.inf, 1e30):
        model = encoder_layer()
        weight = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [12, 14])
        array = onnx.numpy_helper.to_array(weight).copy()
        array[3, 4] = number
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
        assert "beyond reason" in reason_of(model)
