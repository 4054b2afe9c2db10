"""Students without some attention blocks and activations: exact, loaded by their own loader, refused by others."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import logits_of, make_data, make_teacher
from torch import nn

from shd_torch import load_student
from shd_torch.shrink import shrink

OUTPUTS = {
    "llama": ("self_attn.o_proj", None),
    "gpt2": ("attn.c_proj", "mlp.act"),
    "bert": ("attention.output.dense", "intermediate.intermediate_act_fn"),
    "vit": ("attention.o_proj", "mlp.activation_fn"),
    "deit": ("attention.o_proj", "mlp.activation_fn"),
    "dinov2": ("attention.o_proj", "mlp.activation_fn"),
}
"""What the attention gives to the stream, and the activation."""
MORE = {
    "opt": ("self_attn.out_proj", "activation_fn"),
    "gpt_neox": ("attention.dense", "mlp.act"),
    "olmo2": ("self_attn.o_proj", None),
    "modernbert": ("attn.Wo", None),
    "distilbert": ("attention.out_lin", "ffn.activation"),
    "mpnet": ("attention.attn.o", "intermediate.intermediate_act_fn"),
}
"""Of families whose every change is tested with them (test_families.py)."""
PLAIN = [name for name, parts in {**OUTPUTS, **MORE}.items() if parts[1] is not None]

LOAD_IT = """
import sys, transformers
for name in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "BertForMaskedLM"):
    try:
        getattr(transformers, name).from_pretrained(sys.argv[1])
    except (ValueError, RuntimeError) as error:
        print(name, "refused", str(error)[:140].replace(chr(10), " "))
    else:
        print(name, "loaded")
