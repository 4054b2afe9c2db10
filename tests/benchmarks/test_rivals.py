"""Every rival against its formula on a small pair of models, and gradients that reach the student alone."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.binding.models import hf_inputs, hf_model
from torch import Tensor
from torch.nn import functional as F

from shd_torch.maps import softmax, squeeze_heads, value_outputs
from shd_torch.recipes import language_kd

pytest.importorskip("transformers", reason="the two models are from transformers")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.study.rivals import RIVALS, ForwardPass, Rival, RivalTerm, TeacherOutputs, make_rival  # noqa: E402  (a folder of the repository, in no wheel)

BATCH = hf_inputs("llama")
COUNTED = BATCH["attention_mask"].bool()
MERGES = ("shd", "hard", "constant", "mean", "as_printed")
FEATURES = ("linear_projector", "mlp_projector", "orthogonal_projector", "self_correlation")


def make_model(width: int, heads: int, layers: int) -> Any:
    model = hf_model("llama", hidden_size=width, num_attention_heads=heads, num_hidden_layers=layers)
    with torch.no_grad():
        for layer in model.model.layers:  # maps that differ from one another
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.v_proj.weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def teacher() -> Any:
    return make_model(32, 4, 4)


def run(rival: Rival, student: Any) -> tuple[ForwardPass, TeacherOutputs]:
    outputs = rival.teach(**BATCH)
    with rival.capture(student, outputs) as own_pass:
        student(**BATCH)
    return own_pass, outputs


def taught(teacher: Any, name: str, heads: int = 2, **options: Any) -> tuple[Rival, ForwardPass, TeacherOutputs]:
    """A rival, and one pass of a student of two layers with it."""
    student = make_model(16, heads, 2)
    rival = make_rival(name, teacher, student, BATCH, **options)
    return rival, *run(rival, student)


def rows_mean(values: Tensor) -> Tensor:
    """The mean over counted rows of ``(B, H, L)``, then the sum over heads."""
    return values.movedim(1, -1)[COUNTED].mean(0).sum()


def student_maps(own_pass: ForwardPass) -> list[Tensor]:
    return [own_pass.captured.probs[layer] for layer in (0, 1)]


def attention_maps(call: Any) -> Tensor:
    return softmax(call.compute_logits(), check=False)


def teacher_maps(outputs: TeacherOutputs) -> list[Tensor]:
    """Student layers 0 and 1 of 2 meet teacher layers 1 and 3 of 4."""
    return [attention_maps(outputs.calls[layer]) for layer in (1, 3)]


def merged_maps(teacher: Any, outputs: TeacherOutputs, name: str, **options: Any) -> list[Tensor]:
    keywords = {"alpha_rule": "as_printed"} if name == "as_printed" else {"strategy": name}
    found = []
    for layer, maps in zip((1, 3), teacher_maps(outputs), strict=True):
        value = outputs.calls[layer].value
        assert value is not None
        projection = teacher.model.layers[layer].self_attn.o_proj.weight.detach().mT
        products = value_outputs(value, projection)
        found.append(squeeze_heads(maps, products, 2, query_mask=COUNTED, check=False, **keywords, **options).probs)
    return found


def kl(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > 0, p * (p / q).log(), 0.0).nan_to_num(0.0).sum(-1)


@pytest.mark.parametrize("name", [*MERGES, "mse", "js", "reverse_kl"])
def test_merged_maps_are_taught_by_a_divergence(teacher: Any, name: str) -> None:
    """By their KL, or by another divergence of the maps of "shd"."""

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        if name == "mse":
            return (p - q).square().sum(-1)
        if name == "js":
            return (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2
        return kl(q, p) if name == "reverse_kl" else kl(p, q)

    rival, own_pass, outputs = taught(teacher, name)
    merged = merged_maps(teacher, outputs, name if name in MERGES else "shd")
    expected = sum(rows_mean(divergence(*pair)) for pair in zip(merged, student_maps(own_pass), strict=True))
    torch.testing.assert_close(rival(own_pass, outputs, loss_mask=COUNTED), expected)


@dataclass
class Pair:
    """A student's layer and the teacher's that teaches it: calls, scores ``(B, H, L, S)`` and maps."""

    calls: tuple[Any, Any]
    scores: tuple[Tensor, Tensor]
    maps: tuple[Tensor, Tensor]
    part: Any


def geometric_mean(pair: Pair) -> Tensor:
    def mean(maps: Tensor) -> Tensor:
        made = maps.clamp(min=1e-30).log().mean(1, keepdim=True).exp() * (maps > 0).all(1, keepdim=True)
        return made / made.sum(-1, keepdim=True)

    own, other = pair.maps
    return rows_mean(kl(torch.cat([mean(other[:, :2]), mean(other[:, 2:])], dim=1), own))


def sum_mse(pair: Pair) -> Tensor:
    own, other = (scores.sum(1) for scores in pair.scores)
    return (own - other)[torch.ones(7, 7, dtype=torch.bool).tril() & COUNTED[:, :, None]].square().mean()


def mean_ce(pair: Pair) -> Tensor:
    """The KL of the softmax of mean logits, which is a cross entropy but for the teacher's entropy."""
    own, other = (scores.mean(1).softmax(-1) for scores in pair.scores)
    return kl(other, own)[COUNTED].mean()


