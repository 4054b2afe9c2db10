"""README and docs say what the JSON of the benchmarks says: ``python benchmarks/figures.py`` writes it."""

import sys
from pathlib import Path

import pytest

for package in ("scipy", "jinja2"):
    pytest.importorskip(package, reason="figures need it")

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
sys.path.append(str(ROOT / "docs" / "pictures"))
import cards  # noqa: E402  (after the skips)

from benchmarks import figures  # noqa: E402

del sys.path[-2:]


def test_pages_have_the_figures_of_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 0, capsys.readouterr().out


def test_pictures_are_of_the_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cards, "OUT", tmp_path)
    for draw in cards.DRAW.values():
        draw()
    old = [path.name for path in tmp_path.iterdir() if path.read_bytes() != (cards.HERE / path.name).read_bytes()]
    assert old == [], "PYTHONPATH=. python docs/pictures/cards.py draws them again"


def test_a_figure_is_found_by_its_words_and_written_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text(
        "It takes 1.50\nto 2 s.\n\n<!-- figures: sizes -->\n\n| a |\n|---|\n| 9 |\n\nEnd.\n"
    )
    (tmp_path / "sizes.json").write_text('{"low": 1.095, "high": [-0.0017, 1812.4], "gains": [0.1, 0.2, 0.3]}')
    (tmp_path / "figures.jinja").write_text(
        '% set file = load("sizes.json")\n@ page.md\nIt takes {{ n(file.low, 2) }} to {{ n(file.high[1]) }} s.\n'
        "@@ sizes\n| {{ n(file.high[0], 3, sign=True) }} |\n| {{ pm(file.gains, 3, sign=True) }} |\n"
    )
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    for words, expected, said in ((["--check"], 1, "other figures: sizes"), ([], 0, ""), (["--check"], 0, "")):
        monkeypatch.setattr(sys, "argv", ["figures.py", *words])
        assert figures.main() == expected
        assert said in capsys.readouterr().out
    rows = "| -0.002 |\n| +0.200 ± 0.248 |"  # half up, although 1.095 is smaller in binary
    assert (tmp_path / "page.md").read_text() == (
        f"It takes 1.10\nto 1,812 s.\n\n<!-- figures: sizes -->\n\n| a |\n|---|\n{rows}\n\nEnd.\n"
    )


def test_what_the_pages_call_significant() -> None:
    tasks = {task: figures.load(f"study/{task}.csv") for task in ("images", "language", "instructions")}
    tasks |= {task: figures.load(f"study/{task}.csv") for task in ("generation", "vit_s")}
    assert {
        (task, row["part"], row["label"], column)
        for task, rows in tasks.items()
        for row in rows
        for column in ("gain", "over_shd", "over_start")
        if float(row[f"{column}_holm"]) < 0.05
    } == {  # after Holm's adjustment
        ("language", "start", "base loss alone, start kept", "over_start"),
        ("language", "start", "SHD, beta 0.1, start squeezed", "over_start"),
        ("language", "pretrained", "SHD, beta 0.1", "gain"),
        ("language", "rivals", "sum mse, beta 1", "over_shd"),
        ("images", "copy", "attention copy", "gain"),
    }
    worse = [
        row["label"]
        for rows in tasks.values()
        for row in rows
        if row["method"] in ("hard", "constant") and float(row["over_shd"]) <= -float(row["over_shd_interval"])
    ]
    assert worse == []  # README: closed-form coefficients did not train significantly better
