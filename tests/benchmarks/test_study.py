"""The figures of the study are what they are called, and its tables are those of its runs."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

for package in ("matplotlib", "networkx", "scipy", "sklearn", "transformers"):
    pytest.importorskip(package, reason="the study needs the extras 'plot', 'oracles' and 'hf'")


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    sys.path.append(str(ROOT))
    yield
    sys.path.remove(str(ROOT))


def test_frechet_distance_of_two_normal_distributions() -> None:
    from benchmarks.study.tasks.generation import frechet_distance

    one = np.array([1.0, 2.0]), np.diag([4.0, 9.0])
    other = np.array([0.0, 2.0]), np.diag([1.0, 1.0])
    assert frechet_distance(one, one) == pytest.approx(0.0, abs=1e-12)
    # For commuting covariances: squared differences of means and of standard deviations.
    assert frechet_distance(one, other) == pytest.approx(1.0 + (2 - 1) ** 2 + (3 - 1) ** 2)


def test_gains_are_paired_and_intervals_are_students() -> None:
    from benchmarks.study.analysis import compare, half_interval, stale_runs
    from benchmarks.study.arms import Arm, Grid
    from benchmarks.study.runs import Record

    arms = tuple(
        Arm("toy", "beta", {"method": method, "beta": beta, "start": "random", "plan": plan}, {})
        for method, beta, plan in (
            ("base", 0.0, "progressive"),
            ("shd", 0.1, "progressive"),
            ("shd", 1.0, "progressive"),
            ("hard", 0.1, "matched"),
            ("constant", 0.1, "progressive"),
            ("constant", 1.0, "progressive"),
        )
    )
    grid = Grid("toy", 3, arms, {"beta": ""}, ("start",))
    record = Record(Path("absent"))
    tests = [[3.0, 2.0, 4.0], [2.9, 1.8, 3.7], [2.0, 1.0, 3.0], [2.8, 1.9, 3.8]]
    tests += [[9.0, 9.0, 9.0], [-3.0, -4.0, -2.0]]
    for arm, losses in zip(arms, tests, strict=True):
        for seed, loss in enumerate(losses):
            valid = loss + (5.0 if arm.options["beta"] == 1.0 else 0.0)
            figures = {"test_loss": loss, "valid_loss": valid, "step_seconds": 0.1, "gradient_share": {}}
            record.found[arm.key(seed)] = figures | {"sample_bytes": 8, "parameter_bytes": 0}
    base, small, large, hard, worse, better = compare(grid, record)
    assert hard.gain == pytest.approx(0.5 / 3)  # a plan makes no difference to the base loss
    assert hard.over_shd == pytest.approx(-0.1 / 3)  # against the same beta
    assert better.is_chosen
    assert better.over_shd == pytest.approx(5.8)  # against the beta that validation chose for SHD
    assert worse.over_shd == pytest.approx(9.0 * -1 + 2.8)  # against the same beta
    assert math.isnan(small.over_shd)
    assert math.isnan(base.gain)
    assert small.gain == pytest.approx(0.2)  # a smaller loss is better
    # Differences .1, .2, .3: their standard error times the t quantile of 2 degrees of freedom.
    assert small.gain_interval == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-5)
    assert base.test_interval == pytest.approx(half_interval([3.0, 2.0, 4.0]))
    assert small.is_chosen  # by the figures of validation
    assert not large.is_chosen
    assert small.gain_p == pytest.approx(0.0742, abs=5e-5)  # t = .2 / (.1 / sqrt(3)), two degrees of freedom
    assert stale_runs(grid, record) == []
    record.found[arms[1].key(2)]["start"] = "made by another version"
    assert compare(grid, record)[1].gain == pytest.approx(0.15)  # seed 2 did not start from the same weights
    assert set(map(str, stale_runs(grid, record))) == {str((arms[1], 2)), str((arms[0], 2))}
    for seed in range(3):
        record.found[arms[0].key(seed)] |= {"start": "same", "code": "old" if seed else "new", "data": "one"}
        record.found[arms[1].key(seed)] |= {"start": "same", "code": "new", "rival_code": "any"}
    assert compare(grid, record)[1].gain == pytest.approx(0.1)  # seed 0: the only one of the same code
    assert {seed for _, seed in stale_runs(grid, record)} == {0, 1, 2}  # the other arms have no start on record


def test_p_values_are_adjusted_as_holm_and_benjamini_hochberg_do() -> None:
    from benchmarks.study.analysis import adjust

    holm, bh = zip(*adjust([0.01, 0.04, 0.03, 0.005]), strict=True)
    assert holm == pytest.approx((0.03, 0.06, 0.06, 0.02))  # times 3, 1 (at least as before), 2 and 4
    assert bh == pytest.approx((0.02, 0.04, 0.04, 0.02))  # times 4/2, 4/4, 4/3 and 4/1, at most as after


def test_tables_and_pages_have_the_figures_of_the_runs(tmp_path: Path) -> None:
    from benchmarks.study.analysis import compare_all, count_comparisons, write_table
    from benchmarks.study.runs import Record
    from benchmarks.study.tasks import TASKS

    results = ROOT / "benchmarks" / "results" / "study"
    rows = compare_all(TASKS, Record(results / "runs.jsonl"))
    for task in TASKS:
        write_table(rows[task], tmp_path / f"{task}.csv")
        assert (tmp_path / f"{task}.csv").read_bytes() == (results / f"{task}.csv").read_bytes()
    page = (ROOT / "docs" / "study" / "setup.md").read_text(encoding="utf-8")
    assert f"all {count_comparisons(rows)} comparisons" in page
