"""Multi-head teachers become grouped ones: exact where heads are turns of each other, the nearest way elsewhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.shrink.models import logits_of, make_data, make_teacher

from shd_torch.shrink import shrink
from shd_torch.shrink.families import family_of

FAMILIES = ["llama", "qwen2", "qwen3", "gemma", "phi3"]
SIZES = [(2, 1), (4, 2), (4, 1)]
"""Key and value heads before and after, under 4 query heads of 6."""


def turn_groups(teacher: Any, after: int, kind: str) -> None:
    """Every group's keys and values become turns of its first head's, by whole layers' weights."""
    family, random = family_of(teacher), np.random.default_rng(5)
    kv_heads = teacher.config.num_key_value_heads
    pairs = int(teacher.model.rotary_emb.inv_freq.numel())
    for layer in family.layers_of(teacher):
        weights = family.read_attention(layer, 4, kv_heads)
        for head in range(kv_heads):
            first = head // (kv_heads // after) * (kv_heads // after)
            turn, angles = np.eye(6), random.uniform(-3, 3, pairs)
            if kind == "signs":  # which commute with any scales of norms
                angles = np.pi * random.integers(0, 2, pairs)
            value = np.linalg.qr(random.normal(size=(6, 6)))[0]
            if kind == "equal":
                angles, value = 0 * angles, np.eye(6)
            for i, angle in enumerate(angles):
                j = i + pairs
                turn[i, i] = turn[j, j] = np.cos(angle)
                turn[i, j], turn[j, i] = np.sin(angle), -np.sin(angle)
            for name, matrix in (("key", turn), ("value", value)):
                for field in (name, f"{name}_bias"):
                    if (heads := getattr(weights, field)) is not None:
                        heads[head] = heads[first] @ matrix
        family.write_attention(layer, weights)


@pytest.mark.parametrize(
    ("name", "before", "after", "kind"),
    [*(("llama", *sizes, "equal") for sizes in SIZES), *((name, 4, 2, "turned") for name in FAMILIES)],
)
def test_groups_of_one_head_merge_without_error(name: str, before: int, after: int, kind: str) -> None:
    teacher, data = make_teacher(name, kv_heads=before), make_data(name, samples=24)
    turn_groups(teacher, after, "signs" if (name, kind) == ("qwen3", "turned") else kind)
    other = make_data(name, samples=3, length=13, seed=5)
    for align in (False, True):
        made = shrink(teacher, data, kv_heads=after, align=align)
        assert {(layer["case"], layer["exact"]) for layer in made.report["layers"]} == {("turned", True)}
        torch.testing.assert_close(logits_of(made.student, other), logits_of(teacher, other), atol=1e-8, rtol=0.0)


def test_norms_with_one_scale_for_a_pair_let_any_angle_merge() -> None:
    teacher, data = make_teacher("qwen3"), make_data("qwen3")
    with torch.no_grad():
        for layer in teacher.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight[3:] = norm.weight[:3]
    turn_groups(teacher, 1, "turned")
    made = shrink(teacher, data, kv_heads=1)
    close = 1e-5  # the norms compute in float32
    torch.testing.assert_close(logits_of(made.student, data), logits_of(teacher, data), atol=close, rtol=0.0)


@pytest.mark.parametrize(
    ("name", "before", "after"), [*((name, 4, 2) for name in FAMILIES), ("phi3", 2, 1), ("qwen3", 4, 1)]
)
def test_any_heads_merge_to_a_stock_student(name: str, before: int, after: int, tmp_path: Path) -> None:
    """Nearer than the mean of each group; loaded by the stock class, it gives the same."""
    teacher, data = make_teacher(name, kv_heads=before), make_data(name, samples=24)
    made = shrink(teacher, data, kv_heads=after, out=tmp_path / "student")
    assert made.report["student"]["kv_heads"] == after
    assert made.student.config.num_key_value_heads == after
    loaded = type(teacher).from_pretrained(tmp_path / "student", dtype=torch.float64).eval()
    assert type(made.student) is type(teacher)
    torch.testing.assert_close(logits_of(loaded, data), logits_of(made.student, data), atol=1e-5, rtol=0.0)
    exact, closed = logits_of(teacher, data), shrink(teacher, data, kv_heads=after, align=False).student
    mean, family = type(teacher)(made.student.config).double().eval(), family_of(teacher)
    mean.load_state_dict(closed.state_dict())
    for layer, target in zip(family.layers_of(teacher), family.layers_of(mean), strict=True):
        weights = family.read_attention(layer, 4, before)
        for field in ("key", "value", "key_bias", "value_bias"):
            if (heads := getattr(weights, field)) is not None:
                object.__setattr__(weights, field, heads.reshape(after, -1, *heads.shape[1:]).mean(axis=1))
        family.write_attention(target, weights)
    gaps = [float((logits_of(model, data) - exact).norm()) for model in (made.student, mean)]
    assert gaps[0] < gaps[1]


@pytest.mark.parametrize(("options", "case"), [({"heads": 2, "kv_heads": 1}, "turned"), ({"heads": 2}, "rotary")])
def test_query_heads_merge_too(options: dict[str, int], case: str) -> None:
    """Every layer takes a way; where both are as near, turns come first if query heads share them."""
    teacher, data = make_teacher("llama", kv_heads=4), make_data("llama", samples=24)
    cases = [layer["case"] for layer in shrink(teacher, data, **options).report["layers"]]
    assert set(cases) <= {"turned", "rotary"}
    assert case in cases
