"""Everything in the table of implementations conforms, at every dtype that it computes in."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import results
from implementations import JUDGED, Judged

from shd_ref.conformance import Status, cases, judge
from shd_ref.conformance.vectors import Case

HALVES = ("float16", "bfloat16")
WIDENED = "attention_kl-triton-interpreted"  # tests/torch_path/kernels interprets the same programs


def marks(row: Judged, *, laws: bool = False) -> list[pytest.MarkDecorator]:
    """A row that needs a GPU, or repeats others."""
    gpu = [pytest.mark.gpu] if row.name.endswith("cuda") else []
    return gpu + [pytest.mark.nightly] * (laws or row.name == WIDENED)


def chosen(row: Judged, dtype: str, laws: bool) -> str | list[str] | None:
    """Ids or globs of what a row is judged by at a dtype."""
    if not row.once and dtype in HALVES and row.only is None:
        # Every vector at both; the laws, which hold in float32, before a release.
        return [item.id for item in cases() if isinstance(item, Case) != laws]
    if not row.once or dtype == row.dtypes[0]:
        return row.only
    before = set(row.dtypes[: row.dtypes.index(dtype)])
    return [item.id for item in cases() if dtype in item.dtypes and not before & set(item.dtypes)]


RUNS = [
    pytest.param(row, dtype, False, id=f"{row.name}-{dtype}", marks=marks(row))
    for row in JUDGED
    for dtype in row.dtypes
] + [
    pytest.param(row, dtype, True, id=f"{row.name}-{dtype}-laws", marks=marks(row, laws=True))
    for row in JUDGED
    for dtype in row.dtypes
    if dtype in HALVES and not row.once and row.only is None
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
        report = judge(implementation, dtype=dtype, only=chosen(row, dtype, laws), name=row.name)
    assert report.passed, report.summary()
    missing = [result for result in report.results if result.status is Status.MISSING]
    if not row.partial and not laws:
        assert all(row.lacks & set(result.operations) for result in missing), report.summary()
        assert report.count(Status.PASSED) > 10 * len(missing)
    assert report.count(Status.PASSED) > (5 if laws or (row.once and dtype != row.dtypes[0]) else 100)
    if row in results.SHOWN and dtype == results.widest(row):
        stale = "run `cd tests && python -m results`"
        assert results.read()[row.name] == results.column(report), stale
        assert results.line(row, report) in results.TABLE_PAGE.read_text(encoding="utf-8"), stale
