"""Every family with every change that it allows at once: nearer when refitted, saved, loaded, generated with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.refusals import refusal
from support.shrink.models import WIDTH, logits_of, make_data, make_teacher

from shd_torch import load_student
from shd_torch.export import export_student
from shd_torch.shrink import shrink

DROP = {"drop_attention": [0], "drop_activations": [2]}
FEWER = {"heads": 2, "neurons": 16}
ALL = FEWER | {"hidden": 16}
BY_LAYER: dict[str, Any] = {"heads": [2, 1], "head_dim": 5, "neurons": [9, 6]}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, ALL | DROP) for name in ("llama", "qwen3", "gemma", "gpt2", "vit", "opt")},
    **{name: (name, {}, FEWER | DROP) for name in ("bert", "distilbert")},
    "dinov2": ("dinov2", {}, {"heads": 2, "hidden": 16, **DROP}),
    "qwen2 by layer": ("qwen2", {}, {"heads": [2, 1], "kv_heads": 1, "neurons": [9, 6], **DROP}),
    "bert by layer": ("bert", {}, BY_LAYER | DROP),
    "gpt2 by layer": ("gpt2", {}, BY_LAYER | DROP | {"hidden": 14}),
    "xlm-roberta": ("xlm-roberta", {}, {"heads": [2, 3], "head_dim": 5, "neurons": 12, **DROP}),
    "mpnet": ("mpnet", {}, {"heads": 2, "head_dim": 6, "neurons": 12, **DROP}),
    "gpt-neox": ("gpt_neox", {}, {"hidden": 12, "heads": 2, "neurons": 12, **DROP}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False}, {"neurons": 12}),
    "olmo2": ("olmo2", {}, {"neurons": 12, **DROP}),
    "modernbert": ("modernbert", {}, {"heads": 2, "neurons": [12, 9], **DROP}),
    "bart-encoder": ("bart", {}, {"stack": "encoder", "heads": 2, "neurons": 12, **DROP}),
    "bart-decoder": ("bart", {}, {"stack": "decoder", "heads": [2, 3], "neurons": 12, **DROP}),
    "whisper-encoder": ("whisper", {}, {"stack": "encoder", "heads": 2, "head_dim": 5, "neurons": 12, **DROP}),
    "whisper-decoder": ("whisper", {}, {"stack": "decoder", "neurons": [12, 9]}),
    "t5-encoder": ("t5", {}, {"stack": "encoder", "neurons": 12, "drop_activations": [2]}),
    "t5-decoder": (
        "t5",
        {"feed_forward_proj": "gated-gelu"},
        {"stack": "decoder", "neurons": [12, 9], "drop_activations": [2]},
    ),
    "phi3": ("phi3", {}, {"hidden": 20, "heads": 1, "neurons": 12, **DROP}),
    "opt-post-norm": (
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 10},
        {"heads": 2, "neurons": 12, **DROP},
    ),
}
"""A family, changes of its configuration, and what it allows beside fewer layers."""


@pytest.mark.parametrize("case", CASES)
def test_all_that_is_allowed_at_once(case: str, tmp_path: Path) -> None:
    name, changes, options = CASES[case]
    teacher, data = make_teacher(name, **changes), make_data(name, samples=24)
    other = make_data(name, samples=3, length=13, seed=5)
    copied = shrink(teacher, data, align=False, stack=options.get("stack"))
    torch.testing.assert_close(logits_of(copied.student, other), logits_of(teacher, other), atol=1e-10, rtol=0.0)
    assert {layer["case"] for layer in copied.report["layers"]} == {"copied"}
    assert max(layer["layer_error"] for layer in copied.report["layers"]) < 1e-6
    start = shrink(teacher, data, layers=[0, 2], **options, align=False).report["layers"]
    made = shrink(teacher, data, layers=[0, 2], **options, out=tmp_path / "student")
    written = json.loads((tmp_path / "student" / "shrink.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(made.report))
    assert made.report["aligned"] == (name != "olmo2")
    for aligned, closed in zip(made.report["layers"], start, strict=True):
        assert 0 < aligned["layer_error"] <= closed["layer_error"]
        assert aligned["layer_error"] < closed["layer_error"] or name == "olmo2"
    assert made.report["sources"] == [0, 2]
    assert made.report["student"]["parameters"] < made.report["teacher"]["parameters"]
    loaded = load_student(tmp_path / "student").double()
    assert not loaded.training
    torch.testing.assert_close(logits_of(loaded, other), logits_of(made.student, other), atol=1e-5, rtol=0.0)
    if hasattr(loaded, "generate") and name != "whisper" and case != "t5-encoder":  # see docs/shrink.md
        words = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        tokens = [loaded.generate(data["input_ids"][1:3], use_cache=cached, **words) for cached in (True, False)]
        assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["qwen3", "phi3", "bert"])
def test_stock_students_load_with_the_auto_classes(name: str, tmp_path: Path) -> None:
    teacher, data = make_teacher(name), make_data(name)
    told: list[tuple[int, int, str]] = []
    made = shrink(teacher, data, heads=2, layers=2, out=tmp_path, progress=lambda *step: told.append(step))
    assert [(done, total) for done, total, _ in told] == [(step, told[0][1]) for step in range(len(told))]
    assert type(made.student) is type(load_student(tmp_path)) is type(teacher)
    loaded = type(teacher).from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(logits_of(loaded, data), logits_of(made.student, data), atol=1e-5, rtol=0.0)
    assert transformers.AutoModel.from_pretrained(tmp_path).config.num_attention_heads == 2


def test_a_model_of_one_stack_is_as_any_other(tmp_path: Path) -> None:
    config = make_teacher("t5").config
    teacher, data = transformers.T5EncoderModel(config).double().eval(), make_data("bert")
    made = shrink(teacher, data, neurons=12, layers=[0, 2], out=tmp_path / "student")
    assert "stack" not in made.report
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "student", dtype=torch.float64)
    assert loaded.config.d_ff == 12
    with refusal("argument-value", "stack must be encoder"):
        shrink(teacher, data, stack="decoder")
    with refusal("argument-value", "encoder or decoder"):
        shrink(make_teacher("t5"), make_data("t5"), neurons=12)


def test_students_that_are_not_stock_train() -> None:
    """Every weight gets a gradient; a new one of the class starts with the family's spread, not that of nn.Linear."""
    for name, changes, options in (
        ("bert", {}, {"heads": [1, 2, 3], "neurons": [5, 6, 7]}),
        ("dinov2", {"drop_path_rate": 0.2}, {"drop_attention": [1], "drop_activations": [0, 1]}),
    ):
        teacher, data = make_teacher(name, **changes), make_data(name)
        student = shrink(teacher, data, align=False, **options).student.train()
        labels = torch.zeros(6, dtype=torch.long) if name == "dinov2" else data["input_ids"]
        student(**data, labels=labels).loss.backward()
        assert all(p.grad is not None for label, p in student.named_parameters() if "mask_token" not in label)
        if name == "bert":
            query = type(student)(student.config).bert.encoder.layer[2].attention.self.query
            assert query.weight.shape == (18, WIDTH)
            assert 0.01 < float(query.weight.detach().std()) < 0.03
            assert not query.bias.detach().any()


def test_sizes_that_a_configuration_can_say_stay_stock() -> None:
    teacher, data = make_teacher("bert"), make_data("bert")
    for options in ({"heads": [2, 2, 2], "head_dim": 12}, {"neurons": [9] * 3}, {"heads": 2}):
        assert type(shrink(teacher, data, align=False, **options).student) is type(teacher)


@pytest.mark.slow
def test_graphs_have_an_operator_for_each_attention(tmp_path: Path) -> None:
    """Also by layer, where the configuration alone does not say the sizes."""
    data = make_data("gpt2")
    student = shrink(make_teacher("gpt2", layers=1).float(), data, **BY_LAYER | {"heads": 2, "neurons": 6}).student
    report = export_student(student, data, tmp_path / "student.onnx")
    assert (report.num_fused, report.num_softmax) == (1, 0)
