"""Everything in the table of implementations conforms, at every dtype that it computes in."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import results
from implementations import INDEXERS, JUDGED, Judged

from shd_ref.conformance import OUTPUTS, Report, Status, cases, judge
from shd_ref.conformance.adapter import take_output
from shd_ref.conformance.laws import LAWS, refusals
from shd_ref.conformance.runner import _same
from shd_ref.conformance.variants import compute
from shd_ref.conformance.vectors import Case

ALL = ("float64", "float32", "float16", "bfloat16")
VECTORS_ALONE = {
    **dict.fromkeys(("shd_ref", "attention_kl-dense", "attention_kl-sdpa"), ALL[1:]),  # laws at float64
    "onnx-onnxruntime": ALL[2:],
    **dict.fromkeys(("onnx-reference", "javascript-stranger"), ALL),  # the laws are held by the others
}
"""Where the laws wait for a release: they take most of the time, and hold at a wider dtype or elsewhere."""
WIDENED = "attention_kl-triton-interpreted"  # tests/torch_path/kernels interprets the same programs


def marks(row: Judged, *, laws: bool = False) -> list[pytest.MarkDecorator]:
    """A row that needs a GPU, or repeats others."""
    gpu = [pytest.mark.gpu] if row.name.endswith("cuda") else []
    return gpu + [pytest.mark.nightly] * (laws or row.name == WIDENED)


def chosen(row: Judged, dtype: str, laws: bool) -> str | list[str] | None:
    """Ids or globs of what a row is judged by at a dtype; ``laws``: before a release, all where a page shows it."""
    if row.only is not None:
        return row.only
    before = set(row.dtypes[: row.dtypes.index(dtype)]) if row.once else set()
    items = [item for item in cases() if dtype in item.dtypes and not before & set(item.dtypes)]
    if waits(row, dtype) and not (laws and is_shown(row, dtype)):
        items = [item for item in items if isinstance(item, Case) != laws]
    return [item.id for item in items]


def is_shown(row: Judged, dtype: str) -> bool:
    return row in results.SHOWN and dtype == results.widest(row)


def waits(row: Judged, dtype: str) -> bool:
    return dtype in VECTORS_ALONE.get(row.name, ALL[2:]) and row.only is None


RUNS = [
    pytest.param(row, dtype, False, id=f"{row.name}-{dtype}", marks=marks(row))
    for row in JUDGED
    for dtype in row.dtypes
] + [
    pytest.param(row, dtype, True, id=f"{row.name}-{dtype}-laws", marks=marks(row, laws=True))
    for row in JUDGED
    for dtype in row.dtypes
    if waits(row, dtype) and chosen(row, dtype, laws=True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "dtype", "laws"), RUNS)
def test_implementation_conforms(row: Judged, dtype: str, laws: bool, tenfold: Callable[[str], None]) -> None:
    reason = row.absent()
    if reason and os.environ.get("CI") and "stranger" in row.name:
        pytest.fail(f"{row.name} {reason}: it is judged in every run of CI")
    if reason:
        pytest.skip(reason)
    if (row.name, dtype) == ("shd_ref", "float64"):
        tenfold(dtype)
    with row.open() as implementation:
        if (row.name, dtype) == ("shd_ref", "float64"):
            report = judge_beside_the_variants(implementation)
        else:
            report = judge(implementation, dtype=dtype, only=chosen(row, dtype, laws), name=row.name)
    assert report.passed, report.summary()
    missing = [result for result in report.results if result.status is Status.MISSING]
    if not row.partial and not laws:
        assert all(row.lacks & set(result.operations) for result in missing), report.summary()
        others = [result for result in missing if not set(result.operations) & INDEXERS]
        assert report.count(Status.PASSED) > 10 * len(others)
    assert report.count(Status.PASSED) > (5 if laws or (row.once and dtype != row.dtypes[0]) else 100)
    if (row.name, dtype) == ("onnx-onnxruntime", "float32"):
        check_what_the_functions_lack(report)
    if is_shown(row, dtype) and waits(row, dtype) == laws:
        stale = "run `cd tests && python -m results`"
        assert results.read()[row.name] == results.column(report), stale
        assert results.line(row, report) in results.TABLE_PAGE.read_text(encoding="utf-8"), stale


def judge_beside_the_variants(reference: Any) -> Report:
    """The reference's report, while the small operations behind the hints agree with it on all that the laws ask."""
    agreed = dict.fromkeys(OUTPUTS, 0)

    class Watching:
        def run_operation(self, operation: str, inputs: Any, dtype: str) -> Any:
            answer = getattr(reference, operation)(**inputs)
            try:
                outputs = compute(operation, inputs)
            except LookupError:
                return answer
            for name, value in outputs.items():
                assert _same(take_output(answer, name, OUTPUTS[operation]), value, name, dtype), (operation, name)
                agreed[operation] += 1
            return answer

    # Laws of refusals and of kinds of numbers make calls at the edge of what is accepted; hints need not follow.
    asked = {law.id for law in LAWS if law not in refusals.LAWS and "number-kinds" not in law.id}
    rest = judge(reference, name="shd_ref", only=[item.id for item in cases() if item.id not in asked])
    watched = judge(Watching(), name="shd_ref", only=asked)
    for names in (
        ("softmax", "soften", "value_outputs", "merge_plan", "plan_groups"),
        ("solve_alpha", "squeeze_heads", "shd_loss", "shd_loss_gradient", "layer_map"),
    ):
        assert all(agreed[name] for name in names)
    return replace(rest, results=(*rest.results, *watched.results))


LACKING = ("there is no ONNX function", "softens rows", "solves alphas on the maps as given")
"""What the functions lack; every other valid case of theirs must be answered."""

LAWS_OF_REFUSAL = (
    "law/refused-everywhere-",
    "law/refused-far-",
    "law/no-axis-stands-for-all-",
    "law/masks-refused-",
    "law/kinds-refused-",
    "law/uncounted-rows-exempt-",
)


def check_what_the_functions_lack(report: Report) -> None:
    """Nothing else of the ONNX functions is missing."""
    items = cases(("squeeze_heads/*", "solve_alpha/*", "law/*"))
    refused = {item.id for item in items if getattr(item, "codes", ())}
    ids = {item.id for item in items}
    missing = {
        result.id: result.note for result in report.results if result.status is Status.MISSING and result.id in ids
    }
    unexplained = {
        name: note
        for name, note in missing.items()
        if not any(reason in note for reason in LACKING)
        and not (
            (name in refused or name.startswith(LAWS_OF_REFUSAL)) and "a graph does not check its inputs" in note
        )
    }
    assert unexplained == {}
    passed = {result.id for result in report.results if result.status is Status.PASSED}
    assert {"law/squeeze-shd-per-row", "law/squeeze-hard", "law/alpha-minimum"} <= passed
    assert sum(name.startswith("squeeze_heads/") for name in passed) > 50
    assert sum(name.startswith("solve_alpha/") for name in passed) > 30
