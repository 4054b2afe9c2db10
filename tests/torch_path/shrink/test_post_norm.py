"""A narrower stream of models whose norms lie on it: kept channels, refitted; heads, folders and killed runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refusal
from support.shrink.models import make_data, make_teacher
from torch import Tensor

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
    from shd_torch import load_student

    loaded = load_student(tmp_path / "student-True").double()
    for one, two in zip(outputs_of(loaded, data), found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=0.0)


def test_a_killed_run_goes_on_with_the_same_channels(tmp_path: Path) -> None:
    teacher, data = make_teacher("bert").float(), make_data("bert", samples=16)

    def stop(done: int, _: int, what: str) -> None:
        if what == "layer 3/3 heads":
            raise KeyboardInterrupt

    options: dict[str, Any] = {"hidden": 16, "neurons": 12}
    with pytest.raises(KeyboardInterrupt):
        shrink(teacher, data, **options, out=tmp_path / "student", progress=stop)
    told: list[str] = []
    shrink(teacher, data, **options, out=tmp_path / "student", progress=lambda *step: told.append(step[2]))
    assert told[:2] == ["axes found", "layer 2/3 found"]
    shrink(teacher, data, **options, out=tmp_path / "whole")
    for name in ("model.safetensors", "shrink.json"):
        assert (tmp_path / "student" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_is_as_wide_as_the_stream_must_be_known() -> None:
    teacher = make_teacher("bert")
    teacher.cls.register_module("wide", torch.nn.PReLU(24).double())
    with refusal("shrink-unsupported", "cls.wide"):
        shrink(teacher, make_data("bert"), hidden=16)
    with refusal("shrink-unsupported", "lm_head"):
        shrink(make_teacher("opt", do_layer_norm_before=False), make_data("opt"), hidden=16)
