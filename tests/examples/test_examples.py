"""What a newcomer copies runs as it stands: README, the snippets on training, every script of ``examples``.

One file, so that one process makes the teachers and exports them.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
COMPRESS = (ROOT / "docs" / "compress.md").read_text(encoding="utf-8")
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in ("make_data.py", "shd_jax.py"))
RAY_WARNS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MARKS = {
    "ray_cluster.py": [*RAY_WARNS, pytest.mark.nightly],
    "digits.py": [pytest.mark.nightly],
    # Other tests train such students: of two teachers, encoders with decoders, and of classes.
    **dict.fromkeys(("two_teachers.py", "encoder_decoder.py", "classification.py"), pytest.mark.nightly),
}
NEEDS = {"lightning_module.py": "lightning", "ray_cluster.py": "ray", "digits.py": "sklearn"}


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),  # advice on workers of the loader
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),  # lightning's own
]


(BLOCK,) = re.findall(r"test_examples.py -->\n```bash\n(.*?)```", README, re.DOTALL)
MAKE, *START_COMMANDS, STUDENTS = re.sub(r" \\\n\s*", " ", BLOCK).splitlines()
SETUP, *SNIPPETS = re.findall(r"test_examples.py -->\n```python\n(.*?)```", TRAINING, re.DOTALL)


def start(run_in: Callable[..., Path]) -> Path:
    """The folder after the README's commands."""
    return run_in(MAKE.split(" && ")[-1], *START_COMMANDS)


def test_readme_turns_text_into_a_trained_student(run_in: Callable[..., Path]) -> None:
    folder = start(run_in)
    without, with_shd, from_teacher = three_losses(run_in, folder)[0]
    assert without != with_shd
    assert from_teacher < min(without, with_shd) < max(without, with_shd) < np.log(32)  # all words alike
    assert (folder / "trained" / "model.safetensors").exists()


@pytest.mark.nightly
def test_readme_shows_what_start_and_shd_add(run_apart: Callable[..., Path]) -> None:
    """The margins held for all seeds from 0 to 3."""
    folder = run_apart(MAKE.split(" && ")[-1] + " --steps 300", *START_COMMANDS)
    for without, with_shd, from_teacher in three_losses(run_apart, folder, 3):
        assert without - with_shd > 0.1
        assert with_shd - from_teacher > 0.03
        assert from_teacher < 0.56


def three_losses(run: Callable[..., Path], folder: Path, seeds: int = 1) -> list[tuple[float, ...]]:
    """Test losses of the README's students, by seed."""
    run(f"{STUDENTS} --seeds {seeds} --json losses.json")
    return list(zip(*json.loads((folder / "losses.json").read_text())["losses"].values(), strict=True))


COMPRESSION, DEPLOYMENT = re.findall(r"```python\n(.*?)```", COMPRESS, re.DOTALL)


def deploy() -> Any:
    """What the snippet of ``docs/compress.md`` computes from ``student`` in this folder."""
    names: dict[str, Any] = {}
    exec(compile(DEPLOYMENT, "compress.md", "exec"), names)
    return names["states"]


def test_compress_page_runs_a_graph(run_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a student of ``shrink``, exported as ``compress`` does."""
    monkeypatch.chdir(start(run_in))
    Path("student", "onnx").mkdir(exist_ok=True)
    run_in("shd-torch export student --student --out student/onnx/model.onnx --int8")
    assert deploy().shape[0] == 2


@pytest.mark.nightly
def test_compress_page_runs(run_apart: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_apart("python make_data.py --steps 30"))
    exec(compile(COMPRESSION.replace("minutes=2.0", "minutes=0.01"), "compress.md", "exec"), {})
    Path("small").rename("student")
    assert deploy().shape[0] == 2


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["loop", "trainer", "live", "free", "free-trainer"])
def test_training_page_trains(
    snippet: str, run_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(run_in)
    if "whole" in snippet:
        run_in(*re.findall(r"^(shd precompute .* --out whole)$", TRAINING.replace("\\\n", ""), re.MULTILINE))
    monkeypatch.chdir(run_in())
    names: dict[str, Any] = {}
    exec(compile(SETUP, "training.md", "exec"), names)
    before = {name: weight.detach().clone() for name, weight in names["student"].named_parameters()}
    exec(compile(snippet, "training.md", "exec"), names)
    trained = names["trainer"].model if "trainer" in names else names["student"]
    changed = [name for name, weight in trained.named_parameters() if not weight.cpu().equal(before[name])]
    assert any("q_proj" in name for name in changed)
    if "trainer" in names:
        (logged,) = (each for each in names["trainer"].state.log_history if "shd_loss" in each)
        terms = ["shd_loss", *("kd_loss", "hidden_loss")[: 2 * ("kd=" in snippet)]]
        assert min(logged[term] for term in terms) > 0
    else:
        assert all(term.detach() > 0 for term in names["terms"].values())


def commands(script: str) -> list[str]:
    """The lines of a docstring that a user copies; environments are set up already."""
    text = ast.get_docstring(ast.parse((EXAMPLES / script).read_text(encoding="utf-8"))) or ""
    lines = re.findall(r"^    ((?:python|shd|shd-torch) .*)$", text, re.MULTILINE)
    assert lines[-1].startswith(f"python {script}")
    return lines


def expected(script: str) -> str:
    """The last block of a docstring: what the last command prints, with other numbers here."""
    text = ast.get_docstring(ast.parse((EXAMPLES / script).read_text(encoding="utf-8"))) or ""
    return text.rsplit("\n\n", 1)[1].strip()


@pytest.fixture
def without_ray() -> Iterator[None]:
    """Ends the cluster that an example started."""
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("script", [pytest.param(name, marks=MARKS.get(name, ())) for name in SCRIPTS])
def test_example_prints_what_it_says(
    script: str, run_in: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    if script in NEEDS and find_spec(NEEDS[script]) is None:
        pytest.skip(f"this example needs {NEEDS[script]}")
    *preparation, last = commands(script)
    run_in(*preparation)
    capsys.readouterr()
    run_in(last)
    printed = capsys.readouterr().out
    pattern = re.sub(r"(?:\\?[\d.,%]|\\-)+", ".+", re.escape(" ".join(expected(script).split())))
    assert re.search(pattern, " ".join(printed.split())), printed
    losses = re.search(r"student ([\d.]+) before and ([\d.]+)", printed)
    assert bool(losses) == ("student" in expected(script) and "accuracy" not in printed)
    if losses:  # an accuracy over so few samples is chance
        assert float(losses[2]) < float(losses[1])