def relation_kl(pair: Pair, heads: int = 4) -> Tensor:
    """Of queries, keys and values, in as many heads as the teacher has, which divide all widths here."""
    ahead, total = torch.ones(7, 7, dtype=torch.bool).triu(1) | ~COUNTED[:, None, :], torch.zeros(())
    for name in ("query", "key", "value"):
        sides = [torch.cat(list(getattr(call, name).detach().unbind(1)), dim=-1) for call in pair.calls]
        parts = [[x @ x.mT / x.shape[-1] ** 0.5 for x in side.chunk(heads, dim=-1)] for side in sides]
        own, other = ([x.masked_fill(ahead, -torch.inf).softmax(-1) for x in products] for products in parts)
        total += sum(kl(p, q)[COUNTED].mean() for p, q in zip(other, own, strict=True)) / heads
    return total


def soft_alignment(pair: Pair) -> Tensor:
    own, other = pair.maps
    weights = F.cosine_similarity(other.flatten(2)[:, :, None], own.flatten(2)[:, None], dim=-1).softmax(2)
    rows = weights[..., None] * kl(other[:, :, None], own[:, None])  # (B, H_t, H_s, L)
    return rows.movedim(3, 1)[COUNTED].mean(0).sum()


def learned_alignment(pair: Pair) -> Tensor:
    own, other = pair.maps
    mixing = pair.part[0].detach().softmax(-1)
    assert mixing.argmax(0).tolist() == [0, 0, 1, 1]  # at first those that adjacent pairs merge
    return rows_mean(kl(torch.einsum("ht,btls->bhls", mixing, other), own))


def random_heads(pair: Pair) -> Tensor:
    own, other = pair.maps
    heads = pair.part.heads
    assert sorted({*heads.tolist()}) == heads.tolist()
    assert len(heads) == own.shape[1]
    return rows_mean(kl(other[:, heads], own))


