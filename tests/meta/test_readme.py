"""The README's Python runs as written, and its commands exist."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_array_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("(2, 4, 16, 16) [")


@pytest.mark.slow
def test_training_example_runs(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
    pytest.importorskip("onnxscript", reason="export needs onnxscript")
    torch = pytest.importorskip("torch", reason="the example trains in PyTorch")
    from support.binding.stories import Stories
    from support.students import precompute

    from shd_ref.teacher.run.options import PrecomputeOptions
    from shd_torch import export_teacher

    def model(heads: int) -> Stories:
        torch.manual_seed(heads)
        sizes = {"width": 16, "hidden": 16, "num_layers": 2, "vocabulary": 20, "length": 12}
        return Stories(num_heads=heads, num_kv_heads=heads, **sizes)

    tokens = torch.randint(0, 20, (32, 12), generator=torch.Generator().manual_seed(0))
    export_teacher(model(4), {"input_ids": tokens[:2]}, tmp_path / "teacher.onnx")
    options = PrecomputeOptions(num_student_heads=2)
    precompute(tmp_path / "teacher.onnx", {"input_ids": tokens.numpy()}, tmp_path / "cache", options)
    student = model(2)
    before = [weight.clone() for weight in student.parameters()]
    names = {
        "data": [{"input_ids": row} for row in tokens],
        "student": student,
        "optimizer": torch.optim.SGD(student.parameters(), 0.1),
        "base_loss": lambda output, _batch: output.square().mean(),
    }
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        exec(compile(BLOCKS[0], "README.md", "exec"), names)
    finally:
        os.chdir(here)
    assert all(not torch.equal(old, new) for old, new in zip(before, student.parameters(), strict=True))


def test_commands_and_their_options_exist() -> None:
    testing = pytest.importorskip("typer.testing", reason="the commands need typer")
    pytest.importorskip("onnxruntime", reason="shd needs the extra 'teacher'")
    pytest.importorskip("torch", reason="shd-torch needs the extra 'torch'")
    from shd_ref.cli import load_app
    from shd_torch.commands import app as shd_torch

    shd = load_app()
    runner = testing.CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    lines = [line.split("#")[0] for line in README.splitlines() if line.startswith(("shd ", "shd-torch "))]
    assert len(lines) >= 4
    for line in lines:
        program, command, *words = shlex.split(line)
        result = runner.invoke(shd if program == "shd" else shd_torch, [command, "--help"])
        assert result.exit_code == 0, result.output
        for word in words:
            if word.startswith("--"):
                assert word in result.output


def test_ci_runs_the_readmes_test_command() -> None:
    commands = re.findall(r"```bash\n(python3 .*?)\s*#", README)
    assert [command.split("&&")[-1].strip() for command in commands] == [".venv/bin/nox -s demo", ".venv/bin/nox"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace("--quiet ", "")
    assert all(step.strip() in script for step in commands[1].split("&&"))
