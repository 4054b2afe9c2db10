"""The two doors: what reaches an implementation, and that nothing it does there changes the verdict."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref.conformance import OwnDtype, Program, judge
from shd_ref.conformance.__main__ import main
from shd_ref.conformance.specification import CORE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "specs" / "conformance.md").read_text(encoding="utf-8")
PROGRAM = Path(__file__).resolve().parent / "programs" / "through_reference.py"

CHEATS = {
    "refuses by an exit": ("def merge_plan(**inputs):\n    raise SystemExit('heads-exceed')\n", "raised SystemExit"),
    "has a code of another kind": (
        "class Lost(OSError):\n    code = 'ENOENT'\ndef merge_plan(**inputs):\n    raise Lost('no file')\n",
        "with the code 'ENOENT', which is not in ERR-2",
    ),
    "writes a verdict into every pipe": (
        "import json, os\ndef merge_plan(**inputs):\n    for fd in range(1, 64):\n        try:\n"
        "            os.write(fd, json.dumps({'status': 0, 'passed': True}).encode() + b'\\n')\n"
        "        except OSError:\n            pass\n    return []\n",
        "answered question None when asked",
    ),
    "patches judge and reference": (
        "import os, sys, shd_ref, shd_ref.tolerances\nimport shd_ref.conformance.comparison as comparison\n"
        "import shd_ref.conformance.__main__ as command, shd_ref.conformance.judging as judging\n"
        "comparison.compare = judging.compare = lambda *_, **__: None\ncommand.main = lambda *_, **__: 0\n"
        "shd_ref.merge_plan = lambda *_, **__: [[(2, 1)]]\nsys.exit = lambda *_: os._exit(0)\n"
        "def merge_plan(**inputs):\n    return [[(2, 1)]]\n",
        "plan is wrong",
    ),
    "ends well": ("import os\ndef merge_plan(**inputs):\n    os._exit(0)\n", "ended with status 0 instead of"),
    "closes every file": ("import os\ndef merge_plan(**inputs):\n    os.closerange(0, 64)\n", "instead of answering"),
    "answers without end": (
        "import numpy as np\ndef merge_plan(**inputs):\n    return np.broadcast_to(0.0, (1 << 40,))\n",
        "too large to be read",
    ),
    "goes on in a copy": (
        "import os, time\ncalls = 0\ndef merge_plan(**inputs):\n    global calls\n    calls += 1\n"
        "    if calls > 1:\n        time.sleep(5)\n    elif os.fork():\n        time.sleep(0.2)\n",
        "does not conform: merge_plan",
    ),
    "does not end": ("def merge_plan(**inputs):\n    while True:\n        pass\n", "no answer within 3 seconds"),
    "prints": ("def merge_plan(**_):\n    print('conforms')\n    raise ValueError('\\x1b[2Jgone')\n", "\\x1b[2Jgone"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    text, words = CHEATS[name]
    (tmp_path / "cheat.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["--impl", "cheat", "--only", "merge_plan/core", "--seed", "0", "--timeout", "3"]) == 1
    told = capfd.readouterr()
    assert words in re.sub(r"\s+", " ", told.out)
    assert "Traceback" not in told.err
    assert "\x1b" not in told.out


def test_a_call_has_longer_where_the_machine_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Eight seconds in place of two at twice as many waiting programs as cores: three are in time."""
    module = "import time\nfrom shd_ref import merge_plan as plan\ncalls = []\ndef merge_plan(*args, **inputs):\n"
    module += "    calls.append(1) or len(calls) > 1 or time.sleep(3)\n    return plan(*args, **inputs)\n"
    (tmp_path / "slow.py").write_text(module, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.getloadavg", lambda: (4.0, 4.0, 4.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert main(["--impl", "slow", "--only", "merge_plan/core", "--seed", "0"]) == 0, capfd.readouterr()


def test_what_a_module_writes_to_disk_reaches_no_verdict(tmp_path: Path) -> None:
    """Half of a softmax is wrong; on import it rewrites the tolerances, and puts modules where the judge runs."""
    package = tmp_path / "site"
    for name in ("shd_ref", "specs"):
        command = ["cp", "-r", str(ROOT / name), str(package / name)]
        package.mkdir(exist_ok=True)
        subprocess.run(command, check=True)
    (tmp_path / "cheat.py").write_text(
        "import json, pathlib, shd_ref, numpy as np\n"
        "path = pathlib.Path(shd_ref.__file__).parents[1] / 'specs' / 'tolerances.json'\n"
        "loose = json.loads(path.read_text())\n"
        "for each in loose['agreement'].values():\n"
        "    each.update({name: {'atol': 9.0, 'rtol': 9.0} for name in each})\n"
        "path.write_text(json.dumps(loose))\n"
        "for name in ('networkx', 'textwrap', 'scipy'):\n"
        "    pathlib.Path(name + '.py').write_text('import os; os._exit(0)')\n"
        "def softmax(**inputs):\n"
        "    probs = shd_ref.softmax(**inputs)\n    probs[..., ::2] *= 0.5\n    return probs\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "shd_ref.conformance", "--impl", "cheat", "--only", "softmax", "--seed", "0"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(package)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not conform: softmax" in done.stdout


def test_numpy_alone(tmp_path: Path) -> None:
    blocked = ["torch", "onnx", "onnxruntime", "xxhash", "pytest", "jsonschema", "rich", "cyclopts", "scipy"]
    for entry in ("from shd_ref.conformance.__main__ import main; run = main", "from shd_ref.cli import main as run"):
        words = ["--impl", "shd_ref", "--profile", "core", "--only", "softmax", "--seed", "1"]
        code = (
            f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
            f"sys.argv = ['shd', *(['conformance'] if 'cli' in {entry!r} else []), *{words!r}]\n{entry}\n"
            "sys.exit(run())"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "seed 1:\nconforms to softmax;" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--impl", "no_such_module"], "cannot be imported: ModuleNotFoundError"),
        (["--impl", "no_such.py"], "a module's name, without .py"),
        (["--impl", "shd_ref:no_such_object"], "has no attribute 'no_such_object'"),
        (["--program", "no-such-program"], "give its path, such as ./my_shd"),
        (["--program", f"{sys.executable} {PROGRAM} other-protocol"], "expected type 'hello'"),
    ],
)
def test_what_cannot_be_judged(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    searched = list(sys.path)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
    assert sys.path == searched  # an implementer's own tests go on importing from their folder


def test_the_reference_conforms_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Plans of tuples cannot be written over in the host; a large answer is none that cannot be read."""
    words = ["--impl", "shd_ref", "--only", "plan_groups/core", "--only", "compose_mixing/core", "--seed", "0"]
    assert main([*words, "--timeout", "30"]) == 0, capsys.readouterr().out


def test_nothing_offered_is_nothing_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--impl", "json", "--only", "s*"]) == 2
    assert "nothing was judged; lacks softmax, solve_alpha, " in capsys.readouterr().out
    assert main(["--list", "--profile", "core", "--only", "s*"]) == 0
    assert capsys.readouterr().out.split() == [f"{name}/core" for name in CORE if name[0] == "s"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("garbage", "not JSON"),
        ("twice", "answered question"),
        ("shape", "cannot be read"),
        ("escapes", "which is not in ERR-2"),
        ("empty", "lacks alpha"),
        ("nothing", "neither 'outputs' nor an 'error'"),
        ("deep", "not JSON"),
        ("hang", "no answer within 1 seconds"),
        ("drip", "no answer within 1 seconds"),
        ("huge", "a line of more than"),
        ("crash", "out of cheese"),
    ],
)
def test_a_program_that_misbehaves_fails_there_alone(how: str, words: str) -> None:
    with Program([sys.executable, str(PROGRAM), how], timeout=1.0 if how in ("hang", "drip") else 30.0) as program:
        report = judge(program, only=["solve_alpha/core", "merge_plan/core"])
    assert [result.operation for result in report.failures] == ["solve_alpha"]
    assert words in report.summary().replace("\n             ", " ")


def test_a_right_program_conforms_and_what_it_does_not_list_is_not_judged() -> None:
    """Nor does it matter that it fills its stderr."""
    with Program([sys.executable, str(PROGRAM), "stderr"], timeout=30.0) as program:
        report = judge(program, dtype="float32", profile="core")
    assert report.passed, report.summary()
    assert report.verdict == (
        "conforms to softmax, merge_plan, solve_alpha, squeeze_heads, shd_loss; lacks value_outputs, mix_heads; "
        "not judged: options, other operations"
    )
    assert {"value_outputs", "mix_heads"} <= set(report.not_judged)


def test_the_program_of_the_page() -> None:
    (text,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "in sys.stdin:" in block]
    with Program([sys.executable, "-c", text]) as program:
        report = judge(program, only="softmax")
        narrow = judge(program, dtype="float32", only="softmax")
    assert report.passed, report.summary()
    assert report.lacks == ("attn_mask", "temperature")
    assert narrow.verdict == "nothing was judged; lacks the dtype float32, offers float64"


def test_the_adapter_of_the_page() -> None:
    pytest.importorskip("torch")
    (text,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def run_operation" in block]
    namespace: dict[str, Any] = {}
    exec(text.replace("import my_pkg", "import shd_torch.maps as my_pkg"), namespace)
    report = judge(namespace["Adapter"](), dtype="bfloat16", profile="core", only=["softmax", "squeeze_heads"])
    assert report.passed, report.summary()


def test_five_lines_in_a_test_of_ones_own(tmp_path: Path) -> None:
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "parametrize" in block]
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shd.py").write_text("from shd_ref import softmax, merge_plan\n", encoding="utf-8")
    text = lines.replace("OUTPUTS)", "list(OUTPUTS)[1:4])")
    (tmp_path / "test_mine.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped" in done.stdout


def test_options_that_a_plain_function_lacks_are_named() -> None:
    def softmax(attn_logits: Any, attn_mask: Any = None) -> Any:
        return shd_ref.softmax(attn_logits, attn_mask)

    def shd_loss(supervision: Any, student_logits: Any, *, loss_mask: Any = None, reduction: str = "sum") -> float:
        if reduction != "sum":
            raise NotImplementedError("reduction")
        return shd_ref.shd_loss(supervision, student_logits, loss_mask=loss_mask)

    report = judge(SimpleNamespace(softmax=softmax, shd_loss=shd_loss), only=["softmax", "shd_loss"])
    assert report.passed, report.summary()
    assert {"temperature", "beta", "divergence", "support", "attn_mask", "reduction=mean"} <= set(report.lacks)
    assert report.verdict.startswith("conforms to softmax, shd_loss; lacks attn_mask, beta")
    assert "not judged: value_outputs" in report.verdict


def test_the_report_is_as_its_schema_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    (tmp_path / "off.py").write_text("def softmax(**inputs):\n    return 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["--impl", "off", "--only", "softmax", "--only", "soften", "--report", "r.json", "--seed", "5"]) == 1
    document = json.loads(Path("r.json").read_text(encoding="utf-8"))
    schema = json.loads((ROOT / "specs" / "schemas" / "report.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    (run,) = document["runs"]
    assert run["seed"] == 5
    assert run["results"][0]["finding"]["call"]["operation"] == "softmax"


def test_arguments_reach_a_module_in_odd_layouts_and_in_their_own_dtype(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "told.py").write_text(
        "import numpy as np\nseen = set()\ndef softmax(attn_logits):\n"
        "    seen.add((attn_logits.flags.carray, attn_logits.dtype.str, type(attn_logits).__name__))\n"
        "    return repr(sorted(seen)), float(np.nan_to_num(attn_logits, neginf=-1).sum())\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    numbers = np.array([[0.1, -np.inf, -0.0], [5e-324, 1 / 3, 2]])
    with Program([sys.executable, "-m", "shd_ref.conformance", "--host", "told"], timeout=30.0) as program:
        for array in (numbers, numbers.astype(np.float16).view(OwnDtype)):
            for layout in range(12):
                (reply,) = program.ask([("softmax", {"attn_logits": array})], "float64", layout=layout)
    (told,) = reply.outputs.values()
    assert float(told[1]) == float(np.nan_to_num(array, neginf=-1).sum())
    for words in (
        "(False, '<f8', 'ndarray')",
        "(True, '<f8'",
        "'>f8'",
        "(True, '<f2', 'OwnDtype')",
        "'>f2', 'OwnDtype'",
    ):
        assert words in told[0]
