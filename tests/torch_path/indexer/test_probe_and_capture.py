"""What a selection keeps, against whole maps; scorers of live models, against transformers' own selection."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

torch = pytest.importorskip("torch", reason="the PyTorch binding needs torch")

from support.refusals import refusal  # noqa: E402

import shd_ref  # noqa: E402
from shd_torch import indexer_kl  # noqa: E402
from shd_torch.indexer import (  # noqa: E402
    ScorerCall,
    capture_indexers,
    draw_kept_mass,
    indexer_scores,
    indexer_select,
    probe_indexer,
)
from shd_torch.supervision import Factored  # noqa: E402

CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()


def inputs(batch: int = 3) -> tuple[Any, ...]:
    torch.manual_seed(1)
    queries, keys = torch.randn(batch, 2, 8, 3), torch.randn(batch, 1, 8, 3)
    return queries, keys, torch.randn(batch, 4, 8, 5), torch.randn(batch, 2, 8, 5)


def test_kept_mass_is_that_of_whole_maps() -> None:
    queries, keys, q, k = inputs()
    teacher = Factored.teacher(q, k, scale=0.5, is_causal=True)
    mass = probe_indexer(queries, keys, teacher, top_k=2, scale=1.0)
    target = torch.tensor(shd_ref.indexer_target(q, k, teacher_scale=0.5, attn_mask=CAUSAL.numpy()))[:, 0]
    chosen = indexer_select(indexer_scores(queries, keys, scale=1.0), 2, CAUSAL)[:, 0]
    torch.testing.assert_close(mass.kept.double(), (target * chosen).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mass.best.double(), target.topk(2).values.sum(-1), atol=1e-5, rtol=1e-5)
    assert (mass.best >= mass.kept - 1e-6).all()
    spans = mass.spans(2)
    assert [(span.first, span.last) for span in spans] == [(0, 3), (4, 7)]
    means = mass.kept[:, 4:].mean(1).numpy()
    assert spans[1].kept == pytest.approx(means.mean(), abs=1e-6)
    assert spans[1].kept_interval == pytest.approx(1.96 * means.std(ddof=1) / 3**0.5, rel=1e-5)


def test_a_scorer_that_knows_the_teacher_keeps_the_best() -> None:
    *_, q, k = inputs()
    teacher = Factored.teacher(q[:, :1], k[:, :1], scale=1.0, is_causal=True)
    mass = probe_indexer(q[:, :1], k[:, :1], teacher, top_k=3, scale=1.0, relu=False)
    torch.testing.assert_close(mass.kept, mass.best)
    picture = draw_kept_mass({"layer <0>": mass, "layer 1": mass}, 4)
    assert len(ElementTree.fromstring(picture).findall("{*}polyline")) == 4
    with refusal("argument-value", "at least one layer"):
        draw_kept_mass({})
    with refusal("argument-value", "top_k"):
        probe_indexer(q, k, teacher, top_k=0, scale=1.0)


class Scorer(torch.nn.Linear):
    """Two heads and a key from the same projection."""


def test_a_scorer_is_captured_by_its_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Scorer(4, 9))

    def read(module: Any, hidden: Any) -> ScorerCall:
        parts = torch.nn.functional.linear(hidden, module.weight).unflatten(-1, (3, 3)).transpose(1, 2)
        return ScorerCall(parts[:, :2], parts[:, 2:], None, 1.0)

    with refusal("argument-value", "read must be given"), capture_indexers(model, ["1"]):
        pass
    with refusal("argument-value", "no scorer"), capture_indexers(model):
        pass
    *_, q, k = inputs(2)
    with capture_indexers(model, ["1"], read) as calls:
        model(torch.randn(2, 8, 4))
    indexer_kl(**calls["1"]._asdict(), teacher=Factored.teacher(q, k, is_causal=True)).backward()
    assert model[1].weight.grad.abs().sum() > 0
    assert model[0].weight.grad is None
    assert not model[1]._forward_pre_hooks


@pytest.mark.parametrize("kind", ["deepseek_v32.DeepseekV32", "glm_moe_dsa.GlmMoeDsa"])
def test_transformers_own_scorers_select_what_is_captured(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    package, prefix = kind.split(".")
    name = f"transformers.models.{package}.modeling_{package}"
    modeling = pytest.importorskip(name, reason="this version of transformers has no such model")
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=16, index_n_heads=2, index_head_dim=8, index_topk=3, q_lora_rank=12, qk_rope_head_dim=4
    )
    torch.manual_seed(2)
    module = torch.nn.ModuleDict({"indexer": getattr(modeling, f"{prefix}Indexer")(config, 0)})
    angles = torch.arange(8.0)[None, :, None] * torch.tensor([1.0, 0.1])
    angles = torch.cat([angles, angles], -1)
    mask = torch.zeros(1, 8, 8).masked_fill(~CAUSAL, -torch.inf)
    hidden, residual = torch.randn(1, 8, 16, requires_grad=True), torch.randn(1, 8, 12)
    with capture_indexers(module) as calls:
        picked = module["indexer"](hidden, residual, (angles.cos(), angles.sin()), mask, torch.arange(8)[None])
    call = calls["indexer"]
    scores = indexer_scores(*call[:3], scale=call.scale)
    chosen = indexer_select(scores, 3, CAUSAL)[0, 0]
    for row in range(2, 8):  # by their scores: of equal ones transformers takes any
        got, right = scores[0, 0, row][picked[0, row].long()], scores[0, 0, row][chosen[row]]
        torch.testing.assert_close(got.sort().values, right.sort().values)
    *_, q, k = inputs(1)
    indexer_kl(**call._asdict(), teacher=Factored.teacher(q, k, is_causal=True)).backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
    assert hidden.grad is None
