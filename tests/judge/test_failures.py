"""Wrong implementations are caught, and the report tells a stranger what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref.conformance import ConformanceError, Report, cases, check, judge


def failed(report: Report) -> set[str]:
    return {result.id for result in report.failures}


def hints(report: Report) -> str:
    return "\n".join(s for r in report.failures if r.finding for s in r.finding.looks_like)


def replaced(name: str, **fixed: Any) -> Any:
    return lambda *args, **inputs: getattr(shd_ref, name)(*args, **{**inputs, **fixed})


def test_misprinted_alpha(wrong: Any, vectors: Path) -> None:
    mutant = wrong(
        solve_alpha=replaced("solve_alpha", rule="as_printed"),
        squeeze_heads=replaced("squeeze_heads", alpha_rule="as_printed"),
    )
    only = ["solve_alpha/*", "law/alpha-*", "law/squeeze-shd"]
    report = judge(mutant, dtype="float32", vectors=vectors, only=only)
    caught = failed(report)
    assert {"law/alpha-antisymmetric", "law/alpha-value-bias", "law/alpha-minimum", "law/squeeze-shd"} <= caught
    assert "N is taken as the source misprints it" in hints(report)
    text = report.summary(full=100)
    assert "ALPHA-2: `a* = -<N, M> / ||M||^2`" in text
    assert "looks like this equals what you get if N is taken as the source misprints it" in " ".join(text.split())


def test_arguments_that_change(wrong: Any, vectors: Path) -> None:
    def softmax(attn_logits: Any, attn_mask: Any = None, **options: Any) -> Any:
        probs = shd_ref.softmax(attn_logits, attn_mask, **options)
        if attn_mask is not None:
            attn_logits[~np.broadcast_to(attn_mask, attn_logits.shape)] = -np.inf
        return probs

    report = judge(wrong(softmax=softmax), only="law/softmax-*", vectors=vectors)
    assert failed(report) == {"law/softmax-masked-keys", "law/softmax-mask-broadcasts", "law/softmax-far-logits"}
    assert "MAP-8: No argument is changed by a call, nor by one that refuses." in report.summary()
    assert report.requirements()["MAP-8"]["failed"] == 3


def test_nan_on_masked_rows(wrong: Any, vectors: Path) -> None:
    def softmax(attn_logits: Any, attn_mask: Any = None, *, temperature: float = 1.0) -> Any:
        probs = shd_ref.softmax(attn_logits, attn_mask, temperature=temperature)
        return np.where(probs.sum(-1, keepdims=True) == 0, np.nan, probs)

    (case,) = cases("softmax/masked-row", vectors=vectors)
    with pytest.raises(ConformanceError) as caught:
        check(case, wrong(softmax=softmax))
    text = str(caught.value)
    assert "is NaN at index [1, 0]" in text
    assert "fully masked rows are NaN; they are exactly zero (MAP-2)" in " ".join(text.split())
    assert "masked-row: A fully masked row that is NaN or uniform." in text


def test_errors_without_or_with_other_codes(wrong: Any, vectors: Path) -> None:
    def asserting(*args: Any, **options: Any) -> Any:
        raise AssertionError("heads")

    def other(*args: Any, **options: Any) -> Any:
        raise shd_ref.ShdError("argument-value", "no")

    only = ["merge_plan/too-many", "solve_alpha/integer-mask"]
    report = judge(wrong(merge_plan=asserting, solve_alpha=other), only=only, vectors=vectors)
    problems = {r.id: (r.finding.problem, r.finding.expected, r.finding.got) for r in report.failures if r.finding}
    assert problems["merge_plan/too-many"][0].endswith("raised AssertionError without a code: heads")
    assert problems["solve_alpha/integer-mask"] == (
        "invalid inputs were refused with another code",
        "an error with the code argument-dtype or not-finite",
        "the error 'argument-value': no",
    )
    accepted = judge(wrong(merge_plan=lambda **inputs: ()), only="merge_plan/too-many", vectors=vectors)
    assert accepted.failures[0].finding
    assert accepted.failures[0].finding.problem == "invalid inputs were accepted"


def test_flat_alpha_is_judged_by_its_effect(wrong: Any, vectors: Path) -> None:
    def shifted(by: float) -> Any:
        return lambda *args, **options: np.clip(shd_ref.solve_alpha(*args, **options) + by, 0, 1)

    assert judge(wrong(solve_alpha=shifted(0.01)), only="solve_alpha/flat", dtype="float32", vectors=vectors).passed
    report = judge(wrong(solve_alpha=shifted(0.01)), only="solve_alpha/*", dtype="float32", vectors=vectors)
    assert failed(report) == {"solve_alpha/quarter"}
    far = judge(wrong(solve_alpha=shifted(0.5)), only="solve_alpha/flat", dtype="float64", vectors=vectors)
    assert far.failures[0].finding
    assert "is possible" in far.failures[0].finding.problem


def test_answers_of_another_shape_or_kind(wrong: Any, vectors: Path) -> None:
    for answer in (None, "alpha", [[1.0]], np.zeros((2, 2)), object(), np.array([1j]), {}):
        report = judge(wrong(solve_alpha=lambda answer=answer, **inputs: answer), only="*alpha*", vectors=vectors)
        assert {"solve_alpha/quarter", "law/alpha-antisymmetric"} <= failed(report), answer
        assert report.summary()
