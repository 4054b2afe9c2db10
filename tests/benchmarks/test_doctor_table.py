"""The table of docs/doctor.md is what the study's runs and the doctor's kept answers make of it."""

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


def test_the_page_holds_the_table(settings: list[doctor_table.Setting]) -> None:
    answers = json.loads(doctor_table.ANSWERS.read_text())
    page = doctor_table.PAGE.read_text()
    assert doctor_table.write_page(doctor_table.PAGE, doctor_table.make_table(settings, answers)) == page, (
        "the study has other runs by now: python -m benchmarks.study.doctor_table --ask"
    )


def test_what_is_a_hit(settings: list[doctor_table.Setting], tmp_path: Path) -> None:
    setting = next(one for one in settings if one.title == "images, random start")
    gains = {"helps": (0.3, 0.2), "harms": (-0.3, 0.2), "open": (0.1, 0.2)}
    for name, told in {"helps": ("hit", "miss"), "harms": ("miss", "hit"), "open": ("open", "hit")}.items():
        rows = tuple(
            replace(row, gain=gains[name][0], gain_interval=gains[name][1], beta=beta, valid=valid)
            for row, beta, valid in zip(setting.rows[:1] * 2, (0.1, 1.0), (0.6, 0.5), strict=True)
        )
        made = doctor_table.Setting(setting.arm, rows)
        for answer, expected in zip(("yes", "probably not"), told, strict=True):
            for beta, hit in ((0.2, "hit"), (0.7, "miss: 0.1")):
                kept = {"answer": answer, "attention_error": 0.4, "beta": [beta / 3, beta, 5 * beta / 3]}
                line = doctor_table.make_table([made], {made.pair: kept}).splitlines()[-1]
                assert line.split(" | ")[-2:] == [expected, f"{hit} |"]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{doctor_table.MARKS[0]}\nold\n{doctor_table.MARKS[1]}\nafter")
    expected_page = f"before\n{doctor_table.MARKS[0]}\n\nnew\n\n{doctor_table.MARKS[1]}\nafter"
    assert doctor_table.write_page(page, "new") == expected_page
