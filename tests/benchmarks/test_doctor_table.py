"""The doctor's table and its counts in docs/doctor.md are made of the study's runs and the kept answers."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

for package in ("torch", "transformers", "matplotlib", "scipy", "sklearn"):
    pytest.importorskip(package, reason="the study needs it")

sys.path.append(str(Path(__file__).resolve().parents[2]))
from benchmarks.study import doctor_table  # noqa: E402  (after the skips)

sys.path.pop()


@pytest.fixture(scope="module")
def settings() -> list[doctor_table.Setting]:
    return doctor_table.read_settings(doctor_table.RUNS)


def test_table_and_page_are_of_the_runs(settings: list[doctor_table.Setting], tmp_path: Path) -> None:
    table = doctor_table.make_table(settings, json.loads(doctor_table.ANSWERS.read_text()))
    doctor_table.write_table(table, tmp_path / "doctor.csv")
    later = "the study has other runs by now: python -m benchmarks.study.doctor_table --ask"
    assert (tmp_path / "doctor.csv").read_bytes() == doctor_table.TABLE.read_bytes(), later
    assert doctor_table.count_hits(table, doctor_table.PAGE) == doctor_table.PAGE.read_text(), later


@pytest.mark.parametrize(
    ("gains", "of_yes", "of_no"),
    [
        ((0.3, 0.1), "hit", "miss"),
        ((-0.3, 0.3), "miss", "hit"),
        ((0.1, 0.3), "open", "hit"),
        ((0.1, -0.3), "miss", "hit"),  # a yes where another beta harms and none gains
    ],
)
def test_hits_and_misses(
    settings: list[doctor_table.Setting], gains: tuple[float, float], of_yes: str, of_no: str
) -> None:
    setting = next(one for one in settings if one.title == "images, random start")
    rows = tuple(
        replace(setting.rows[0], gain=gain, gain_interval=0.2, beta=beta, valid=valid)
        for gain, beta, valid in zip(gains, (0.1, 1.0), (0.6, 0.5), strict=True)
    )
    made = doctor_table.Setting(setting.arm, rows)
    for answer, verdict in (("yes", of_yes), ("probably not", of_no)):
        (row,) = doctor_table.make_table([made], {made.pair: {"answer": answer, "beta": [0.07, 0.2, 0.6]}})
        assert (row["answer: hit"], row["beta: hit"]) == (verdict, "hit")
    (row,) = doctor_table.make_table([made], {made.pair: {"answer": answer, "beta": [0.2, 0.7, 2.0]}})
    assert row["beta: hit"] == "miss: 0.1"