def attention_output(pair: Pair) -> Tensor:
    sides = []
    for call, maps in zip(pair.calls, pair.maps, strict=True):
        values = call.value.repeat_interleave(maps.shape[1] // call.value.shape[1], 1)
        sides.append((maps @ values).transpose(1, 2).flatten(2)[COUNTED])
    return (pair.part(sides[0]) - sides[1]).square().mean()


FORMULAS = (geometric_mean, sum_mse, mean_ce, relation_kl, soft_alignment, learned_alignment, random_heads)
FORMULAS += (attention_output,)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_other_rivals_follow_their_formulas(teacher: Any, formula: Any) -> None:
    rival, own_pass, outputs = taught(teacher, formula.__name__)
    expected = torch.zeros(())
    for own, other in ((0, 1), (1, 3)):
        calls = own_pass.captured.layer(own), outputs.calls[other]
        scores = own_pass.captured.logits[own].detach(), calls[1].compute_logits()
        maps = own_pass.captured.probs[own].detach(), attention_maps(calls[1])
        part = rival.parts[own] if len(rival.parts) else None
        expected = expected + formula(Pair(calls, scores, maps, part))
    torch.testing.assert_close(rival(own_pass, outputs, loss_mask=COUNTED), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_blocks(teacher: Any, name: str) -> None:
    student = make_model(16, 2, 2)
    rival = make_rival(name, teacher, student, BATCH)
    with torch.no_grad():
        own_states = student(**BATCH, output_hidden_states=True).hidden_states
        other_states = teacher(**BATCH, output_hidden_states=True).hidden_states
    expected = torch.zeros(())
    for number, (own, other) in enumerate(((own_states[1], other_states[2]), (own_states[2], other_states[4]))):
        s, t = own[COUNTED], other[COUNTED]  # (rows, D)
        if name == "self_correlation":
            pairs = [
                (F.cosine_similarity(own[b, i], own[b, j], 0) - F.cosine_similarity(other[b, i], other[b, j], 0)) ** 2
                for b in range(2)
                for i in range(7)
                for j in range(7)
                if COUNTED[b, i] and COUNTED[b, j]
            ]
            expected += torch.stack(pairs).mean()
            continue
        projector: Any = rival.parts[number]
        if name == "orthogonal_projector":
            normed = (t - t.mean(1, keepdim=True)) / (t.var(1, False)[:, None] + 1e-5).sqrt()
            gap = (s @ projector.matrix.mT - normed).abs()
            expected += torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
            torch.testing.assert_close(projector.matrix.mT @ projector.matrix, torch.eye(16), atol=1e-5, rtol=0)
        elif name == "mlp_projector":
            inner = F.gelu(s @ projector[0].weight.mT + projector[0].bias)
            expected += (inner @ projector[2].weight.mT + projector[2].bias - t).square().mean()
        else:
            expected += (s @ projector.weight.mT + projector.bias - t).square().mean()
    torch.testing.assert_close(rival(*run(rival, student), loss_mask=COUNTED), expected)


def test_copied_maps_are_what_the_student_attends_with(teacher: Any) -> None:
    student = make_model(16, 2, 2)
    rival = make_rival("attention_copy", teacher, student, BATCH)
    outputs = rival.teach(**BATCH)
    for _ in range(2):  # pass after pass
        with rival.capture(student, outputs) as own_pass:
            inside = student(**BATCH).logits
        for layer, maps in enumerate(merged_maps(teacher, outputs, "shd")):
            call = own_pass.captured.layer(layer)
            assert call.value is not None
            assert call.output is not None
            torch.testing.assert_close(call.output.transpose(1, 2), maps @ call.value, atol=1e-5, rtol=1e-4)
    assert rival(own_pass, outputs) == 0.0
    with torch.no_grad():
        outside = student(**BATCH).logits
    assert not torch.allclose(outside, inside)


@pytest.mark.parametrize("name", RIVALS)
def test_gradients_reach_the_student_alone(teacher: Any, name: str) -> None:
    student = make_model(16, 2, 2)
    rival = make_rival(name, teacher, student, BATCH)
    outputs = rival.teach(**BATCH)
    with rival.capture(student, outputs) as own_pass:
        logits = student(**BATCH).logits
    value = rival(own_pass, outputs, loss_mask=COUNTED)
    labels = BATCH["input_ids"].masked_fill(~COUNTED, -100)
    term = RivalTerm(own_pass.captured, (), 0.5, value=value)
    terms = language_kd(logits, labels, teacher(**BATCH).logits.detach(), shift=True, shd=term)
    assert terms["shd"].weight == 0.5
    terms.total.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    query = student.model.layers[1].self_attn.q_proj.weight.grad
    if name == "attention_copy":
        assert query is None
    else:
        assert query.abs().max() > 0
        assert all(parameter.grad.abs().max() > 0 for parameter in rival.parameters() if parameter.ndim > 1)
