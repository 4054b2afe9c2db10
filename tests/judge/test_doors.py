"""Doors 1 and 2: a test of one's own, and the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
from judge.conftest import VECTORS_ALONE
from support.faults import file_size_limit

import shd_ref
from shd_ref.conformance import ConformanceError, Missing, Status, cases, check, judge
from shd_ref.conformance.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "specs" / "conformance.md").read_text(encoding="utf-8")


def test_reference_conforms_at_every_dtype(vectors: Path) -> None:
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        report = judge(shd_ref, dtype=dtype, vectors=vectors, only=VECTORS_ALONE)
        assert report.passed, report.summary()
        assert not report.empty


def test_check_raises_the_report(vectors: Path, wrong: Any) -> None:
    (case,) = cases("solve_alpha/quarter", vectors=vectors)
    check(case, shd_ref, dtype="float32")
    with pytest.raises(ConformanceError, match="ALPHA-2: `a\\* = -<N, M>"):
        check(case, wrong(solve_alpha=lambda **inputs: shd_ref.solve_alpha(**inputs, rule="as_printed")))
    with pytest.raises(Missing, match="solve_alpha is missing"):
        check(case, object())
    assert issubclass(Missing, unittest.SkipTest)
    with pytest.raises(Missing, match="does not run at float16"):
        check(cases("shd_loss/uniform", vectors=vectors)[0], shd_ref, dtype="float16")


def test_five_lines_in_a_test_of_ones_own(tmp_path: Path, vectors: Path) -> None:
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "parametrize" in block]
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shd.py").write_text("from shd_ref import softmax, solve_alpha\n", encoding="utf-8")
    text = lines.replace("cases()", f"cases(['law/plan-*', *{VECTORS_ALONE}], vectors={str(vectors)!r})")
    (tmp_path / "test_mine.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed, \d+ skipped", done.stdout)


def test_command_line_judges_a_module_in_the_current_folder(
    tmp_path: Path, vectors: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "strangers_shd.py").write_text(
        "import shd_ref\nfrom shd_ref import *\ndef shd_loss(**inputs):\n    return 2 * shd_ref.shd_loss(**inputs)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = ["--impl", "strangers_shd", "--vectors", str(vectors), "--only", "shd_loss/*", "--only", "solve_alpha/*"]
    assert main([*chosen, "--save-calls", "calls"]) == 1
    call = json.loads(Path("calls/shd_loss-two-layers-float64.json").read_text(encoding="utf-8"))
    assert call["operation"] == "shd_loss"
    assert call["inputs"]["supervision"][1] == {"shape": [1, 1, 1, 2], "dtype": "float", "data": [0.0, 1.0]}
    text = capsys.readouterr().out
    assert "FAILED shd_loss/two-layers at float64" in text
    assert "LOSS-2: `L = beta * sum over layers and heads of KL_map`" in text
    assert "differs by 1.38629" in text
    assert "--impl strangers_shd --dtype float64 --only 'shd_loss/two-layers'" in text

    known = tmp_path / "known.txt"
    known.write_text("# why\n\nshd_loss/two-*  @float64,float32  # factor two, issue 4\n", encoding="utf-8")
    assert main([*chosen, "--known-failures", str(known), "--report", "report.json"]) == 0
    text = capsys.readouterr().out
    assert "shd_loss/two-layers: factor two, issue 4" in text
    (run,) = json.loads(Path("report.json").read_text(encoding="utf-8"))["runs"]
    assert run["counts"]["known_failure"] == 1
    assert run["requirements"]["LOSS-2"]["known_failure"] == 1
    before = Path("report.json").read_bytes()
    with file_size_limit(100):
        code = main([*chosen, "--report", "report.json", "--seed", "7"])
    assert code == 2
    assert "File too large" in capsys.readouterr().err
    assert Path("report.json").read_bytes() == before
    assert not [*tmp_path.glob(".*")]

    known.write_text("solve_alpha/quarter  # fixed long ago\nshd_loss/two-layers  # factor\n", encoding="utf-8")
    assert main([*chosen, "--known-failures", str(known)]) == 1
    assert "delete these lines from the file:\n  solve_alpha/quarter  # fixed long ago" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--impl", "no_such_module"], "cannot be imported: ModuleNotFoundError"),
        (["--impl", "shd_ref:no_such_object"], "shd_ref has no no_such_object"),
        (["--impl", "shd_ref", "--vectors", "no/such/folder"], "no vectors found"),
        (["--impl", "shd_ref", "--known-failures", "no-such-file"], "no-such-file"),
    ],
)
def test_what_cannot_be_judged(
    arguments: list[str], words: str, vectors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--vectors", str(vectors), *arguments]) == 2
    assert words in capsys.readouterr().err


MISBEHAVIOUR = {
    "exits": "import sys\nsys.exit(0)\n",
    "exits_hard": "import os\nos._exit(0)\n",
    "exits_late": "import atexit, os\natexit.register(lambda: os._exit(0))\nraise ImportError('no')\n",
    "cannot_be_made": "class Adapter:\n    def __init__(self):\n        raise OSError('no device')\n"
    "    def run_operation(self, operation, inputs, dtype): ...\n",
    "exits_when_made": "class Adapter:\n    def __init__(self):\n        raise SystemExit(0)\n"
    "    def run_operation(self, operation, inputs, dtype): ...\n",
}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("exits", "--impl exits cannot be imported: SystemExit: 0"),
        ("exits_hard", "from --impl exits_hard: the program ended with status 0 instead of answering"),
        ("exits_late", "--impl exits_late cannot be imported: ImportError: no"),
        ("cannot_be_made:Adapter", "--impl cannot_be_made:Adapter cannot be constructed: OSError: no device"),
        ("exits_when_made:Adapter", "--impl exits_when_made:Adapter cannot be constructed: SystemExit: 0"),
    ],
)
def test_what_never_answers_is_no_pass_and_no_traceback(
    module: str,
    words: str,
    tmp_path: Path,
    vectors: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    name = module.split(":")[0]
    (tmp_path / f"{name}.py").write_text(MISBEHAVIOUR[name], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["--vectors", str(vectors), "--impl", module]) == 2
    told = capfd.readouterr()
    assert words in told.err
    assert "Traceback" not in told.err + told.out


def test_calls_that_crash_hang_exit_or_print_are_told_and_the_run_goes_on(
    tmp_path: Path, vectors: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.py").write_text(
        "import os, signal, sys, time\nfrom shd_ref import *\nimport shd_ref\n"
        "def softmax(**inputs):\n    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "    while True:\n        try:\n            time.sleep(60)\n        except Exception:\n            pass\n"
        "def merge_plan(*inputs, **named):\n    sys.exit(0)\n"
        "def layer_map(**inputs):\n    os.kill(os.getpid(), 11)\n"
        "def solve_alpha(**inputs):\n    print('odd at float64: conforms')\n"
        "    return shd_ref.solve_alpha(**inputs)\n"
        "def shd_loss(**inputs):\n    raise ValueError('\\x1b[2Jgone\\u202e')\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    operations = ["merge_plan", "solve_alpha", "shd_loss"]
    chosen = [word for name in operations for word in ("--only", f"{name}/*")]
    chosen += ["--only", "softmax/masked-row", "--only", "law/layers-every-count"]
    assert main(["--impl", "odd", "--vectors", str(vectors), "--timeout", "2", *chosen]) == 1
    told = capfd.readouterr()
    assert "no answer within 2 seconds" in told.out
    assert "raised SystemExit without a code" in told.out
    assert "ended with status -11 instead of answering" in told.out
    assert "odd at float64, specification" in told.out
    assert "does not conform" in told.out
    assert not re.search("^odd at float64: conforms", told.out, re.MULTILINE)
    assert "\x1b" not in told.out + told.err
    assert "\\x1b[2Jgone\\u202e" in told.out


def test_nothing_offered_is_nothing_judged(vectors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--impl", "json", "--vectors", str(vectors), "--only", "s*/*"]) == 2
    assert "nothing was judged" in capsys.readouterr().out


def test_list(vectors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--vectors", str(vectors), "--only", "merge_plan/*"]) == 0
    assert capsys.readouterr().out == "merge_plan/five-to-four  PLAN-5\nmerge_plan/too-many  PLAN-2 ERR-1 ERR-2\n"


def test_shd_conformance_has_the_options_of_the_judge(vectors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the style of the other commands, and with their words where it refuses."""
    testing = pytest.importorskip("typer.testing", reason="the command needs the extra 'teacher'")
    from shd_ref.cli import load_app

    def shd(*words: str) -> tuple[int, str]:
        result = testing.CliRunner().invoke(load_app(), ["conformance", *words], env={"COLUMNS": "80"})
        return result.exit_code, result.output

    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    page = capsys.readouterr().out
    assert page.startswith("usage: python -m shd_ref.conformance")
    code, shown = shd("--help")
    assert (code, max(map(len, shown.splitlines()))) == (0, 80)
    assert "Usage:" in shown
    assert "conformance [OPTIONS]" in shown
    assert "--quiet" in shown
    for option in set(re.findall(r"--[a-z-]+", page)):
        assert option in shown
    own = ("--list", "--vectors", str(vectors), "--only", "merge_plan/*", "--only", "law/nothing")
    assert main(own) == 0
    assert shd(*own) == (0, capsys.readouterr().out)
    code, listed = shd(*own, "--json")
    assert [each["id"] for each in json.loads(listed)] == ["merge_plan/five-to-four", "merge_plan/too-many"]
    for wrong, said in (
        (("--impl", "json", "--dtype", "float8"), "invalid choice: 'float8'"),
        (("--impl", "json", "--timeout", "0"), "--timeout must be above 0"),
        (("--impl", "json", "--", "more"), "unexpected arguments: more"),
        ((), "required"),
    ):
        code, shown = shd(*wrong)
        assert code == 2
        assert "usage:" not in shown
        assert said in " ".join(shown.replace("│", " ").split())


