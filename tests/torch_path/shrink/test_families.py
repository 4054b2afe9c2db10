"""Families whose architecture rules out some changes: the others work together, and an error says why not all do."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.refusals import refusal
from support.shrink.models import logits_of, make_data, make_teacher, mixed_logits

from shd_ref.shrink import read_student
from shd_torch import load_student
from shd_torch.export import export_student
from shd_torch.shrink import shrink

DROP = {"drop_attention": [0], "drop_activations": [2]}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "xlm-roberta": ("xlm-roberta", {}, {"heads": [2, 3], "head_dim": 5, "neurons": 12, **DROP}),
    "mpnet": ("mpnet", {}, {"heads": 2, "head_dim": 6, "neurons": 12, **DROP}),
    "gpt-neox": ("gpt_neox", {}, {"hidden": 12, "heads": 2, "neurons": 12, **DROP}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False}, {"neurons": 12}),
    "olmo2": ("olmo2", {}, {"neurons": 12, "drop_attention": [0]}),
    "modernbert": ("modernbert", {}, {"heads": 2, "neurons": [12, 9], "drop_attention": [0]}),
    "bart-encoder": ("bart", {}, {"stack": "encoder", "heads": 2, "neurons": 12, **DROP}),
    "bart-decoder": ("bart", {}, {"stack": "decoder", "heads": [2, 3], "neurons": 12, **DROP}),
    "whisper-encoder": ("whisper", {}, {"stack": "encoder", "heads": 2, "head_dim": 5, "neurons": 12, **DROP}),
    "whisper-decoder": ("whisper", {}, {"stack": "decoder", "neurons": [12, 9]}),
    "t5-encoder": ("t5", {}, {"stack": "encoder", "neurons": 12, "drop_activations": [2]}),
    "t5-decoder": ("t5", {"feed_forward_proj": "gated-gelu"}, {"stack": "decoder", "neurons": [12, 9]}),
    "phi3": ("phi3", {}, {"hidden": 20, "heads": 1, "neurons": 12, "drop_attention": [0]}),
    "opt-post-norm": (
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 10},
        {"heads": 2, "neurons": 12, **DROP},
    ),
}
"""A family, changes of its configuration, and what it allows beside fewer layers."""

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 2,
    "long_factor": [2.0] * 2,
    "factor": 1.0,
}


@pytest.mark.parametrize("case", CASES)
def test_all_that_is_allowed_at_once(case: str, tmp_path: Path) -> None:
    name, changes, options = CASES[case]
    teacher, data = make_teacher(name, **changes), make_data(name, samples=24)
    copied = shrink(teacher, data, align=False, stack=options.get("stack")).student
    other = make_data(name, samples=3, length=13, seed=5)
    torch.testing.assert_close(logits_of(copied, other), logits_of(teacher, other), atol=1e-10, rtol=0.0)
    start = shrink(teacher, data, layers=[0, 2], **options, align=False).report["layers"]
    made = shrink(teacher, data, layers=[0, 2], **options, out=tmp_path / "student")
    assert made.report["aligned"] == (name != "olmo2")
    for aligned, closed in zip(made.report["layers"], start, strict=True):
        assert 0 < aligned["layer_error"] <= closed["layer_error"]
        assert aligned["layer_error"] < closed["layer_error"] or name == "olmo2"
    loaded = load_student(tmp_path / "student").double()
    torch.testing.assert_close(logits_of(loaded, other), logits_of(made.student, other), atol=1e-5, rtol=0.0)
    if hasattr(loaded, "generate") and name != "whisper" and case != "t5-encoder":  # see docs/shrink.md
        words = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        tokens = [loaded.generate(data["input_ids"][1:3], use_cache=cached, **words) for cached in (True, False)]
        assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bart", {"stack": "encoder", "heads": 2}),
        ("bart", {"stack": "decoder", "heads": [1, 2, 4], "head_dim": 24}),
        ("whisper", {"stack": "encoder", "heads": [4, 1, 2], "head_dim": 24}),
        ("whisper", {"stack": "decoder", "heads": 2}),
    ],
)
def test_heads_of_one_stack_are_the_teacher_with_mixed_logits(name: str, options: dict[str, Any]) -> None:
    """The other stack and cross attention stay as they are."""
    teacher = make_teacher(name)
    made = shrink(teacher, make_data(name), align=False, **options)
    assert {layer["exact"] for layer in made.report["layers"]} == {True}
    other = make_data(name, samples=3, length=13, seed=5)
    with mixed_logits(
        teacher, [(layer["groups"], layer["mixing"]) for layer in made.report["layers"]], options["stack"]
    ):
        exact = logits_of(teacher, other)
    torch.testing.assert_close(logits_of(made.student, other), exact, atol=1e-10, rtol=0.0)
    assert float((exact - logits_of(teacher, other)).abs().max()) > 1e-3  # the merge changes something
    assert (made.report["stack"], made.report["teacher"]["heads"]) == (options["stack"], 4)
    with refusal("shrink-unsupported", "one stack"):
        read_student(made.report)


@pytest.mark.parametrize("options", [{"heads": 2}, {"heads": 1, "layers": [0, 2], "neurons": [20, 20]}], ids=str)
def test_shared_position_biases_are_mixed_as_the_heads(options: dict[str, Any]) -> None:
    """Maps of mixed logits are the normalised geometric means of MPNet's maps."""
    teacher = make_teacher("mpnet")
    made = shrink(teacher, make_data("mpnet"), align=False, **options)
    merges = [(layer["groups"], layer["mixing"]) for layer in made.report["layers"]]
    assert {layer["exact"] for layer in made.report["layers"]} == {True}
    assert all(merge == merges[0] for merge in merges)
    (groups, mixing), blocks = merges[0], teacher.mpnet.encoder.layer
    homes = sorted((head, number) for number, group in enumerate(groups) for head in group)

    def mix(_: torch.nn.Module, read: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        logits = read[0].clamp_min(1e-300).log()
        mixed = torch.einsum("ht,btls->bhls", torch.tensor(mixing, dtype=logits.dtype), logits).softmax(-1)
        return (mixed[:, [number for _, number in homes]],)

    teacher.mpnet.encoder.layer = torch.nn.ModuleList(blocks[source] for source in made.report["sources"])
    other = make_data("mpnet", samples=3, length=13, seed=5)
    plain = logits_of(teacher, other)
    for block in teacher.mpnet.encoder.layer:
        block.attention.attn.dropout.register_forward_pre_hook(mix)
    exact = logits_of(teacher, other)
    assert float((exact - plain).abs().max()) > 1e-3  # the merge changes something
    torch.testing.assert_close(logits_of(made.student, other), exact, atol=1e-10, rtol=0.0)


def test_position_biases_go_to_the_first_layer() -> None:
    """Without T5's first layer the student is the teacher whose first layer adds nothing."""
    teacher = make_teacher("t5")
    made = shrink(teacher, make_data("t5"), layers=[1, 2], stack="encoder", align=False)
    with torch.no_grad():
        for label, parameter in teacher.named_parameters():
            if "encoder.block.0" in label and label.endswith((".o.weight", ".wo.weight")):
                parameter.zero_()
    other = make_data("t5", samples=3, length=13, seed=5)
    torch.testing.assert_close(logits_of(made.student, other), logits_of(teacher, other), atol=1e-10, rtol=0.0)


def test_a_model_of_one_stack_is_as_any_other(tmp_path: Path) -> None:
    config = make_teacher("t5").config
    teacher, data = transformers.T5EncoderModel(config).double().eval(), make_data("bert")
    made = shrink(teacher, data, neurons=12, layers=[0, 2], out=tmp_path / "student")
    assert "stack" not in made.report
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "student", dtype=torch.float64)
    assert loaded.config.d_ff == 12
    with refusal("argument-value", "stack must be encoder"):
        shrink(teacher, data, stack="decoder")
    with refusal("argument-value", "encoder or decoder"):
        shrink(make_teacher("t5"), make_data("t5"), neurons=12)


