"""What ``docs/backends.md`` shows runs, and what it counts is what the code counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the page is about the training path")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    import shd_torch
    from shd_torch.supervision import Factored

    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    q = torch.randn(1, 2, 9, 8)
    supervision = Factored(q, q, torch.eye(2)[None], is_causal=True)
    names = {"shd_torch": shd_torch, "student_q": q, "student_k": q, "supervision": supervision}
    exec(compile(block, "backends.md", "exec"), names)
    assert capsys.readouterr().out.startswith("dense on a processor")


def test_names_and_numbers_are_the_codes() -> None:
    from shd_torch.kernels import CODEC, MIN_CAPABILITY
    from shd_torch.kernels.tiles import MAX_FLOAT32_WIDTH, MAX_WIDTH
    from shd_torch.kl.backends import BACKENDS, FUSED_LENGTH, TRITON_LENGTHS

    assert re.findall(r"^\| `(\w+)` ", PAGE, re.MULTILINE) == list(BACKENDS)
    assert f"below {FUSED_LENGTH} keys" in PAGE
    assert f"capability {'.'.join(map(str, MIN_CAPABILITY))}" in PAGE
    assert f"heads of 1 to {MAX_WIDTH} (in float32 to {MAX_FLOAT32_WIDTH})" in PAGE
    assert f"codecs other than `{CODEC}`" in PAGE
    assert ("table is empty" in " ".join(PAGE.split())) == (not TRITON_LENGTHS)


def test_the_table_of_errors_is_the_benchmarks() -> None:
    report = json.loads((ROOT / "benchmarks" / "attention_kl_accuracy.json").read_text(encoding="utf-8"))["errors"]
    rows = re.findall(r"^\| (\w+), (\w+) \| ([\d.]+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for dtype, heads, divergence, cells in rows:
        errors = report[heads][dtype][str(float(divergence))]["errors"]
        ways = (errors[way] for way in ("floor", "dense", "fused fp32", "fused fp16", "eager"))
        assert cells == " | ".join(f"{100 * dq:.2f} / {100 * dk:.2f}" for dq, dk in ways)
