"""Closed forms that are exact: the student is its teacher with one change, at other sizes than those of the data."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import WIDTH, logits_of, make_data, make_teacher, mixed_logits
from torch import nn

from shd_ref.shrink import read_student
from shd_torch.shrink import shrink

GROUPED = ["llama", "qwen2", "gemma", "phi3"]
PLAIN = ["gpt2", "opt", "bert", "distilbert"]
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"heads": 2}) for name in [*GROUPED, *PLAIN]},
    "vit": ("vit", {"heads": 2, "head_dim": 12}),
    "by layer bert": ("bert", {"heads": [2, 4, 1], "head_dim": 24}),
    "longer dinov2": ("dinov2", {"heads": 2, "head_dim": 13}),
    "by layer llama": ("llama", {"heads": [2, 4, 2], "kv_heads": 2}),
    "bart encoder": ("bart", {"stack": "encoder", "heads": 2}),
    "bart decoder": ("bart", {"stack": "decoder", "heads": [1, 2, 4], "head_dim": 24}),
    "whisper encoder": ("whisper", {"stack": "encoder", "heads": [4, 1, 2], "head_dim": 24}),
    "whisper decoder": ("whisper", {"stack": "decoder", "heads": 2}),
}
"""Sizes at which a student head is as wide as its group, or stays inside its key/value heads."""


@pytest.mark.parametrize("case", HEADS)
def test_fewer_heads_are_the_teacher_with_mixed_logits(case: str) -> None:
    name, options = HEADS[case]
    teacher, other = make_teacher(name), make_data(name, samples=3, length=13, seed=5)
    made = shrink(teacher, make_data(name), align=False, **options)
    layers = made.report["layers"]
    assert {layer["exact"] for layer in layers} == {True}
    assert {layer["case"] for layer in layers} <= {"queries" if name in GROUPED else "side-by-side", "copied"}
    with mixed_logits(teacher, [(layer["groups"], layer["mixing"]) for layer in layers], options.get("stack", "")):
        exact = logits_of(teacher, other)
    torch.testing.assert_close(logits_of(made.student, other), exact, atol=1e-10, rtol=0.0)
    assert float((exact - logits_of(teacher, other)).abs().max()) > 1e-3  # the merge changes something
    if "stack" in options:
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

    def mix(_: nn.Module, read: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        logits = read[0].clamp_min(1e-300).log()
        mixed = torch.einsum("ht,btls->bhls", torch.tensor(mixing, dtype=logits.dtype), logits).softmax(-1)
        return (mixed[:, [number for _, number in homes]],)

    teacher.mpnet.encoder.layer = nn.ModuleList(blocks[source] for source in made.report["sources"])
    other = make_data("mpnet", samples=3, length=13, seed=5)
    plain = logits_of(teacher, other)
    for block in teacher.mpnet.encoder.layer:
        block.attention.attn.dropout.register_forward_pre_hook(mix)
    exact = logits_of(teacher, other)
    assert float((exact - plain).abs().max()) > 1e-3  # the merge changes something
    torch.testing.assert_close(logits_of(made.student, other), exact, atol=1e-10, rtol=0.0)


@pytest.mark.parametrize("name", ["gpt_neox", "modernbert"])
def test_rotary_heads_that_are_alike_merge_without_loss(name: str) -> None:
    """Also where some pairs of entries turn slowly."""
    teacher, data = make_teacher(name), make_data(name)
    with torch.no_grad():
        for label, parameter in teacher.named_parameters():
            if "query_key_value" in label:
                heads = parameter.view(4, -1, *parameter.shape[1:])
                heads[1::2] = heads[::2]
            elif "Wqkv" in label:
                blocks = parameter.view(3, 4, -1, *parameter.shape[1:])
                blocks[:, 1::2] = blocks[:, ::2]
    made = shrink(teacher, data, heads=2, align=False)
    assert {layer["case"] for layer in made.report["layers"]} == {"turned"}
    other = make_data(name, samples=3, length=13, seed=5)
    close = 1e-6 if name == "modernbert" else 1e-10  # which turns queries and keys in float32
    torch.testing.assert_close(logits_of(made.student, other), logits_of(teacher, other), atol=close, rtol=0.0)


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


PARTS = {
    "llama": ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    "gpt2": ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "bert": ("attention.output.dense", "intermediate.dense", "output.dense"),
    "dinov2": ("attention.o_proj", "mlp.fc1", "mlp.fc2"),
    "opt": ("self_attn.out_proj", "fc1", "fc2"),
    "gpt_neox": ("attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "olmo2": ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    "modernbert": ("attn.Wo", "mlp.Wi", "mlp.Wo"),
    "distilbert": ("attention.out_lin", "ffn.lin1", "ffn.lin2"),
}
"""What the attention gives to the stream; what the FFN reads by, and gives."""


def _layers(model: Any) -> Any:
    return next(part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == 3)


@contextmanager
def without(teacher: Any, name: str, attention: list[int], linear: dict[int, Any]) -> Iterator[None]:
    """The teacher with zeros in place of attention, and maps of what they read in place of FFNs, by hooks."""
    layers, (output, first, last), read = _layers(teacher), PARTS[name], {}
    hooks: list[Any] = [(number, output, lambda *got: torch.zeros_like(got[2])) for number in attention]
    hooks += [(number, first, lambda *got, number=number: read.update({number: got[1][0]})) for number in linear]
    hooks += [(number, last, lambda *_, number=number: linear[number](read[number])) for number in linear]
    handles = [layers[number].get_submodule(path).register_forward_hook(hook) for number, path, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", PARTS)
def test_without_some_parts_the_others_are_as_they_were(name: str) -> None:
    teacher = make_teacher(name)
    made = shrink(teacher, make_data(name), drop_attention=[0, 2], drop_activations=[1, 2], align=False)
    other = make_data(name, samples=3, length=13, seed=5)
    linear = {number: _layers(made.student)[number].get_submodule(PARTS[name][2]) for number in (1, 2)}
    if name == "dinov2":  # the scale after the block is folded in
        scales = {number: _layers(teacher)[number].layer_scale2.lambda1 for number in linear}
        linear = {number: lambda x, own=own, by=scales[number]: own(x) / by for number, own in linear.items()}
    with without(teacher, name, [0, 2], linear):
        exact = logits_of(teacher, other)
    torch.testing.assert_close(logits_of(made.student, other), exact, atol=1e-10, rtol=0.0)
    assert float((exact - logits_of(teacher, other)).abs().max()) > 1e-3  # something was dropped
    assert [layer["case"] for layer in made.report["layers"]] == ["dropped", "copied", "dropped"]
    assert [layer.get("ffn") for layer in made.report["layers"]] == [None, "linear", "linear"]
    assert (made.report["layer_map"], made.report["holes"]) == ([[0, 1]], [0, 2])


def test_an_ffn_that_is_linear_is_found_and_another_has_its_error_said() -> None:
    for activation, is_linear in (("linear", True), ("gelu", False)):
        teacher, data = make_teacher("gpt2", activation_function=activation), make_data("gpt2", samples=24)
        made = shrink(teacher, data, drop_activations=[0, 1, 2], align=False, ridge=0.0)
        errors = [layer["ffn_error"] for layer in made.report["layers"]]
        assert all((error < 1e-6) == is_linear and error < 0.7 for error in errors), errors
        gap = (logits_of(made.student, data) - logits_of(teacher, data)).norm() / logits_of(teacher, data).norm()
        assert (gap < 1e-8) == is_linear


WRITERS = ("embed_tokens", "embed_in", "dense_4h_to_h", "attention.dense", "out_proj", "o_proj", "down_proj", "fc2")
WRITERS += ("cls_token", "position", "patch_embeddings", "mask_token")


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
    with torch.no_grad():
        for label, parameter in teacher.named_parameters():
            if any(part in label for part in WRITERS):
                axis = next(a for a, size in enumerate(parameter.shape) if size == WIDTH)
                if label.endswith(("o_proj.weight", "out_proj.weight", "attention.dense.weight")):
                    axis = 0
                if "embed_tokens" in label or "embed_in" in label:
                    axis = 1
                parameter.copy_((parameter.movedim(axis, -1) @ flat).movedim(-1, axis))
            elif "layer_scale" in label:
                parameter.fill_(0.7)
            elif label.endswith("final_layer_norm.bias"):
                parameter.zero_()  # the output layer has no bias that could take it
    made = shrink(teacher, data, hidden=16 if name == "dinov2" else 20, head_dim=6, align=False)
    other = make_data(name, samples=3, length=12, seed=9)
    torch.testing.assert_close(logits_of(made.student, other), logits_of(teacher, other), atol=2e-5, rtol=0.0)


LAST = ("down_proj", "fc2", "mlp.c_proj", "output.dense", "lin2", "4h_to_h", "mlp.Wo")
NEURONS = {"gpt2": 88, "dinov2": 40} | dict.fromkeys(("llama", "phi3", "olmo2", "gpt_neox", "modernbert", "bert"), 12)


@pytest.mark.parametrize("name", NEURONS)
def test_neurons_that_say_nothing_go_first(name: str) -> None:
    teacher, data = make_teacher(name), make_data(name)
    with torch.no_grad():
        for label, parameter in teacher.named_parameters():
            if label.removesuffix(".weight").endswith(LAST) and "attention" not in label and "bias" not in label:
                (parameter if name == "gpt2" else parameter.T)[3:11] = 0.0
    made = shrink(teacher, data, neurons=NEURONS[name], align=False)
    assert made.report["teacher"]["neurons"] == NEURONS[name] + 8
    for layer in made.report["layers"]:
        assert len(layer["neurons"]) == NEURONS[name]
        assert not set(range(3, 11)) & set(layer["neurons"])
    torch.testing.assert_close(logits_of(made.student, data), logits_of(teacher, data), atol=1e-10, rtol=0.0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_neurons_by_layer_are_those_of_each_count(name: str) -> None:
    """A layer has the weights that it has in a student with its count in all layers."""
    teacher, data, counts = make_teacher(name), make_data(name), [7, 20, 12]
    student = shrink(teacher, data, neurons=counts, align=False).student.state_dict()
    prefix = {"gpt2": ".h.", "llama": "layers."}[name]
    for number, count in enumerate(counts):
        alike = shrink(teacher, data, neurons=count, align=False).student.state_dict()
        own = {key: tensor for key, tensor in student.items() if f"{prefix}{number}." in key}
        assert own
        assert all(torch.equal(tensor, alike[key]) for key, tensor in own.items())
