"""Wrong implementations are caught, and the report tells a stranger what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref.conformance import ConformanceError, Report, cases, check, judge
from shd_ref.merging import mixing


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


def test_loss_is_a_cross_entropy(wrong: Any, vectors: Path) -> None:
    def cross_entropy(supervision: Any, student_logits: Any, **options: Any) -> float:
        def entropy(maps: Any) -> float:
            terms = np.where(maps > 0, maps * np.log(np.where(maps > 0, maps, 1.0)), 0.0).sum(-1)
            return float(terms.mean((0, 2)).sum())

        maps = supervision if isinstance(supervision, list) else [supervision]
        return shd_ref.shd_loss(supervision, student_logits, **options) - sum(map(entropy, maps))

    only = ["shd_loss/*", "law/loss-zero-iff-equal", "law/loss-uniform-student"]
    report = judge(wrong(shd_loss=cross_entropy), vectors=vectors, only=only)
    assert {"shd_loss/uniform", "law/loss-zero-iff-equal", "law/loss-uniform-student"} <= failed(report)
    assert "this is the cross entropy, not KL" in hints(report)


def test_temperature_squared(wrong: Any, vectors: Path) -> None:
    def loss(*args: Any, temperature: float = 1.0, **options: Any) -> float:
        return temperature**2 * shd_ref.shd_loss(*args, temperature=temperature, **options)

    report = judge(wrong(shd_loss=loss), only="law/loss-*", vectors=vectors)
    crossed = {f"law/loss-{name}" for name in ("options", "magnitudes", "near-sums", "sizes")}
    assert failed(report) == {"law/loss-temperature"} | crossed
    assert "multiplied by T^2" in hints(report)


def test_per_sample_mean(wrong: Any, vectors: Path) -> None:
    def loss(supervision: Any, student_logits: Any, *, loss_mask: Any = None, **options: Any) -> float:
        if isinstance(supervision, list) or loss_mask is None:
            return shd_ref.shd_loss(supervision, student_logits, loss_mask=loss_mask, **options)
        parts = [
            shd_ref.shd_loss(
                supervision[b : b + 1], student_logits[b : b + 1], loss_mask=loss_mask[b : b + 1], **options
            )
            for b in range(len(supervision))
        ]
        return float(np.mean(parts))

    report = judge(wrong(shd_loss=loss), only="law/loss-*", vectors=vectors)
    assert "law/loss-batch-mean" in failed(report)
    assert "taken per sample and then over samples" in hints(report)


def test_value_outputs_of_merged_heads_not_summed(wrong: Any, vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def squeeze(teacher_probs: Any, value_outputs: Any, num_student_heads: int, **options: Any) -> Any:
        # Only the later rounds see the wrong value outputs, so a first round is always right.
        from shd_ref.conformance.variants import Choices, compute

        inputs = {
            "teacher_probs": teacher_probs,
            "value_outputs": value_outputs,
            "num_student_heads": num_student_heads,
            **options,
        }
        right = shd_ref.squeeze_heads(**inputs)
        if options.get("strategy", "shd") != "shd":
            return right
        return mixing.SqueezeResult(
            **{**vars(right), **compute("squeeze_heads", inputs, Choices(merged_outputs="mean"))}
        )

    report = judge(wrong(squeeze_heads=squeeze), only="law/squeeze-*", dtype="float32", vectors=vectors)
    assert "law/squeeze-one-head" in failed(report)
    assert "a merged head gets the mean of the two value outputs" in hints(report)
    (result,) = [r for r in report.failures if r.id == "law/squeeze-one-head"]
    assert result.finding
    assert "round 2, pair 0" in result.finding.problem


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
