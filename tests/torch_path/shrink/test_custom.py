"""Students whose layers have sizes of their own: exact where the algebra is, saved, generated with and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import logits_of, make_data, make_teacher, mixed_logits

from shd_ref.shrink import read_student
from shd_torch import load_student
from shd_torch.export import export_student
from shd_torch.shrink import shrink

EXACT: dict[str, dict[str, Any]] = {
    "bert": {"heads": [2, 4, 1], "head_dim": 24},
    "gpt2": {"heads": [1, 3, 2], "head_dim": 24},
    "vit": {"heads": [4, 1, 2], "head_dim": 24},
    "dinov2": {"heads": 2, "head_dim": 13},
    "llama": {"heads": [2, 4, 2], "kv_heads": 2},
}
"""Sizes at which a student head is as wide as its group, or stays inside its key/value heads."""


@pytest.mark.parametrize("name", EXACT)
def test_heads_by_layer_are_the_teacher_with_mixed_logits(name: str, tmp_path: Path) -> None:
    """At another batch size and length than those of the calibration, and from the folder."""
    teacher, options = make_teacher(name), EXACT[name]
    made = shrink(teacher, make_data(name), **options, align=False, out=tmp_path / "student")
    assert {layer["exact"] for layer in made.report["layers"]} == {True}
    assert made.report["student"]["heads"] == (options["heads"] if name == "dinov2" else tuple(options["heads"]))
    other = make_data(name, samples=3, length=13, seed=5)
    with mixed_logits(teacher, [(layer["groups"], layer["mixing"]) for layer in made.report["layers"]]):
        exact = logits_of(teacher, other)
    assert float((exact - logits_of(teacher, other)).abs().max()) > 1e-3  # the merge changes something
    torch.testing.assert_close(logits_of(made.student, other), exact, atol=1e-10, rtol=0.0)
    loaded = load_student(tmp_path / "student")
    assert not loaded.training
    torch.testing.assert_close(logits_of(loaded.double(), other), exact, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("name", [*EXACT, "roberta", "gemma"])
def test_neurons_by_layer_are_those_of_each_count(name: str) -> None:
    """A layer has the weights that it has in a student with its count in all layers."""
    teacher, data = make_teacher(name), make_data(name)
    counts = [7, 20, 12]
    student = shrink(teacher, data, neurons=counts, align=False).student.state_dict()
    prefix = {"gpt2": ".h.", "dinov2": ".layer.", "bert": ".layer.", "roberta": ".layer."}.get(name, "layers.")
    for number, count in enumerate(counts):
        alike = shrink(teacher, data, neurons=count, align=False).student.state_dict()
        own = {key: tensor for key, tensor in student.items() if f"{prefix}{number}." in key}
        assert own
        assert all(torch.equal(tensor, alike[key]) for key, tensor in own.items())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "dinov2"])
def test_every_other_change_beside_them(name: str, tmp_path: Path) -> None:
    """Dropped parts, fewer layers, a narrower stream, alignment; the graph has an operator for each attention."""
    teacher, data = make_teacher(name), make_data(name, samples=24)
    options: dict[str, Any] = {
        "layers": [0, 2],
        "heads": [2, 1],
        "neurons": [9, 6],
        "hidden": 14,
        "drop_attention": [0],
    }
    options |= {"head_dim": 5} if name != "llama" else {"kv_heads": 1}
    options |= {"drop_activations": [2]} if name != "llama" else {}
    made = shrink(teacher, data, **options, out=tmp_path / "student")
    loaded = load_student(tmp_path / "student")
    torch.testing.assert_close(logits_of(loaded.double(), data), logits_of(made.student, data), atol=1e-5, rtol=0.0)
    assert all(0 <= layer["layer_error"] < 1.5 for layer in made.report["layers"])
    if name != "gpt2":  # an export takes seconds
        return
    first = {key: tensor[:2] for key, tensor in data.items()}
    report = export_student(
        loaded.float(),
        {k: t.float() if t.is_floating_point() else t for k, t in first.items()},
        tmp_path / "student.onnx",
    )
    assert (report.num_fused, report.num_softmax) == (1, 0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_of_keys_changes_no_token(name: str) -> None:
    teacher, ids = make_teacher(name), make_data(name)["input_ids"]
    options = {"heads": [3, 1, 2], "head_dim": 5} if name == "gpt2" else {"heads": [4, 2, 3]}
    student = shrink(teacher, {"input_ids": ids}, **options, drop_attention=[1]).student
    words = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached, plain = (student.generate(ids[1:3], use_cache=use_cache, **words) for use_cache in (True, False))
    assert torch.equal(cached, plain)
    assert len(set(cached[0].tolist())) > 2


def test_stock_sizes_stay_stock_and_others_train() -> None:
    teacher, data = make_teacher("bert"), make_data("bert")
    for options in ({"heads": [2, 2, 2], "head_dim": 12}, {"neurons": [9] * 3}, {"heads": 2}):
        assert type(shrink(teacher, data, align=False, **options).student) is type(teacher)
    student = shrink(teacher, data, heads=[1, 2, 3], neurons=[5, 6, 7], align=False).student.train()
    student(**data, labels=data["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    start = type(student)(student.config)  # as a rival starts: with the family's spread, not that of nn.Linear
    query = start.bert.encoder.layer[2].attention.self.query
    assert query.weight.shape == (18, 24)
    assert 0.01 < float(query.weight.detach().std()) < 0.03
    assert not query.bias.detach().any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 0}, "from 1"),
        ({"heads": "2"}, "integer"),
        ({"kv_heads": 1}, "as many heads"),
        ({"head_dim": 5}, "one head_dim"),
        ({"neurons": 1 << 40}, "from 1"),
        ({"heads": 1, "kv_heads": 1}, "every weight"),
        ({"width": 3}, "must list"),
        (None, "must list"),
    ],
    ids=str,
)
def test_folders_that_contradict_themselves(change: dict[str, Any] | None, says: str, tmp_path: Path) -> None:
    shrink(make_teacher("bert"), make_data("bert"), heads=[2, 2, 4], align=False, out=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["layer_sizes"][0] |= change or {}
    config["layer_sizes"] = config["layer_sizes"][: 3 if change else 2]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with refusal("read-failed", says):
        load_student(tmp_path)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"heads": [2, 1]}, "argument-value", "3 layers; got 2"),
        ({"heads": [2, 5, 1]}, "heads-exceed", r"1\.\.4"),
        ({"neurons": [20, 21, 1]}, "argument-value", r"1\.\.20"),
        ({"neurons": [True, 1, 1]}, "argument-value", "integer"),
        ({"neurons": "abc"}, "argument-value", "integer"),
        ({"layers": [0, 2], "heads": [1, 2, 1]}, "argument-value", "2 layers; got 3"),
        ({"heads": [2, 3, 4], "kv_heads": 2}, "argument-value", "divide heads=3"),
    ],
)
def test_refusals(options: dict[str, Any], code: str, says: str) -> None:
    with refusal(code, says):
        shrink(make_teacher("llama"), make_data("llama"), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heads": 2}, "of 12 instead of 6"),
        ({"heads": 2, "head_dim": 6}, None),
        ({"heads": [2, 2, 4], "head_dim": 12}, "head_dim=6 saves time"),
        ({"heads": [2, 2, 4]}, None),
        ({"neurons": 4}, None),
    ],
)
def test_heads_that_save_no_time_are_remarked(options: dict[str, Any], says: str | None) -> None:
    remarks = shrink(make_teacher("bert"), make_data("bert"), align=False, **options).report["remarks"]
    assert [says in remark for remark in remarks] == ([] if says is None else [True])


def test_maps_are_merged_to_one_number_of_heads(tmp_path: Path) -> None:
    report = shrink(make_teacher("bert"), make_data("bert"), heads=[1, 2, 2], align=False).report
    with refusal("shrink-unsupported", "different numbers of heads"):
        read_student(json.loads(json.dumps(report)))
