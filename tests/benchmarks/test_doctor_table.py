"""The doctor's table and its counts in docs/doctor.md are made of the study's runs and the kept answers."""

import json
import sys
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
