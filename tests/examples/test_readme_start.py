"""What the README tells a newcomer to paste runs, with no name from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README[README.index("## From text") : README.index("## What it gains")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # of torch, where there is no accelerator
def test_text_becomes_a_trained_student(
    run_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, commands = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
    (snippet,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    folder = run_in(make.strip().removeprefix("mkdir -p try && cd try && "), *commands.splitlines())
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    losses = dict(re.findall(r"^(before|after) ([\d.]+)$", capsys.readouterr().out, re.MULTILINE))
    assert float(losses["after"]) < float(losses["before"])
    assert (folder / "trained" / "model.safetensors").exists()
