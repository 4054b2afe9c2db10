"""What the commands of ``shd`` refuse, before they do any work, and how they say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from teacher.attention_graphs import token_teacher
from typer.testing import CliRunner

from shd_ref.cli import load_app

NUM_SAMPLES = 12
APP = load_app()


def make_tokens() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(7)
    mask = (np.arange(6) < rng.integers(2, 7, NUM_SAMPLES)[:, None]).astype(np.int64)
    return {"input_ids": rng.integers(0, 50, (NUM_SAMPLES, 6)) * mask, "attention_mask": mask}


def shd(*words: str | Path, code: int = 0) -> str:
    """What a command prints; its exit code is asserted, and anything but an exit is raised as it is."""
    result = CliRunner().invoke(APP, [str(word) for word in words], env={"COLUMNS": "250"}, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher, inputs and the cache of both."""
    folder = tmp_path_factory.mktemp("made")
    onnx.save(token_teacher(), folder / "t.onnx")
    np.savez(folder / "d.npz", **make_tokens())
    shd("precompute", *run_of(folder), "--out", folder / "c", "--samples-per-shard", "5")
    return folder


def run_of(folder: Path) -> tuple[str | Path, ...]:
    return folder / "t.onnx", "--inputs", folder / "d.npz", "--student-heads", "2"


@pytest.mark.parametrize("option", [("--max-length", "3"), ("--text-column", "input_ids")])
@pytest.mark.parametrize("command", ["precompute", "plan", "fidelity", "verify", "report"])
def test_options_of_text_are_refused_without_a_tokenizer(
    made: Path, tmp_path: Path, command: str, option: tuple[str, str]
) -> None:
    """Numbers are not cut, so a run that seems to have cut them must not happen."""
    out = {"precompute": ("--out", tmp_path / "c"), "report": ("--out", tmp_path / "r.html")}.get(command, ())
    if command in ("verify", "report"):
        words: tuple[str | Path, ...] = (command, made / "c", *out, *option)
        assert f"{option[0]} must be given with --inputs" in shd(*words, code=1)
        words = (*words, "--teacher", made / "t.onnx", "--inputs", made / "d.npz")
    else:
        words = (command, *run_of(made), *out, *option)
    refused = shd(*words, code=1)
    assert "error (argument-value): " in refused
    assert f"{option[0][2:].replace('-', '_')} must be given with a tokenizer" in refused
    assert not any(tmp_path.iterdir())
