"""From a shrunk student to its training: heads, layers and plans come from shrink.json, and nothing is said twice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
pytest.importorskip("cyclopts", reason="the commands need cyclopts")

from support.binding.trainer_cases import make_trainer
from support.commands import invoke
from support.exported_models import trace
from support.refusals import refusal
from support.shrink.models import make_data, make_teacher

from shd_ref import ShdError
from shd_ref.cache import CacheReader
from shd_ref.cli import load_app
from shd_ref.shrink import read_student
from shd_torch import OnlineTeacher, SupervisedDataset, capture_attention, layer_kls
from shd_torch import load_student as load
from shd_torch.shrink import shrink

STUDENTS: dict[str, dict[str, Any]] = {
    "llama": {"heads": 2, "layers": [0, 2]},
    "bert": {"heads": 3, "drop_attention": [1], "drop_activations": [0], "plan": "matched"},
}


def run(*words: object, code: int = 0) -> str:
    result = invoke(load_app(), ["precompute", *words])
    assert result.exit_code == code, result.output
    return result.output


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@pytest.mark.parametrize("name", STUDENTS)
def test_shrink_precompute_and_train(name: str, tmp_path: Path) -> None:
    if name == "bert":
        pytest.importorskip("networkx", reason="matched plans need the extra 'oracles'")
    changes = {} if name == "llama" else {"num_attention_heads": 6}
    teacher = make_teacher(name, **changes).float()
    data = make_data(name, samples=8)
    made = shrink(teacher, data, **STUDENTS[name], out=tmp_path / "student")
    if name == "bert":
        assert len({json.dumps(layer["plan"]) for layer in made.report["layers"] if "plan" in layer}) == 2
    trace(teacher, {key: part[:2] for key, part in data.items()}, tmp_path / "teacher.onnx")
    np.savez(tmp_path / "data.npz", **{key: part.numpy() for key, part in data.items()})
    words = [tmp_path / "teacher.onnx", "--inputs", tmp_path / "data.npz", "--codec", "float32"]
    run(*words, "--student", tmp_path / "student", "--out", tmp_path / "cache")

    form = CacheReader(tmp_path / "cache").manifest.attention
    pairs = [[layer.student_layer, layer.teacher_layer] for layer in form.layers]
    assert pairs == made.report["layer_map"] == [[0, 0], [1, 2]]
    assert form.num_student_heads == STUDENTS[name]["heads"]
    assert form.num_student_layers == 2

    samples = [{key: part[i] for key, part in data.items()} | {"labels": data["input_ids"][i]} for i in range(8)]
    student = load(tmp_path / "student")
    joined = SupervisedDataset(samples, tmp_path / "cache")
    teacher.set_attn_implementation("sdpa")
    online = OnlineTeacher.for_student(teacher, tmp_path / "student")
    with capture_attention(student, online.student_layers) as captured, torch.no_grad():
        student(**data)
    rows = data["attention_mask"].bool()
    live = layer_kls(captured, online(**data), loss_mask=rows)
    trainer = make_trainer(
        tmp_path / "run",
        train=joined,
        model=student,
        collate=collate,
        beta=0.1,
        arguments={"per_device_train_batch_size": 8, "max_steps": 2, "save_strategy": "steps", "save_steps": 2},
    )
    stored = trainer.data_collator([joined[i] for i in range(8)])["supervision"]
    with capture_attention(student, stored.layers) as captured, torch.no_grad():
        student(**data)
    cached = layer_kls(captured, stored, loss_mask=rows)
    for layer, term in live.items():
        assert float(cached[layer]) == pytest.approx(float(term), rel=1e-3, abs=1e-5)
    trainer.train()
    assert all(f"shd_loss_layer_{layer}" in trainer.state.log_history[0] for layer in (0, 1))
    # A checkpoint is a student's folder like the first one.
    again = load(tmp_path / "run" / "checkpoint-2")
    for one, two in zip(again.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, two)
    make_trainer(tmp_path / "live", train=samples, model=again, collate=collate, beta=0.1, teacher=online).train()


def test_what_a_student_says_is_not_said_again(tmp_path: Path) -> None:
    shrink(make_teacher("llama").float(), make_data("llama"), heads=2, out=tmp_path / "student")
    words = ["teacher.onnx", "--inputs", "data.npz", "--out", tmp_path / "cache"]
    assert "--student-heads must be given, or --student" in run(*words, code=1)
    for option, value in (("--student-heads", 2), ("--layer-pairs", "0:1"), ("--plan", "balanced")):
        output = run(*words, "--student", tmp_path / "student", option, value, code=1)
        assert f"{option} must not be given with --student" in output
    assert "read-failed" in run(*words, "--student", tmp_path / "none", code=1)


def test_reports_that_contradict_themselves(tmp_path: Path) -> None:
    report = shrink(make_teacher("bert"), make_data("bert"), heads=2, drop_attention=[0]).report
    found = read_student(report)
    assert (found.num_heads, found.num_layers, found.layer_pairs) == (2, 2, ((0, 1), (1, 2)))
    layers = report["layers"]
    for changes in (
        {"format": 2},
        {"layer_map": [[0, 1]]},
        {"layer_map": [[0, 1], [0, 2]]},
        {"layer_map": [[0, 1], [1, 3]]},
        {"layer_map": 7},
        {"layers": layers[:2]},
        {"layers": [layers[0], layers[1], {**layers[2], "plan": [[[0, 1]]]}]},
        {"layers": [layers[0], layers[1], {**layers[2], "plan": "balanced"}]},
        {"student": {}},
    ):
        with refusal("read-failed"):
            read_student({**report, **changes})
    (tmp_path / "shrink.json").write_text("[" * 100_000, encoding="utf-8")
    with refusal("read-failed"):
        read_student(tmp_path)
    teacher = make_teacher("bert")
    for plan in ({1: "balanced"}, {1: "balanced", 2: "balanced", 3: "balanced"}):
        with pytest.raises(ShdError, match="each teacher layer"):
            OnlineTeacher(teacher, 2, found.layer_pairs, plan=plan)
    with pytest.raises(ShdError, match="explicit layer_map"):
        OnlineTeacher(teacher, 2, 2, plan={1: "balanced"})
