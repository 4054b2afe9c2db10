"""A narrower stream of models whose norms lie on it: kept channels, refitted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.shrink.models import make_data, make_teacher
from torch import Tensor

from shd_torch import load_student
from shd_torch.shrink import shrink

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

KINDS = ("BertModel", "BertForPreTraining", "BertForTokenClassification", "RobertaForSequenceClassification")


def make_model(kind: str) -> Any:
    base = make_teacher("roberta" if kind.startswith("Roberta") else "bert", layers=1)
    torch.manual_seed(1)
    model = getattr(transformers, kind)(base.config).double().eval()
    model.base_model.load_state_dict(base.base_model.state_dict(), strict=False)
    return model


@torch.no_grad()
def outputs_of(model: Any, data: dict[str, Tensor], channels: list[int] | None = None) -> list[Tensor]:
    """Logits of all heads, or the channels of the last stream."""
    outputs = model(**data)
    if "last_hidden_state" in outputs:
        states = outputs.last_hidden_state
        return [states if channels is None else states[..., channels]]
    return [value for name, value in outputs.items() if "logits" in name]


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_is_refitted(kind: str, tmp_path: Path) -> None:
    """Towards the teacher's outputs, nearer than the closed form; the folder holds the same model."""
    teacher, data = make_model(kind), make_data("bert", samples=48)
    gaps: list[list[float]] = []
    for align in (False, True):
        made = shrink(teacher, data, hidden=18, head_dim=6, align=align, out=tmp_path / f"student-{align}")
        channels = made.report["stream"]["channels"]
        assert (made.report["stream"]["exact"], channels) == (False, sorted(set(channels)))
        assert len(channels) == 18
        wanted, found = outputs_of(teacher, data, channels), outputs_of(made.student, data)
        gaps.append([float((a - b).norm() / (b - b.mean((0, 1))).norm()) for a, b in zip(found, wanted, strict=True)])
    assert all(refitted < closed < 1.2 for closed, refitted in zip(*gaps, strict=True))
    loaded = load_student(tmp_path / "student-True").double()
    for one, two in zip(outputs_of(loaded, data), found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=0.0)
