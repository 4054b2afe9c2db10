"""A family in one row, entered from outside: shrunk, refitted, saved and loaded like those that are listed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import WIDTH, logits_of, make_data, mixed_logits

from shd_torch import load_student
from shd_torch.shrink import shrink
from shd_torch.shrink.families import FAMILIES

transformers = pytest.importorskip("transformers", reason="the teacher is a model of transformers")


def test_a_family_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": WIDTH}
    config = transformers.Starcoder2Config(**sizes, intermediate_size=20, vocab_size=31, max_position_embeddings=40)
    torch.manual_seed(0)
    teacher, data = transformers.Starcoder2ForCausalLM(config).double().eval(), make_data("llama", samples=24)
    with refusal("shrink-unsupported", "starcoder2"):
        shrink(teacher, data, heads=2)
    row = replace(
        FAMILIES["llama"], ffn=(("mlp.c_fc",), "mlp.c_proj"), activation="mlp.act", norm="layer", free_head_dim=False
    )
    monkeypatch.setitem(FAMILIES, "starcoder2", row)
    exact = shrink(teacher, data, heads=2, head_dim=6, align=False)
    with mixed_logits(teacher, [(layer["groups"], layer["mixing"]) for layer in exact.report["layers"]]):
        expected = logits_of(teacher, data)
    torch.testing.assert_close(logits_of(exact.student, data), expected, atol=1e-10, rtol=0.0)
    options = {"heads": [2, 4], "neurons": [9, 12], "hidden": 20, "layers": [0, 2], "drop_attention": [0]}
    student = shrink(teacher, data, **options, out=tmp_path / "student").student
    loaded = load_student(tmp_path / "student").double()
    torch.testing.assert_close(logits_of(loaded, data), logits_of(student, data), atol=1e-5, rtol=0.0)
