"""Students of every family: exact where the specification says so, saved, loaded again, and refused in words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refusal
from support.shrink.models import WIDTH, logits_of, make_data, make_teacher, mixed_logits
from torch import Tensor

from shd_torch.shrink import shrink
from shd_torch.shrink.unfinished import Unfinished

GROUPED = ["llama", "mistral", "qwen2", "gemma", "phi3"]
FAMILIES = [*GROUPED, "gpt2", "opt", "bert", "electra", "distilbert", "vit", "deit", "dinov2"]


LAST = tuple(
    f"{name}.weight" for name in ("down_proj", "fc2", "mlp.c_proj", "output.dense", "lin2", "4h_to_h", "mlp.Wo")
)


def merges_of(report: dict[str, Any]) -> list[Any]:
    return [(layer["groups"], layer["mixing"]) for layer in report["layers"]]


@pytest.mark.parametrize("name", FAMILIES)
def test_half_the_heads_are_the_teacher_with_mixed_logits(name: str) -> None:
    """At another batch size and length than those of the calibration."""
    teacher = make_teacher(name)
    options = {"head_dim": 12} if name in ("vit", "deit", "dinov2") else {}
    made = shrink(teacher, make_data(name), heads=2, align=False, **options)
    assert {layer["exact"] for layer in made.report["layers"]} == {True}
    expected_case = "queries" if name in GROUPED else "side-by-side"
    assert {layer["case"] for layer in made.report["layers"]} == {expected_case}
    other = make_data(name, samples=3, length=13, seed=5)
    with mixed_logits(teacher, merges_of(made.report)):
        wanted = logits_of(teacher, other)
    torch.testing.assert_close(logits_of(made.student, other), wanted, atol=1e-10, rtol=0.0)
    assert float((wanted - logits_of(teacher, other)).abs().max()) > 1e-3  # the merge changes something


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3"])
def test_all_heads_and_layers_are_the_teacher(name: str) -> None:
    teacher, data = make_teacher(name), make_data(name)
    made = shrink(teacher, data, align=False)
    assert {layer["case"] for layer in made.report["layers"]} == {"copied"}
    torch.testing.assert_close(logits_of(made.student, data), logits_of(teacher, data), atol=1e-10, rtol=0.0)
    assert max(layer["layer_error"] for layer in made.report["layers"]) < 1e-6


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3"])
def test_smaller_students_save_and_load(name: str, tmp_path: Path) -> None:
    import transformers

    teacher, data = make_teacher(name), make_data(name)
    told: list[tuple[int, int, str]] = []
    made = shrink(
        teacher, data, heads=2, layers=2, out=tmp_path / "student", progress=lambda *step: told.append(step)
    )
    assert [(done, total) for done, total, _ in told] == [(step, 8) for step in range(9)]
    assert [what for *_, what in told[4:6]] == ["layer 2/2 maps", "layer 2/2 heads"]
    report = json.loads((tmp_path / "student" / "shrink.json").read_text(encoding="utf-8"))
    assert report == made.report
    assert (report["layer_map"], report["holes"]) == ([[0, 0], [1, 2]], [1])
    assert report["student"]["parameters"] < report["teacher"]["parameters"]
    loaded = type(teacher).from_pretrained(tmp_path / "student", dtype=torch.float64).eval()
    torch.testing.assert_close(logits_of(loaded, data), logits_of(made.student, data), atol=1e-5, rtol=0.0)
    base = transformers.AutoModel.from_pretrained(tmp_path / "student")
    assert base.config.num_attention_heads == 2
    assert all(0 <= layer["layer_error"] < 1.5 for layer in report["layers"])
    assert float((logits_of(made.student, data) - logits_of(teacher, data)).abs().max()) > 1e-6


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        "gemma",
        "phi3",
        "gpt2",
        "opt",
        "gpt_neox",
        "vit",
        "deit",
        "dinov2",
        "bert",
        "mpnet",
        "electra",
    ],
)
def test_width(name: str) -> None:
    teacher, data = make_teacher(name), make_data(name, samples=24)
    errors = []
    for hidden in (16, 8) if name == "dinov2" else (20, 8):
        made = shrink(teacher, data, hidden=hidden)
        wanted = logits_of(teacher, data)
        errors.append(float((logits_of(made.student, data) - wanted).norm() / (wanted - wanted.mean(0)).norm()))
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3", "gpt_neox", "vit", "dinov2"])
def test_a_stream_that_never_leaves_some_axes_is_cut_exactly(name: str) -> None:
    """What the teacher does not use costs nothing: folding, rotation, cut and the norms' scale are exact."""
    teacher, data = make_teacher(name, layers=2), make_data(name)
    random = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=random).double())[0]
    if name not in GROUPED:  # LayerNorms: stay orthogonal to the ones
        turn = torch.cat([torch.ones(WIDTH, 1).double(), turn], 1)
        turn = torch.linalg.qr(turn)[0][:, 1:]
    flat = turn[:, :15] @ turn[:, :15].mT
    writers = (
        "embed_tokens",
        "embed_in",
        "dense_4h_to_h",
        "attention.dense",
        "out_proj",
        "o_proj",
        "down_proj",
        "fc2",
        "cls_token",
        "position",
        "patch_embeddings",
        "mask_token",
    )
    with torch.no_grad():
        for label, parameter in teacher.named_parameters():
            if any(part in label for part in writers):
                axis = next(a for a, size in enumerate(parameter.shape) if size == WIDTH)
                if label.endswith(("o_proj.weight", "out_proj.weight", "attention.dense.weight")):
                    axis = 0
                if "embed_tokens" in label or "embed_in" in label:
                    axis = 1
                moved = parameter.movedim(axis, -1)
                parameter.copy_((moved @ flat).movedim(-1, axis))
            elif "layer_scale" in label:
                parameter.fill_(0.7)
            elif label.endswith("final_layer_norm.bias"):
                parameter.zero_()  # the output layer has no bias that could take it
    made = shrink(teacher, data, hidden=16 if name == "dinov2" else 20, head_dim=6, align=False)
    other = make_data(name, samples=3, length=12, seed=9)
    torch.testing.assert_close(logits_of(made.student, other), logits_of(teacher, other), atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("name", ["llama", "opt", "bert", "vit"])
def test_alignment_lowers_the_error_on_the_calibration_set(name: str) -> None:
    teacher, data = make_teacher(name), make_data(name, samples=32, length=12)
    found = {align: shrink(teacher, data, heads=2, layers=[0, 2], align=align) for align in (False, True)}
    errors = {align: [layer["layer_error"] for layer in made.report["layers"]] for align, made in found.items()}
    assert errors[True][0] < errors[False][0]
    assert errors[True][1] < errors[False][1]


@pytest.mark.parametrize(
    ("name", "neurons"),
    [("gpt2", 88), ("dinov2", 24)]
    + [
        (name, 12)
        for name in ("llama", "phi3", "olmo2", "gpt_neox", "modernbert", "bert", "distilbert", "mpnet", "vit")
    ],
)
def test_neurons_that_say_nothing_go_first(name: str, neurons: int) -> None:
    teacher, data = make_teacher(name), make_data(name)
    silent = slice(3, 11)
    with torch.no_grad():
        for label, parameter in teacher.named_parameters():
            if label.endswith(LAST) and "attention" not in label:
                (parameter if name == "gpt2" else parameter.T)[silent] = 0.0
    made = shrink(teacher, data, neurons=neurons, align=False)
    total = made.report["teacher"]["neurons"]
    for layer in made.report["layers"]:
        assert len(layer["neurons"]) == neurons
        assert total - neurons < 8 or not set(range(3, 11)) & set(layer["neurons"])
    if total - neurons <= 8:
        torch.testing.assert_close(logits_of(made.student, data), logits_of(teacher, data), atol=1e-10, rtol=0.0)
    heads = {} if name == "olmo2" else {"heads": 2}
    both = shrink(teacher, data, neurons=neurons, layers=2, **heads)
    assert both.report["student"]["neurons"] == neurons


def test_half_precision_is_computed_with_in_float32(tmp_path: Path) -> None:
    teacher, data = make_teacher("llama").bfloat16(), make_data("llama")
    with refusal("argument-dtype", "float"):
        shrink(teacher, data, heads=2)
    teacher.save_pretrained(tmp_path / "teacher")
    made = shrink(tmp_path / "teacher", data, heads=2, hidden=20)
    assert {part.dtype for part in made.student.parameters()} == {torch.bfloat16}


def test_rows_that_do_not_count_change_nothing() -> None:
    teacher, data = make_teacher("llama"), make_data("llama")
    first = shrink(teacher, data, heads=2)
    data["input_ids"] = torch.where(data["attention_mask"].bool(), data["input_ids"], 7)
    second = shrink(teacher, data, heads=2)
    for one, two in zip(first.student.parameters(), second.student.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-9, rtol=0.0)


def test_batches_change_nothing() -> None:
    teacher, data = make_teacher("gpt2"), make_data("gpt2")
    students = [shrink(teacher, data, heads=2, batch_size=size).student for size in (2, 6)]
    for one, two in zip(*(student.parameters() for student in students), strict=True):
        torch.testing.assert_close(one, two, atol=1e-8, rtol=0.0)


def test_teacher_is_left_as_it_was() -> None:
    teacher, data = make_teacher("llama").train(), make_data("llama")
    before = {name: part.clone() for name, part in teacher.state_dict().items()}
    implementation = teacher.config._attn_implementation
    shrink(teacher, data, heads=2, layers=2, hidden=20)
    assert teacher.training
    assert teacher.config._attn_implementation == implementation
    assert teacher.config.num_attention_heads == 4
    assert all(torch.equal(part, before[name]) for name, part in teacher.state_dict().items())


@pytest.mark.parametrize(
    ("name", "options", "code", "says"),
    [
        ("llama", {"heads": 5}, "heads-exceed", "1..4"),
        ("llama", {"heads": 0}, "argument-value", "heads"),
        ("llama", {"layers": [0, 3]}, "layers-invalid", "0..2"),
        ("llama", {"layers": [2, 0]}, "layers-invalid", "rising"),
        ("llama", {"layers": 4}, "layers-invalid", "1..3"),
        ("llama", {"heads": 2, "head_dim": 12}, "shrink-unsupported", "rotary"),
        ("llama", {"heads": 3, "kv_heads": 2}, "argument-value", "kv_heads"),
        ("llama", {"plan": "best"}, "argument-value", "plan"),
        ("llama", {"neurons": 21}, "argument-value", "1..20"),
        ("llama", {"head_dim": 0}, "argument-value", "head_dim"),
        ("llama", {"kv_heads": True}, "argument-value", "kv_heads"),
        ("llama", {"batch_size": 0}, "argument-value", "batch_size"),
        ("llama", {"ridge": -1.0}, "argument-value", "ridge"),
        ("qwen3", {"heads": 1}, "shrink-unsupported", "normed"),
        ("gpt2", {"heads": 2, "kv_heads": 1}, "argument-value", "kv_heads"),
        ("bert", {"hidden": 30}, "argument-value", "hidden"),
    ],
)
def test_refusals(name: str, options: dict[str, Any], code: str, says: str) -> None:
    with refusal(code, says):
        shrink(make_teacher(name), make_data(name), **options)


def test_sizes_of_numpy_are_integers_too() -> None:
    layers: Any = np.array([0, 2])
    heads: Any = np.int64(2)
    made = shrink(make_teacher("llama"), make_data("llama"), heads=heads, layers=layers, align=False)
    assert (made.report["student"]["heads"], made.report["layer_map"]) == (2, [[0, 0], [1, 2]])
    json.dumps(made.report)


def test_other_models_and_folders_are_refused(tmp_path: Path) -> None:
    import transformers

    ctrl = transformers.CTRLConfig(n_embd=8, dff=8, n_layer=1, n_head=2, vocab_size=9)
    with refusal("shrink-unsupported", "ctrl"):
        shrink(transformers.CTRLModel(ctrl), {"input_ids": torch.ones(1, 2, dtype=torch.long)})
    with refusal("read-failed"):
        shrink(tmp_path / "none", make_data("llama"))
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


def test_maps_of_some_rows_at_a_time_say_what_whole_maps_say() -> None:
    """Of four long samples in one batch not all rows are looked at together; of one sample alone they are."""
    teacher = make_teacher("llama", layers=1, max_position_embeddings=1024)
    data = make_data("llama", samples=4, length=1024)
    tiled, whole = (shrink(teacher, data, heads=2, align=False, batch_size=size).report for size in (4, 1))
    for (groups, mixing), (wanted_groups, wanted) in zip(merges_of(tiled), merges_of(whole), strict=True):
        assert groups == wanted_groups
        np.testing.assert_allclose(mixing, wanted, rtol=0, atol=1e-12)


def test_students_share_statistics_of_the_same_teacher_and_data_alone(tmp_path: Path) -> None:
    teacher, data = make_teacher("bart"), make_data("bart")
    data |= {f"decoder_{name}": part for name, part in data.items()}
    other = data | {"input_ids": data["input_ids"].flip(0), "decoder_input_ids": data["input_ids"].flip(1)}
    counts = []
    with Unfinished(tmp_path / "studies", {}) as studies:
        for stack, sizes in [("encoder", {"neurons": 9}), ("encoder", {"heads": 2}), ("encoder", {"neurons": 8})]:
            _check_shared(teacher, data, studies, stack=stack, **sizes)
            counts.append(len(list(studies.folder.glob("study-*"))))
        assert len(set(counts)) == 1
        _check_shared(teacher, data, studies, stack="decoder", heads=2)
        _check_shared(teacher, other, studies, stack="encoder", heads=2)
        data["input_ids"].copy_(other["input_ids"])  # after they were studied
        _check_shared(teacher, data, studies, stack="encoder", heads=2)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(1.5)
        _check_shared(teacher, data, studies, stack="encoder", heads=2)


def _check_shared(teacher: Any, data: dict[str, Tensor], studies: Unfinished, **options: Any) -> None:
    """A student with statistics that are kept is the one without."""
    shared, alone = (shrink(teacher, data, **kept, **options) for kept in ({"studies": studies}, {}))
    for name, tensor in shared.student.state_dict().items():
        torch.testing.assert_close(tensor, alone.student.state_dict()[name], atol=1e-12, rtol=0.0)
