"""The ``shd-torch`` and ``shd`` commands, as a user types them, on a folder that save_pretrained wrote."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.binding.models import hf_model
from support.commands import invoke

from shd_ref.cache import CacheReader
from shd_ref.cli import load_app
from shd_torch.cli import load_app as load_shd_torch

shd, shd_torch = load_app(), load_shd_torch()


def run(app: object, *words: object, code: int = 0) -> str:
    result = invoke(app, words)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.slow
def test_export_inspect_precompute_verify(tmp_path: Path) -> None:
    hf_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    teacher, cache, data = tmp_path / "teacher.onnx", tmp_path / "cache", tmp_path / "data.npz"
    assert "shd inspect" in run(shd_torch, "export", tmp_path / "model", "--out", teacher)
    table = run(shd, "inspect", teacher)
    assert table.count("yes") == 1
    sites = json.loads(run(shd, "inspect", teacher, "--json"))["sites"]
    assert [(s["num_heads"], s["num_kv_heads"], s["d_v"], s["d_model"]) for s in sites] == [(4, 2, 8, 32)]
    rng = np.random.default_rng(0)
    mask = (np.arange(12) < rng.integers(2, 13, (20, 1))).astype(np.int64)
    np.savez(data, input_ids=rng.integers(1, 50, (20, 12)), attention_mask=mask, label=np.zeros(20))
    words = ("precompute", teacher, "--inputs", data, "--student-heads", 2, "--student-layers", 1, "--out", cache)
    output = run(shd, *words)
    assert "20 (0 resumed)" in output
    assert "20 (20 resumed)" in run(shd, *words)
    assert CacheReader(cache).manifest.attention.support == "causal"
    checked = run(shd, "verify", cache, "--teacher", teacher, "--inputs", data)
    assert "intact: 20 records" in checked
    assert "same: 8 records" in checked
    wrong = run(shd, *words[:5], 3, *words[6:], code=1)
    assert "cache-mismatch" in wrong
    assert "num_student_heads: 2 -> 3" in wrong
    shard = next((cache / "shards").rglob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(bytes(damaged))
    problems = run(shd, "verify", cache, code=1)
    assert shard.name in problems
    assert "record" in problems


def test_errors_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07\x12")
    assert "error (graph-invalid)" in run(shd, "inspect", tmp_path / "broken.onnx", code=1)
    assert "is not a cache" in run(shd, "verify", tmp_path, code=1)
    assert "given together" in run(shd, "verify", tmp_path, "--teacher", "x.onnx", code=1)
    assert "error (read-failed)" in run(shd_torch, "export", tmp_path, "--out", tmp_path / "t", code=1)


@pytest.mark.parametrize(("program", "app"), [("shd", shd), ("shd-torch", shd_torch)])
def test_help_of_every_command_shows_it_in_use(program: str, app: Any) -> None:
    names = list(app.after)
    assert names[:2] in (["inspect", "plan"], ["compress", "export"])  # the order of use
    for name in names:
        page = run(app, name, "--help")
        examples = [line.strip() for line in page.splitlines() if line.strip().startswith(f"{program} {name} ")]
        assert examples, name
        for option in re.findall(r"--[a-z-]+", " ".join(examples)):
            assert page.count(option) > len(examples), option
    assert "specification" in run(shd, "--version")
