"""Families whose architecture rules out some changes: the others work together, and an error says why not all do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import logits_of, make_data, make_teacher

from shd_torch import load_student
from shd_torch.shrink import shrink

DROP = {"drop_attention": [0], "drop_activations": [2]}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mpnet": ("mpnet", {}, {"neurons": 12, **DROP}),
    "gpt-neox": ("gpt_neox", {}, {"hidden": 12, "heads": 2, "neurons": 12, **DROP}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False}, {"neurons": 12}),
    "olmo2": ("olmo2", {}, {"neurons": 12, "drop_attention": [0]}),
    "modernbert": ("modernbert", {}, {"heads": 2, "neurons": [12, 9], "drop_attention": [0]}),
    "phi3": ("phi3", {}, {"hidden": 20, "heads": 1, "neurons": 12, "drop_attention": [0]}),
    "opt-post-norm": (
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 10},
        {"heads": 2, "neurons": 12, **DROP},
    ),
}
"""A family, changes of its configuration, and what it allows beside fewer layers."""

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 2,
    "long_factor": [2.0] * 2,
    "factor": 1.0,
}


@pytest.mark.parametrize("case", CASES)
def test_all_that_is_allowed_at_once(case: str, tmp_path: Path) -> None:
    name, changes, options = CASES[case]
    teacher, data = make_teacher(name, **changes), make_data(name, samples=24)
    copied = shrink(teacher, data, align=False).student
    other = make_data(name, samples=3, length=13, seed=5)
    torch.testing.assert_close(logits_of(copied, other), logits_of(teacher, other), atol=1e-10, rtol=0.0)
    start = shrink(teacher, data, layers=[0, 2], **options, align=False).report["layers"]
    made = shrink(teacher, data, layers=[0, 2], **options, out=tmp_path / "student")
    assert made.report["aligned"] == (name != "olmo2")
    for aligned, closed in zip(made.report["layers"], start, strict=True):
        assert 0 < aligned["layer_error"] <= closed["layer_error"]
        assert aligned["layer_error"] < closed["layer_error"] or name == "olmo2"
    loaded = load_student(tmp_path / "student").double()
    torch.testing.assert_close(logits_of(loaded, other), logits_of(made.student, other), atol=1e-5, rtol=0.0)
    if hasattr(loaded, "generate"):
        words = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        tokens = [loaded.generate(data["input_ids"][1:3], use_cache=cached, **words) for cached in (True, False)]
        assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["gpt_neox", "modernbert"])
def test_rotary_heads_that_are_alike_merge_without_loss(name: str) -> None:
    """Their form has the rank of one head where no pair of entries turns slowly."""
    fast: dict[str, Any] = {"rope_type": "default", "rope_theta": 4.0, "partial_rotary_factor": 0.67}
    if name == "modernbert":
        fast = {kind: {"rope_type": "default", "rope_theta": 1.5} for kind in ("full_attention", "sliding_attention")}
    teacher, data = make_teacher(name, rope_parameters=fast), make_data(name)
    with torch.no_grad():
        for label, parameter in teacher.named_parameters():
            if "query_key_value" in label:
                heads = parameter.view(4, -1, *parameter.shape[1:])
                heads[1::2] = heads[::2]
            elif "Wqkv" in label:
                blocks = parameter.view(3, 4, -1, *parameter.shape[1:])
                blocks[:, 1::2] = blocks[:, ::2]
    made = shrink(teacher, data, heads=2, align=False)
    assert {layer["case"] for layer in made.report["layers"]} == {"rotary"}
    other = make_data(name, samples=3, length=13, seed=5)
    close = 1e-6 if name == "modernbert" else 1e-10  # which turns queries and keys in float32
    torch.testing.assert_close(logits_of(made.student, other), logits_of(teacher, other), atol=close, rtol=0.0)


@pytest.mark.parametrize(
    ("name", "changes", "options", "says"),
    [
        ("mpnet", {}, {"heads": 2}, "same position biases"),
        ("gpt_neox", {}, {"heads": 2, "head_dim": 12}, "head_dim must stay 6"),
        ("olmo2", {}, {"heads": 2}, "over all heads"),
        ("olmo2", {}, {"hidden": 12}, "do not fold"),
        ("modernbert", {}, {"hidden": 12}, "lies on the stream"),
        ("modernbert", {}, {"layers": [1, 2]}, "keep layer 0"),
        ("phi3", {}, {"heads": [4, 2, 2]}, "heads by layer"),
        ("phi3", {"rope_parameters": LONG, "max_position_embeddings": 20}, {"heads": 2}, "short_factor"),
        ("opt", {"word_embed_proj_dim": 10}, {"hidden": 12}, "other channels"),
        ("opt", {"layer_norm_elementwise_affine": False}, {"hidden": 12}, "layer_norm.weight"),
    ],
)
def test_changes_that_an_architecture_rules_out(
    name: str, changes: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with refusal("shrink-unsupported", says):
        shrink(make_teacher(name, **changes), make_data(name), **options)