def test_adapter_of_the_documentation(vectors: Path) -> None:
    pytest.importorskip("torch")
    (text,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "run_operation" in block]
    namespace: dict[str, Any] = {}
    exec(text.replace("import my_pkg", "import shd_torch as my_pkg"), namespace)
    adapter = namespace["Adapter"]()
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        report = judge(adapter, dtype=dtype, vectors=vectors, only=VECTORS_ALONE)
        assert report.count(Status.PASSED) > 10, report.summary()


def test_judge_needs_numpy_alone(tmp_path: Path, vectors: Path) -> None:
    blocked = ("torch", "onnx", "onnx_ir", "onnxruntime", "xxhash", "pytest", "jsonschema", "rich", "typer", "scipy")
    code = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
        "from shd_ref.conformance.__main__ import main\n"
        # The host too has NumPy alone.
        "from shd_ref.conformance import host, judge\n"
        f"assert judge(host._load('shd_ref'), only='s*/*', vectors={str(vectors)!r}).passed\n"
        f"sys.exit(main(['--impl', 'shd_ref', '--vectors', {str(vectors)!r}, '--only', 'law/s*', '--only', 's*/*']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conforms" in done.stdout


def test_a_layout_that_a_library_cannot_read_is_missing_for_an_adapter_alone() -> None:
    class Functions:
        @staticmethod
        def softmax(attn_logits: Any, attn_mask: Any = None, *, temperature: float = 1.0) -> Any:
            if any(step < 0 for step in attn_logits.strides):
                raise ValueError("negative strides")
            return shd_ref.softmax(attn_logits, attn_mask, temperature=temperature)

    class Adapter:
        def run_operation(self, operation: str, inputs: Any, dtype: str) -> Any:
            return getattr(Functions, operation)(**inputs)

    assert not judge(Functions, only="law/layouts-softmax").passed
    assert judge(Adapter(), only="law/layouts-softmax").passed
