"""Commands that commands print run as they are printed, word for word."""

import shlex
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="shd needs the extra 'teacher'")
pytest.importorskip("onnxruntime", reason="shd needs the extra 'teacher'")
pytest.importorskip("cyclopts", reason="the commands need cyclopts")

from support.attention_graphs import language_model  # noqa: E402  (after the skips)
from support.commands import invoke  # noqa: E402
from support.two_sequences import encoder_decoder  # noqa: E402

from shd_ref.cache import CacheReader  # noqa: E402
from shd_ref.cli import load_app  # noqa: E402

APP = load_app()
PAIR = "'my pair.onnx' --inputs 'my pair.npz' --student-heads 2"


def shd(line: str) -> list[str]:
    """Run a line; the commands that it prints."""
    program, *words = shlex.split(line)
    assert program == "shd"
    result = invoke(APP, words, columns=80)
    assert result.exit_code == 0, f"{line}\n{result.output}"
    printed = [text.strip().removeprefix("next: ") for text in result.output.splitlines()]
    return [text for text in printed if text.startswith("shd ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An encoder-decoder, two language models, and data for all."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    onnx.save(encoder_decoder(), "my pair.onnx")
    arrays = {}
    for prefix, length in (("", 9), ("decoder_", 6)):
        mask = (np.arange(length) < rng.integers(2, length + 1, 12)[:, None]).astype(np.int64)
        arrays |= {f"{prefix}input_ids": rng.integers(0, 30, (12, length)), f"{prefix}attention_mask": mask}
    np.savez("my pair.npz", **arrays)
    onnx.save(language_model(num_layers=1), "lm.onnx")
    onnx.save(language_model(num_layers=2), "two.onnx")
    np.savez("lm.npz", input_ids=rng.integers(0, 50, (12, 9)), attention_mask=np.ones((12, 9), np.int64))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "cache"),
    [
        (f"shd plan {PAIR} --sites cross", "cache-2"),
        (f"shd plan {PAIR} --student-layers encoder=1,decoder=1 --logits topk --logits-top 4 --hidden 0", "cache-2"),
        (f"shd plan {PAIR.rpartition(' --')[0]} --no-attention --logits float16", "cache-targets"),
        (
            "shd precompute lm.onnx --inputs lm.npz --student-heads 2 --logits topk --with-teacher two.onnx --out c",
            "c",
        ),
    ],
)
def test_printed_commands_run(folder: Path, line: str, cache: str) -> None:
    """From a measurement to a cache, and to its verification."""
    while printed := shd(line):
        (line,) = printed
    assert line.startswith("shd verify")
    assert CacheReader(folder / cache).sealed
