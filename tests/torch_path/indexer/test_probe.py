"""What a selection keeps, against whole maps."""

from typing import Any

import pytest
import torch
from support.refusals import refusal

import shd_ref
from shd_torch.indexer import indexer_scores, indexer_select, probe_indexer
from shd_torch.supervision import Factored

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
    with refusal("argument-value", "top_k"):
        probe_indexer(q, k, teacher, top_k=0, scale=1.0)