"""


@contextmanager
def without(teacher: Any, name: str, attention: list[int], activations: list[int]) -> Iterator[None]:
    """The teacher with zeros in place of attention, and nothing in place of activations, by hooks."""
    (layers,) = (part for part in teacher.modules() if isinstance(part, nn.ModuleList) and len(part) == 3)
    output, activation = {**OUTPUTS, **MORE}[name]
    handles = [
        layers[number].get_submodule(output).register_forward_hook(lambda *got: torch.zeros_like(got[2]))
        for number in attention
    ]
    handles += [
        layers[number].get_submodule(activation).register_forward_hook(lambda *got: got[1][0])
        for number in activations
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", [*OUTPUTS, *MORE])
def test_what_is_left_is_exact(name: str) -> None:
    """At another batch size and length than those of the calibration."""
    teacher = make_teacher(name)
    activations = [1, 2] if name in PLAIN else []
    made = shrink(teacher, make_data(name), drop_attention=[0, 2], drop_activations=activations, align=False)
    other = make_data(name, samples=3, length=13, seed=5)
    with without(teacher, name, [0, 2], activations):
        wanted = logits_of(teacher, other)
    torch.testing.assert_close(logits_of(made.student, other), wanted, atol=1e-10, rtol=0.0)
    assert float((wanted - logits_of(teacher, other)).abs().max()) > 1e-3  # something was dropped
    assert [layer["case"] for layer in made.report["layers"]] == ["dropped", "copied", "dropped"]
    assert [layer.get("ffn") for layer in made.report["layers"]] == [
        "linear" if number in activations else None for number in range(3)
    ]
    assert (made.report["layer_map"], made.report["holes"]) == ([[0, 1]], [0, 2])


@pytest.mark.parametrize("name", [*OUTPUTS, "mistral", "qwen2", "qwen3", "gemma"])
def test_every_other_change_beside_it(name: str, tmp_path: Path) -> None:
    """Heads, layers, width and neurons change too; the folder holds the same network."""
    teacher, data = make_teacher(name), make_data(name, samples=24)
    options: dict[str, Any] = {"heads": 2, "layers": [0, 2], "drop_attention": [0], "align": True, "hidden": 16}
    options |= {"drop_activations": [0]} if name in PLAIN else {}
    options |= {} if name == "dinov2" else {"neurons": 16}
    made = shrink(teacher, data, **options, out=tmp_path / "student")
    loaded = load_student(tmp_path / "student")
    assert not loaded.training
    torch.testing.assert_close(logits_of(loaded.double(), data), logits_of(made.student, data), atol=1e-5, rtol=0.0)
    assert made.report["layer_map"] == [[0, 2]]
    assert made.report["sources"] == [0, 2]
    assert all(0 <= layer["layer_error"] < 1.5 for layer in made.report["layers"])
    if name in PLAIN:
        first, second = made.report["layers"]
        assert first["ffn"] == "linear"
        assert "neurons" not in first
        assert name == "dinov2" or len(second["neurons"]) == 16


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_alignment_makes_up_for_a_part(name: str) -> None:
    teacher, data = make_teacher(name), make_data(name, samples=32, length=12)
    errors = [
        shrink(teacher, data, drop_attention=[1], drop_activations=[0, 1], align=align).report["layers"]
        for align in (False, True)
    ]
    assert errors[1][0]["layer_error"] < errors[0][0]["layer_error"]
    assert errors[1][1]["layer_error"] < errors[0][1]["layer_error"]


def test_a_cache_of_keys_changes_no_token() -> None:
    for name in ("llama", "gpt2", "mistral"):
        teacher, ids = make_teacher(name), make_data(name)["input_ids"]
        student = shrink(teacher, {"input_ids": ids}, drop_attention=[0]).student
        words = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        found = [student.generate(ids[1:3], use_cache=use_cache, **words) for use_cache in (True, False)]
        assert torch.equal(*found)
        assert len(set(found[0][0].tolist())) > 2


def test_training_reaches_every_weight() -> None:
    teacher, data = make_teacher("dinov2", drop_path_rate=0.2), make_data("dinov2")
    student = shrink(teacher, data, drop_attention=[1], drop_activations=[0, 1]).student.train()
    student(**data, labels=torch.zeros(6, dtype=torch.long)).loss.backward()
    idle = [name for name, part in student.named_parameters() if part.grad is None and "mask_token" not in name]
    assert not idle


@pytest.mark.slow
def test_plain_transformers_refuse_the_folder(tmp_path: Path) -> None:
    """The Auto classes by its kind, the stock class by the weights; neither gives random ones."""
    made = shrink(make_teacher("bert"), make_data("bert"), drop_attention=[1], drop_activations=[2], out=tmp_path)
    words = [sys.executable, "-c", LOAD_IT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ})
    found = done.stdout.splitlines()
    assert [line.split()[1] for line in found] == ["refused"] * 4
    assert all("load it with shd_torch.load_student" in line for line in found[:3])
    # Here, where load_student has told transformers of the kind, the Auto classes load it.
    import transformers

    loaded = load_student(tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(again) is type(loaded) is type(made.student)
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), loaded.parameters(), strict=True))
    assert type(transformers.AutoModel.from_pretrained(tmp_path)).__name__ == "CustomBertModel"
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(
        logits_of(load_student(tmp_path / "again"), make_data("bert")), logits_of(loaded, make_data("bert"))
    )


def test_stock_students_load_too(tmp_path: Path) -> None:
    made = shrink(make_teacher("llama"), make_data("llama"), heads=2, out=tmp_path)
    assert type(load_student(tmp_path)) is type(made.student)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dropped_attention": [1, 0]}, "rising"),
        ({"dropped_attention": [7]}, "0, 1, 2"),
        ({"dropped_attention": "1"}, "lists"),
        ({"dropped_attention": [0, 1, 2]}, "with attention"),
        ({"dropped_attention": []}, "every weight"),
        ({"dropped_activations": []}, "every weight"),
        ({"dropped_activations": [0, 2]}, "every weight"),
        ({"architectures": ["CustomPretrainedConfig"]}, "architecture"),
        ({"architectures": ["CustomGPT2LMHeadModel"]}, "architecture"),
        ({"architectures": []}, "architecture"),
        ({"num_hidden_layers": 4}, "every weight"),
        ({"quantization_config": {"quant_method": "own"}}, r"quantization_config \(own\)"),
        ({"model_type": "os with dropped layers (load it with shd_torch.load_student)"}, "os"),
    ],
    ids=str,
)
def test_folders_that_contradict_themselves(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    shrink(make_teacher("bert"), make_data("bert"), drop_attention=[1], drop_activations=[2], out=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with refusal("shrink-unsupported" if "quantization_config" in changes else "read-failed", says):
        load_student(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with refusal("read-failed", "folder"):
        load_student(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "options", "code", "says"),
    [
        ("llama", {"drop_activations": [0]}, "shrink-unsupported", "gated"),
        ("bert", {"drop_attention": [3]}, "layers-invalid", "drop_attention"),
        ("bert", {"drop_attention": [1, 0]}, "layers-invalid", "rising"),
        ("bert", {"drop_attention": [True]}, "layers-invalid", "lists"),
        ("bert", {"drop_attention": None}, "layers-invalid", "lists"),
        ("bert", {"drop_activations": 1}, "layers-invalid", "lists"),
        ("bert", {"drop_attention": [0, 1, 2]}, "layers-invalid", "leave a block"),
        ("bert", {"drop_activations": [1], "layers": [0, 2]}, "layers-invalid", "keeps"),
        ("qwen2", {"drop_attention": [0]}, "shrink-unsupported", "attend differently"),
    ],
)
def test_refusals(name: str, options: dict[str, Any], code: str, says: str) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} if name == "qwen2" else {}
    with refusal(code, says):
        shrink(make_teacher(name, **changes), make_data(name), **options)
