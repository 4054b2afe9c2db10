"""Wrong implementations fail, each at one operation, and newcomers' mistakes are named."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from judge.wrong import WRONG

import shd_ref
from shd_ref.conformance import judge, judging
from shd_ref.conformance.mistakes import WAYS
from shd_ref.conformance.specification import load_mistakes


@pytest.mark.parametrize("name", sorted(WRONG))
def test_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation, dtype, function = WRONG[name]
    if operation in ("matched_plan", "diagnose"):
        pytest.importorskip("networkx", reason="needs the extra 'oracles'")
        pytest.importorskip("scipy", reason="needs the extra 'oracles'")
    monkeypatch.setattr(judging, "KEPT_FINDINGS", 1)
    with np.errstate(all="ignore"):
        report = judge(SimpleNamespace(**{operation: function}), dtype=dtype, only=operation)
    assert report.failures


def test_there_are_enough() -> None:
    page = (Path(__file__).parents[2] / "docs" / "judge.md").read_text(encoding="utf-8")
    assert f"judges {len(WRONG)} [wrong" in page
    assert len({operation for operation, _, _ in WRONG.values()}) >= 20


NAMED: dict[str, tuple[str, Any]] = {
    "alpha-misprinted": ("solve_alpha", lambda **i: shd_ref.solve_alpha(**i, rule="as_printed")),
    "alpha-swapped": ("solve_alpha", lambda **i: 1 - shd_ref.solve_alpha(**i)),
    "alpha-padded-rows": ("solve_alpha", lambda query_mask=None, **i: shd_ref.solve_alpha(**i)),
    "attn-mask-ignored": ("softmax", lambda attn_logits, attn_mask=None: shd_ref.softmax(attn_logits)),
    "kl-reversed": ("shd_loss", lambda **i: _reversed(**i)),
    "loss-padded-rows": ("shd_loss", lambda loss_mask=None, **i: shd_ref.shd_loss(**i)),
    "layers-floor": ("layer_map", lambda **i: _floor(**i)),
    "plan-overshoot": ("merge_plan", lambda **i: _overshoot(**i)),
    "gradient-sign": ("shd_loss_gradient", lambda **i: -shd_ref.shd_loss_gradient(**i)),
}


def _reversed(supervision: Any, student_logits: Any, loss_mask: Any = None, attn_mask: Any = None) -> float:
    q, counted = shd_ref.softmax(student_logits, attn_mask), supervision.sum(-1) > 0
    counted = counted & (True if loss_mask is None else loss_mask[:, None])
    log_q, log_p = (np.log(np.where(x > 0, x, 1)) for x in (q, supervision))
    terms = (q * (log_q - log_p)).sum(-1) * counted
    return float((terms.sum((0, 2)) / np.maximum(counted.sum((0, 2)), 1)).sum())


def _floor(num_teacher_layers: int, num_student_layers: int) -> Any:
    return [(s, (s + 1) * num_teacher_layers // num_student_layers - 1) for s in range(num_student_layers)]


def _overshoot(num_teacher_heads: int, num_student_heads: int) -> Any:
    rounds = []
    while num_teacher_heads > max(num_student_heads, 1):
        rounds.append([(2 * i, 2 * i + 1) for i in range(num_teacher_heads // 2)])
        num_teacher_heads -= num_teacher_heads // 2
    return rounds


@pytest.mark.parametrize("mistake", NAMED)
def test_a_newcomers_mistake_is_named(mistake: str) -> None:
    operation, function = NAMED[mistake]
    report = judge(SimpleNamespace(**{operation: function}), only=f"{operation}/core")
    assert load_mistakes()[mistake]["message"] in report.summary().replace("\n             ", " ")


def test_every_mistake_is_data_that_can_be_read() -> None:
    for mistake in load_mistakes().values():
        for operation, options in mistake["gives"].items():
            assert options.get("way", "answer") in WAYS
            assert "way" in options or set(options) <= set(inspect.signature(getattr(shd_ref, operation)).parameters)


def test_float32_answers_are_told() -> None:
    narrow = SimpleNamespace(softmax=lambda *a, **i: shd_ref.softmax(*a, **i).astype(np.float32))
    assert "judge with --dtype float32, or enable 64 bits" in judge(narrow, only="softmax/core").summary()
