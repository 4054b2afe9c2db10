"""Families whose architecture rules out some changes: the others are exact where they should be, and it says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import logits_of, make_data, make_teacher

from shd_torch import load_student
from shd_torch.shrink import shrink

ALLOWED: dict[str, dict[str, Any]] = {
    "mpnet": {"layers": [0, 2], "neurons": 12, "drop_attention": [0], "drop_activations": [2]}
}
"""Every change that a family allows, in one student."""


@pytest.mark.parametrize("name", ALLOWED)
def test_all_that_is_allowed_at_once(name: str, tmp_path: Path) -> None:
    teacher, data = make_teacher(name), make_data(name)
    copied = shrink(teacher, data, align=False).student
    other = make_data(name, samples=3, length=13, seed=5)
    torch.testing.assert_close(logits_of(copied, other), logits_of(teacher, other), atol=1e-10, rtol=0.0)
    made = shrink(teacher, data, **ALLOWED[name], out=tmp_path / "student")
    loaded = load_student(tmp_path / "student").double()
    torch.testing.assert_close(logits_of(loaded, data), logits_of(made.student, data), atol=1e-5, rtol=0.0)
    assert made.report["student"]["parameters"] < made.report["teacher"]["parameters"]
    assert all(0 < layer["layer_error"] < 1 for layer in made.report["layers"])


@pytest.mark.parametrize(("name", "options", "says"), [("mpnet", {"heads": 2}, "table of position biases")])
def test_changes_that_an_architecture_rules_out(name: str, options: dict[str, Any], says: str) -> None:
    with refusal("shrink-unsupported", says):
        shrink(make_teacher(name), make_data(name), **options)
