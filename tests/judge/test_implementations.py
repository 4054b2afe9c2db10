"""Everything in the table of implementations conforms, at every dtype that it computes in."""

import os
from pathlib import Path

import pytest
from implementations import BY_CORE, JUDGED, Judged

from shd_ref.conformance import judge, judging
from shd_ref.conformance.__main__ import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

RUNS = [
    pytest.param(
        row,
        dtype,
        id=f"{row.name}-{dtype}",
        # Interpreted kernels take minutes; tests/torch_path/kernels runs them in CI. The reference answers its own
        # calls: in CI test_doors.py judges it by core, and the binding tells of a judge that is too strict.
        marks=[pytest.mark.gpu] * row.name.endswith("cuda")
        + [pytest.mark.nightly]
        * (dtype != row.dtypes[0] or row.name == "shd_ref" or row.name.endswith("interpreted")),
    )
    for row in JUDGED
    for dtype in row.dtypes
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "dtype"), RUNS)
def test_implementation_conforms(
    row: Judged, dtype: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    only, is_short = row.only, "not nightly" in request.config.option.markexpr
    if is_short:  # all crossings of options, but few further sessions
        monkeypatch.setitem(judging._FEWEST, "options", 24)
        # A program is sent all numbers as text: its options are judged in nightly runs.
        only = BY_CORE if "stranger" in row.name else only
    reason = row.absent()
    if reason and os.environ.get("CI") and "stranger" in row.name:
        pytest.fail(f"{row.name} {reason}: it is judged in every run of CI")
    if reason:
        pytest.skip(reason)
    with row.open() as implementation:
        report = judge(implementation, dtype=dtype, only=only, name=row.name)
    assert report.passed, report.summary()
    missing = {result.operation for result in report.results if result.status == "missing"}
    if not row.partial:
        assert missing <= row.lacks, report.summary()
    if row.name == "shd_ref":
        assert report.verdict == "conforms"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.nightly)])
def test_the_example_in_jax_conforms_to_core(
    dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jax", reason="the package jax is not installed")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # nearly all of its time is spent in compiling
    monkeypatch.chdir(EXAMPLES)
    words = ["--impl", "shd_jax", "--profile", "core", "--dtype", dtype, "--seed", "0", "--timeout", "60"]
    assert main(words) == 0, capsys.readouterr().out
    assert "conforms to core;" in capsys.readouterr().out
