"""What ``shd inspect`` says, and how ``--sites`` selects."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.attention_graphs import GraphBuilder, bare_attention, bare_samples, encoder_layer, saved, token_teacher
from support.refusals import refusal

pytest.importorskip("cyclopts", reason="the commands need cyclopts")

from support.commands import shd

from shd_ref import ShdError
from shd_ref.cache import CacheReader
from shd_ref.teacher import PrecomputeOptions, RunOptions, find_sites, select_sites
from shd_ref.teacher.precompute.engine import precompute

FOUR = find_sites(bare_attention(2, num_layers=4))


def fused() -> onnx.ModelProto:
    build = GraphBuilder()
    output = build.op("MultiHeadAttention", "x", "x", "x", domain="com.microsoft", num_heads=2)
    model = build.model({"x": (onnx.TensorProto.FLOAT, ["batch", "length", 6])}, [output])
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return model


def schema_errors(document: Any) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    path = Path(__file__).parents[2] / "specs" / "schemas" / "inspect.schema.json"
    validator = jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))
    return [error.message for error in validator.iter_errors(document)]


@pytest.mark.parametrize(
    "model", [encoder_layer(num_kv_heads=2), bare_attention(3, num_layers=2), fused()], ids=["plain", "bare", "fused"]
)
def test_json_follows_its_schema(model: onnx.ModelProto, tmp_path: Path) -> None:
    sites = find_sites(model)
    words = ["inspect", saved(model, tmp_path), "--json"]
    document = json.loads(shd(*words, code=not any(site.supported for site in sites)))
    assert schema_errors(document) == []
    assert [entry["name"] for entry in document["sites"]] == [site.name for site in sites]
    del document["sites"][0]["cross"]
    assert schema_errors(document) != []


def test_inputs_are_listed_with_where_they_come_from(tmp_path: Path) -> None:
    model = token_teacher()
    shape = ["batch_size", 4, "past_sequence_length", 8]
    past = [
        onnx.helper.make_tensor_value_info(f"past_key_values.{n}.key", onnx.TensorProto.FLOAT, shape) for n in "01"
    ]
    positions = onnx.helper.make_tensor_value_info("position_ids", onnx.TensorProto.INT64, ["batch_size", "length"])
    model.graph.input.extend([*past, positions])
    teacher = saved(model, tmp_path)
    document = json.loads(shd("inspect", teacher, "--json"))
    assert schema_errors(document) == []
    found = {entry["name"]: (entry["part"], entry["supplied"]) for entry in document["inputs"]}
    assert found["input_ids"] == ("data", False)
    assert found["attention_mask"] == ("mask", False)
    assert found["past_key_values.1.key"] == ("past", True)
    assert found["position_ids"] == ("positions", True)
    table = shd("inspect", teacher)
    assert "past_key_values.0.key and 1 more" in table
    assert "shd: an empty past" in table


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [
        (None, [0, 1, 2, 3]),
        ("0", [0]),
        ("3,1", [1, 3]),
        ("1-2", [1, 2]),
        ("0, 2-3", [0, 2, 3]),
        ("2-9", [2, 3]),
        ("softmax_1", [1]),
        ("softmax_*", [0, 1, 2, 3]),
        ("softmax_[02],3", [0, 2, 3]),
    ],
)
def test_sites_are_selected_by_number_and_name(wanted: str | None, layers: list[int]) -> None:
    assert [site.layer for site in select_sites(FOUR, wanted)] == layers


@pytest.mark.parametrize("wanted", ["4", "3-1", "", "1,,2", "nobody", "0,9", "cross", "-1", "9" * 30])
def test_what_names_no_site_is_refused(wanted: str) -> None:
    with refusal("argument-value", r"from 0 to 3.*which names none"):
        select_sites(FOUR, wanted)


def test_kinds_select(tmp_path: Path) -> None:
    sites = find_sites(encoder_layer())
    assert select_sites(sites, "self") == sites
    assert "self" in shd("inspect", saved(encoder_layer(), tmp_path), "--sites", "self")
    assert "names none" in shd("inspect", tmp_path / "teacher.onnx", "--sites", "cross", code=1)


def two_layers() -> onnx.ModelProto:
    """A teacher of two layers with its second one out of reach, as a fused layer among plain ones is."""
    model = bare_attention(4, num_layers=2)
    second = [node for node in model.graph.node if node.op_type == "Softmax"][1]
    second.attribute[0].i = 2
    return model


def test_sites_that_cannot_be_squeezed_can_be_left_out(tmp_path: Path) -> None:
    teacher = saved(two_layers(), tmp_path)
    data = bare_samples(6, 5, num_layers=2)
    run_options = RunOptions(mask="mask", num_threads=1)
    with refusal("graph-unsupported", "select other sites"):
        precompute(teacher, data, tmp_path / "all", PrecomputeOptions(2), run_options)
    precompute(teacher, data, tmp_path / "first", PrecomputeOptions(2, sites="softmax_0"), run_options)
    (pair,) = CacheReader(tmp_path / "first").manifest.attention.layers
    assert (pair.student_layer, pair.teacher_layer, pair.site) == (0, 0, "softmax_0")
    both = PrecomputeOptions(2, sites="0", layer_pairs=((0, 0),))
    with pytest.raises(ShdError, match="select sites themselves"):
        precompute(teacher, data, tmp_path / "both", both, run_options)
