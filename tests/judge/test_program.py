"""Door 3: programs that answer, and programs that do anything but."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from judge.conftest import VECTORS_ALONE

from shd_ref.conformance import Program, ProgramError, Status, judge
from shd_ref.conformance.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def command(programs: Path, *how: str) -> list[str]:
    return [sys.executable, str(programs / "through_reference.py"), *how]


def test_right_program_conforms(programs: Path, vectors: Path) -> None:
    only = [*VECTORS_ALONE, "law/squeeze-shd", "law/gradient-formula"]
    for dtype in ("float64", "float32"):
        with Program(command(programs)) as program:
            report = judge(program, dtype=dtype, vectors=vectors, only=only, name=program.name)
        assert report.passed, report.summary()
        assert report.name == "through reference"
        statuses = {result.id: result.status for result in report.results}
        assert statuses["solve_alpha/shapes-differ"] is Status.PASSED
        assert statuses["softmax/temperature-nan"] is Status.PASSED
        assert statuses["law/squeeze-shd"] is Status.PASSED
        assert statuses["law/gradient-formula"] is Status.MISSING


def test_dtype_that_is_not_listed_is_missing(programs: Path, vectors: Path) -> None:
    with Program(command(programs)) as program:
        report = judge(program, dtype="bfloat16", vectors=vectors)
    assert report.empty
    assert report.passed


def test_escapes_of_a_program_are_shown_and_not_obeyed(
    programs: Path, vectors: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [command(programs)[0], "--vectors", str(vectors), "--only", "solve_alpha/*"]
    assert main(["--program", words[0], *words[1:], "--", *command(programs, "escapes")[1:]]) == 1
    told = capfd.readouterr()
    assert not set("\x1b\x07\u202e") & set(told.out + told.err)
    assert r"\x1b[2J\x1b]0;title\x07all passed\u202e" in told.out


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("hang", "no answer within 0.5 seconds"),
        ("drip", "no answer within 0.5 seconds"),
        ("crash", "ended with status 3 instead of answering; the end of its stderr: out of cheese"),
        ("garbage", "a line that is not JSON"),
        ("deep", "a line that is not JSON"),
        ("order", "answered question 0 when asked question 1"),
        ("twice", "answered question 1 when asked question 2"),
        ("huge", "a line of more than 1000000 bytes"),
        ("shape", "an array that cannot be read"),
        ("minus", "a shape is a list of sizes from 0 on"),
        ("list", "must answer a JSON object a line"),
        ("empty", "answered with nothing; the output alpha is not among them"),
        ("nothing", "answered with neither 'outputs' nor an 'error' that has a code"),
    ],
)
def test_misbehaviour_is_told_and_never_hangs(programs: Path, vectors: Path, how: str, words: str) -> None:
    items = ["solve_alpha/quarter", "solve_alpha/clipped", "softmax/masked-row"]
    started = time.monotonic()
    with Program(command(programs, how), timeout=20.0, max_answer=1_000_000) as program:
        program.timeout = 0.5 if how in ("hang", "drip") else 20.0  # starting Python may take longer than this
        only = judge(program, only=items[:1], vectors=vectors)
        program.timeout = 20.0
        after = judge(program, only=items[2:], vectors=vectors)
    assert time.monotonic() - started < 30
    if how == "twice":
        assert only.passed
        (result,) = after.failures
    else:
        (result,) = only.failures
        assert after.passed, "the program is started again for the next item"
    assert result.finding
    assert words in result.finding.problem


def test_restarts_are_bounded(programs: Path, vectors: Path) -> None:
    with Program(command(programs, "crash"), max_restarts=1) as program:
        report = judge(program, only=["solve_alpha/*", "softmax/*"], vectors=vectors)
    problems = [result.finding.problem for result in report.failures if result.finding]
    assert sum("ended with status 3" in problem for problem in problems) == 2
    assert problems[-1].endswith("not asked: the program failed 2 times and is given up")


def test_flood_on_stderr_blocks_nothing(programs: Path, vectors: Path) -> None:
    with Program(command(programs, "stderr")) as program:
        assert judge(program, only=["solve_alpha/*", "shd_loss/*"], vectors=vectors).passed


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("cannot be started", ["/no/such/program"]),
        ("protocol '1'; got", [sys.executable, "PROGRAMS/through_reference.py", "other-protocol"]),
        ("ended with status 0", [sys.executable, "-c", "pass"]),
        ("not JSON", [sys.executable, "-c", "print('hello')"]),
    ],
)
def test_program_without_handshake(programs: Path, words: str, program: list[str]) -> None:
    asked = [part.replace("PROGRAMS", str(programs)) for part in program]
    with pytest.raises(ProgramError, match=re.escape(words)), Program(asked):
        pass


def test_command_line(programs: Path, vectors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--vectors", str(vectors), "--only", "solve_alpha/*"]
    assert main(["--program", sys.executable, *chosen, "--", *command(programs)[1:]]) == 0
    assert "through reference at float64" in capsys.readouterr().out
    assert main(["--program", f"{sys.executable} {programs / 'through_reference.py'} order", *chosen]) == 1
    assert "answered question" in capsys.readouterr().out
    assert main(["--program", "/no/such/program", *chosen]) == 2
    assert "cannot be started" in capsys.readouterr().err


def test_program_of_the_documentation(vectors: Path, tmp_path: Path) -> None:
    page = (ROOT / "specs" / "conformance.md").read_text(encoding="utf-8")
    (text,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "sys.stdin" in block]
    path = tmp_path / "tiny.py"
    path.write_text(text, encoding="utf-8")
    with Program([sys.executable, str(path)]) as program:
        report = judge(program, vectors=vectors, only=[*VECTORS_ALONE, "law/softmax-*"])
    assert report.passed, report.summary()
    assert report.count(Status.PASSED) >= 3
