"""What a fidelity test found is known to later commands, said where it differs, and never taken from elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.attention_graphs import saved, token_samples, token_teacher
from support.commands import shd

from shd_ref.teacher import Fidelity, FidelityReport, PrecomputeOptions, Setting
from shd_ref.teacher.study.kept import advise_plan, keep_report, kept_path

PAPER = Setting(2, "progressive", None, "shd", "map")
BY_ROW = replace(PAPER, alpha_per="row")
MATCHED = replace(PAPER, plan="matched", matched_by="residual")
MATCHED_BY_ROW = replace(MATCHED, alpha_per="row")
CONSTANT = replace(PAPER, strategy="constant")


def found(setting: Setting, excess: float, margin: float | None = 0.01) -> Fidelity:
    return Fidelity(setting, 0.1, 0.2, 0.3, 0.3, 1.0 + excess, 0.05, excess, margin, ((((0, 1), (2, 3)),),))


def make_report(*results: Fidelity) -> FidelityReport:
    return FidelityReport("logits", ("softmax",), (), 128, True, 0.9, results)


CLEAR = make_report(
    found(MATCHED_BY_ROW, 0.0, 0.0),
    found(MATCHED, 0.005),
    found(BY_ROW, 0.1),
    found(PAPER, 0.3),
    found(CONSTANT, 0.4),
)


def paired_teacher() -> onnx.ModelProto:
    """Heads 0 and 2 look alike, as do 1 and 3: neighbours do not."""
    model = token_teacher()
    projections = [node.input[1] for node in model.graph.node if node.op_type == "MatMul"][:2]  # queries, keys
    for tensor in model.graph.initializer:
        if tensor.name in projections:
            weight = numpy_helper.to_array(tensor).copy()
            weight[:, 6:] = weight[:, :6]
            tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
    return model


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return saved(token_teacher(), tmp_path)


def test_of_what_samples_cannot_tell_apart_the_fewest_options_are_recommended() -> None:
    assert CLEAR.best()[2].setting == MATCHED_BY_ROW
    assert CLEAR.recommended()[2].setting == MATCHED
    noise = make_report(*(found(one.setting, one.excess, 0.5) for one in CLEAR.results))
    assert noise.recommended()[2].setting == PAPER
    alone = make_report(*(found(one.setting, one.excess, None) for one in CLEAR.results))
    assert alone.recommended()[2].setting == PAPER
    # Of equally many options the lowest cost.
    assert (
        make_report(found(MATCHED_BY_ROW, 0.0, 0.0), found(BY_ROW, 0.001), found(MATCHED, 0.002))
        .recommended()[2]
        .setting
        == BY_ROW
    )


def test_another_plan_than_the_best_is_said(teacher: Path) -> None:
    usual = PrecomputeOptions(2)
    assert advise_plan(teacher, usual) is None  # nothing is known
    assert keep_report(teacher, CLEAR) == kept_path(teacher)
    said = advise_plan(teacher, usual) or ""
    for part in ("progressive plan, shd per map weights: loss 1.3", "matched plan, shd per map weights: loss 1.005"):
        assert part in said
    assert "lower by 0.29 ± 0.02 on 128 samples (teacher.fidelity.json)" in said
    for same in (replace(usual, plan="matched"), replace(usual, plan="matched", alpha_per="row")):
        assert advise_plan(teacher, same) is None
    assert advise_plan(teacher, replace(usual, num_student_heads=1)) is None  # was not measured
    for other in (replace(usual, plan="balanced"), replace(usual, plans=((((0, 1), (2, 3)),),))):
        assert "has not measured; the best" in (advise_plan(teacher, other) or "")


def test_factored_records_are_compared_with_what_they_can_hold(teacher: Path) -> None:
    rows = make_report(found(MATCHED_BY_ROW, 0.0, 0.0), found(MATCHED, 0.1), found(PAPER, 0.3))
    keep_report(teacher, rows)
    usual = PrecomputeOptions(2, form="factored")
    assert advise_plan(teacher, replace(usual, plan="matched")) is None
    assert "better is matched plan, shd per map weights" in (advise_plan(teacher, usual) or "")


@pytest.mark.parametrize("damage", ["teacher", "flip", "empty", "not JSON", "link", "folder"])
def test_what_is_not_of_this_teacher_is_not_believed(teacher: Path, tmp_path: Path, damage: str) -> None:
    keep_report(teacher, CLEAR)
    path, options = kept_path(teacher), PrecomputeOptions(2)
    data = path.read_bytes()
    assert advise_plan(teacher, options) is not None
    if damage == "teacher":
        onnx.save(paired_teacher(), teacher)
    elif damage == "link":
        path.rename(tmp_path / "elsewhere.json")
        path.symlink_to(tmp_path / "elsewhere.json")
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"flip": data.replace(b"0.3", b"0.4", 1), "empty": b"", "not JSON": b"[" * 10**5}[damage])
    assert advise_plan(teacher, options) is None
    if damage == "link":  # a new result takes the link's place and leaves what it led to
        assert keep_report(teacher, make_report(found(PAPER, 0.0))) == path
        assert not path.is_symlink()
        assert (tmp_path / "elsewhere.json").read_bytes() == data
    if damage == "folder":
        assert keep_report(teacher, CLEAR) is None
        assert sorted(place.name for place in tmp_path.iterdir()) == ["teacher.fidelity.json", "teacher.onnx"]


def test_commands_keep_it_and_say_it(teacher: Path, tmp_path: Path) -> None:
    """The whole way, on a teacher that only a matched plan merges without loss."""
    onnx.save(paired_teacher(), teacher)
    np.savez(tmp_path / "data.npz", **token_samples(60, 12, least=12))
    given = (teacher, "--inputs", tmp_path / "data.npz", "--student-heads", 2, "--threads", 1)
    shd("fidelity", *given)
    document = json.loads(shd("fidelity", *given, "--json"))
    assert kept_path(teacher).is_file()
    best = document["results"][0]
    assert (best["plan"], best["excess"]) == ("matched", 0.0)
    assert "--plan matched" in document["recommended"]["2"]
    assert "better is matched plan" in shd("precompute", *given, "--out", tmp_path / "cache")
    assert "better is matched plan" in shd("plan", *given)
    taken = document["recommended"]["2"].split()[2:-2]
    assert "fidelity" not in shd("precompute", *taken, "--out", tmp_path / "other")
