"""Mistakes and contradictions, one line each: options, data, and folders of students."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import WIDTH, make_data, make_teacher

from shd_ref.shrink import read_student
from shd_torch import load_student
from shd_torch.shrink import shrink

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 2,
    "long_factor": [2.0] * 2,
    "factor": 1.0,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("llama", {}, {"heads": 5}, "heads-exceed", "1..4"),
    ("llama", {}, {"heads": [2, 1]}, "argument-value", "3 layers; got 2"),
    ("llama", {}, {"heads": 3, "kv_heads": 2}, "argument-value", "divide heads=3"),
    ("gpt2", {}, {"heads": 2, "kv_heads": 1}, "argument-value", "kv_heads"),
    ("llama", {}, {"layers": [0, 3]}, "layers-invalid", "0..2"),
    ("llama", {}, {"heads": 2, "head_dim": 12}, "shrink-unsupported", "head_dim must stay 6 with rotary"),
    ("llama", {}, {"neurons": [20, 21, 1]}, "argument-value", r"1\.\.20"),
    ("bert", {}, {"hidden": 30}, "argument-value", "hidden"),
    ("llama", {}, {"plan": "best"}, "argument-value", "plan"),
    ("llama", {}, {"ridge": -1.0}, "argument-value", "ridge"),
    ("qwen3", {}, {"heads": 1}, "shrink-unsupported", "normed"),
    ("gpt2", {"n_head": 240, "n_embd": 240}, {"heads": 120}, "shrink-unsupported", "a layer, 25 GiB"),
    ("bert", {}, {"drop_activations": 1}, "layers-invalid", "lists"),
    ("bert", {}, {"drop_attention": [0, 1, 2]}, "layers-invalid", "leave a block"),
    ("bert", {}, {"drop_activations": [1], "layers": [0, 2]}, "layers-invalid", "keeps"),
    ("qwen2", SLIDING, {"drop_attention": [0]}, "shrink-unsupported", "attend differently"),
    ("mpnet", {}, {"heads": [2, 2, 1]}, "shrink-unsupported", "same position biases"),
    ("olmo2", {}, {"heads": 2}, "shrink-unsupported", "over all heads"),
    ("modernbert", {}, {"hidden": 12}, "shrink-unsupported", "lies on the stream"),
    ("modernbert", {}, {"layers": [1, 2]}, "shrink-unsupported", "keep layer 0"),
    ("bart", {}, {"stack": "encoder", "hidden": 12}, "shrink-unsupported", "both stacks"),
    ("t5", {}, {"stack": "encoder", "drop_attention": [1]}, "shrink-unsupported", "passes the position biases"),
    ("phi3", {}, {"heads": [4, 2, 2]}, "shrink-unsupported", "heads by layer"),
    ("phi3", {"rope_parameters": LONG, "max_position_embeddings": 20}, {"heads": 2}, "shrink-unsupported", "short_"),
    ("opt", {"word_embed_proj_dim": 10}, {"hidden": 12}, "shrink-unsupported", "other channels"),
    ("opt", {"layer_norm_elementwise_affine": False}, {"hidden": 12}, "shrink-unsupported", "layer_norm.weight"),
    ("opt", {"do_layer_norm_before": False}, {"hidden": 16}, "shrink-unsupported", "lie on the stream"),
]


@pytest.mark.parametrize(("name", "changes", "options", "code", "says"), OPTIONS)
def test_options(name: str, changes: dict[str, Any], options: dict[str, Any], code: str, says: str) -> None:
    with refusal(code, says):
        shrink(make_teacher(name, **changes), make_data(name), **options)


def test_models_data_and_places(tmp_path: Path) -> None:
    import transformers

    ctrl = transformers.CTRLConfig(n_embd=8, dff=8, n_layer=1, n_head=2, vocab_size=9)
    with refusal("shrink-unsupported", "ctrl"):
        shrink(transformers.CTRLModel(ctrl), {"input_ids": torch.ones(1, 2, dtype=torch.long)})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with refusal("write-failed"):
        shrink(make_teacher("llama"), make_data("llama"), out=tmp_path / "full")
    teacher, ids = make_teacher("llama"), torch.ones(2, 4, dtype=torch.long)
    for data, code in (
        ({"input_ids": ids[:0]}, "argument-shape"),
        ({"input_ids": ids, "attention_mask": ids[:1]}, "argument-shape"),
        ({"input_ids": ids + 40}, "inputs-invalid"),
        ({"pixels": ids}, "inputs-invalid"),
        ([ids], "argument-dtype"),
        ({"input_ids": ["a", "b"]}, "argument-dtype"),
        ({"input_ids": 3}, "argument-shape"),
        ({"input_ids": ids, "attention_mask": 0 * ids}, "argument-value"),
        ({"inputs_embeds": torch.full((2, 3, WIDTH), torch.nan).double()}, "not-finite"),
    ):
        with refusal(code):
            shrink(teacher, data, heads=2)
    with torch.no_grad():
        teacher.model.layers[1].mlp.up_proj.weight.fill_(torch.inf)
    for options, says in (({"heads": 2}, "layer 1"), ({"hidden": 20}, "stream")):
        with refusal("not-finite", says):
            shrink(teacher, {"input_ids": ids}, **options)


CONFIGURATIONS: list[tuple[dict[str, Any], str]] = [
    ({"dropped_attention": [1, 0]}, "rising"),
    ({"dropped_attention": "1"}, "lists"),
    ({"dropped_attention": [0, 1, 2]}, "with attention"),
    ({"dropped_attention": []}, "every weight"),
    ({"architectures": ["CustomPretrainedConfig"]}, "architecture"),
    ({"num_hidden_layers": 4}, "must list"),
    ({"quantization_config": {"quant_method": "own"}}, r"quantization_config \(own\)"),
    ({"model_type": "os with custom layers (load it with shd_torch.load_student)"}, "os"),
    *(
        ({"layer_sizes": [first] + [{"heads": 2, "kv_heads": 2, "head_dim": 12, "neurons": 20}] * 2}, says)
        for first, says in (
            ({"heads": 0, "kv_heads": 2, "head_dim": 12, "neurons": 20}, "from 1"),
            ({"heads": 2, "kv_heads": 1, "head_dim": 12, "neurons": 20}, "as many heads"),
            ({"heads": 2, "kv_heads": 2, "head_dim": 5, "neurons": 20}, "one head_dim"),
            ({"heads": 2, "kv_heads": 2, "head_dim": 12, "neurons": 1 << 40}, "from 1"),
            ({"heads": 3, "kv_heads": 3, "head_dim": 12, "neurons": 20}, "every weight"),
        )
    ),
    ({"layer_sizes": []}, "must list"),
]


@pytest.fixture(scope="module")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("students") / "bert"
    options = {"heads": [2, 2, 4], "drop_attention": [1], "drop_activations": [2]}
    shrink(make_teacher("bert"), make_data("bert"), **options, align=False, out=folder)
    return folder


@pytest.mark.parametrize(("changes", "says"), CONFIGURATIONS, ids=str)
def test_folders_that_contradict_themselves(
    changes: dict[str, Any], says: str, student_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(student_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with refusal("shrink-unsupported" if "quantization_config" in changes else "read-failed", says):
        load_student(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heads": 2}, "of 12 instead of 6"),
        ({"heads": 2, "head_dim": 6}, None),
        ({"heads": [2, 2, 4], "head_dim": 12}, "head_dim=6 saves time"),
        ({"heads": [2, 2, 4]}, None),
    ],
)
def test_heads_that_save_no_time_are_remarked(options: dict[str, Any], says: str | None) -> None:
    remarks = shrink(make_teacher("bert"), make_data("bert"), align=False, **options).report["remarks"]
    assert [says in remark for remark in remarks] == ([] if says is None else [True])


def test_maps_are_merged_to_one_number_of_heads() -> None:
    report = shrink(make_teacher("bert"), make_data("bert"), heads=[1, 2, 2], align=False).report
    with refusal("shrink-unsupported", "different numbers of heads"):
        read_student(json.loads(json.dumps(report)))