@pytest.mark.parametrize("name", ["gpt_neox", "modernbert"])
def test_rotary_heads_that_are_alike_merge_without_loss(name: str) -> None:
    """Their form has the rank of one head where no pair of entries turns slowly."""
    fast: dict[str, Any] = {"rope_type": "default", "rope_theta": 4.0, "partial_rotary_factor": 0.67}
    if name == "modernbert":
        fast = {kind: {"rope_type": "default", "rope_theta": 1.5} for kind in ("full_attention", "sliding_attention")}
    teacher, data = make_teacher(name, rope_parameters=fast), make_data(name)
    with torch.no_grad():
        for label, parameter in teacher.named_parameters():
            if "query_key_value" in label:
                heads = parameter.view(4, -1, *parameter.shape[1:])
                heads[1::2] = heads[::2]
            elif "Wqkv" in label:
                blocks = parameter.view(3, 4, -1, *parameter.shape[1:])
                blocks[:, 1::2] = blocks[:, ::2]
    made = shrink(teacher, data, heads=2, align=False)
    assert {layer["case"] for layer in made.report["layers"]} == {"rotary"}
    other = make_data(name, samples=3, length=13, seed=5)
    close = 1e-6 if name == "modernbert" else 1e-10  # which turns queries and keys in float32
    torch.testing.assert_close(logits_of(made.student, other), logits_of(teacher, other), atol=close, rtol=0.0)


@pytest.mark.slow
def test_a_graph_of_fewer_rotary_heads(tmp_path: Path) -> None:
    data = make_data("modernbert")
    student = shrink(make_teacher("modernbert", layers=1).float(), data, heads=3, neurons=7).student
    report = export_student(student, data, tmp_path / "student.onnx")
    assert (report.num_fused, report.num_softmax) == (1, 0)


@pytest.mark.parametrize(
    ("name", "changes", "options", "says"),
    [
        ("mpnet", {}, {"heads": [2, 2, 1]}, "same position biases"),
        ("mpnet", {}, {"heads": 3, "neurons": [1, 2, 3], "hidden": 16}, "is not a multiple"),
        ("gpt_neox", {}, {"heads": 2, "head_dim": 12}, "head_dim must stay 6"),
        ("olmo2", {}, {"heads": 2}, "over all heads"),
        ("olmo2", {}, {"hidden": 12}, "do not fold"),
        ("modernbert", {}, {"hidden": 12}, "lies on the stream"),
        ("bart", {}, {"stack": "encoder", "hidden": 12}, "both stacks"),
        ("t5", {}, {"stack": "decoder", "heads": 2}, "both stacks"),
        ("t5", {}, {"stack": "encoder", "drop_attention": [1]}, "passes the position biases"),
        ("modernbert", {}, {"layers": [1, 2]}, "keep layer 0"),
        ("phi3", {}, {"heads": [4, 2, 2]}, "heads by layer"),
        ("phi3", {"rope_parameters": LONG, "max_position_embeddings": 20}, {"heads": 2}, "short_factor"),
        ("opt", {"word_embed_proj_dim": 10}, {"hidden": 12}, "other channels"),
        ("opt", {"layer_norm_elementwise_affine": False}, {"hidden": 12}, "layer_norm.weight"),
    ],
)
def test_changes_that_an_architecture_rules_out(
    name: str, changes: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with refusal("shrink-unsupported", says):
        shrink(make_teacher(name, **changes), make_data(name), **options)
