"""What README and docs show of commands and arrays exists; the README's start runs in ``tests/examples``."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEACHERS = (ROOT / "docs" / "teachers.md").read_text(encoding="utf-8")


def test_array_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.findall(r"```python\n(.*?)```", TEACHERS, re.DOTALL)[-1]
    exec(compile(block, "teachers.md", "exec"), {})
    assert capsys.readouterr().out.startswith("(2, 4, 16, 16) [")


def test_backend_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="the page is about the training path")
    import shd_torch
    from shd_torch.supervision import Factored

    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "backends.md").read_text("utf-8"), re.DOTALL)
    q = torch.randn(1, 2, 9, 8)
    supervision = Factored(q, q, torch.eye(2)[None], is_causal=True)
    names = {"shd_torch": shd_torch, "student_q": q, "student_k": q, "supervision": supervision}
    exec(compile(block, "backends.md", "exec"), names)
    assert capsys.readouterr().out.startswith("dense on a processor")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_beside_the_site_lead_somewhere(page: str) -> None:
    """Those of its own pages are MkDocs'."""
    for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", (ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_commands_and_their_options_exist() -> None:
    pytest.importorskip("cyclopts", reason="the commands need cyclopts")
    pytest.importorskip("onnxruntime", reason="shd needs the extra 'teacher'")
    pytest.importorskip("torch", reason="shd-torch needs the extra 'torch'")
    from support.commands import invoke

    from shd_ref.cli import load_app
    from shd_torch.cli import load_app as load_shd_torch

    shd, shd_torch = load_app(), load_shd_torch()
    names = (
        "clusters",
        "compress",
        "indexers",
        "object-stores",
        "sentence-encoders",
        "shrink",
        "teachers",
        "training",
    )
    pages = "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in names)
    pages = re.sub(r" \\\n\s*", " ", README + pages)
    lines = re.findall(r"^\s*(?:srun |- |RAY_ADDRESS=auto )?(shd(?:-torch)? [a-z]+ [^#\n]*)", pages, re.MULTILINE)
    assert len(lines) >= 35
    for line in lines:
        program, command, *words = shlex.split(line)
        result = invoke(shd if program == "shd" else shd_torch, [command, "--help"])
        assert result.exit_code == 0, result.output
        for word in words:
            if word.startswith("--"):
                assert word in result.output
