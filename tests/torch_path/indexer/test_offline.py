"""A scorer trained from a factored cache: the teacher is nowhere in memory, and its targets are the live ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.exported_models import trace
from support.shrink.models import WIDTH, make_data, make_teacher
from torch import Tensor, nn

from shd_ref.teacher import PrecomputeOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import SupervisedDataset, capture_attention, indexer_kl
from shd_torch.supervision import Factored

SAMPLES, LENGTH = 24, 9


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.weights = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2)

    def forward(self, states: Tensor) -> dict[str, Tensor]:
        return {
            "queries": self.queries(states).unflatten(-1, (2, 4)).transpose(1, 2),
            "keys": self.keys(states)[:, None],
            "weights": self.weights(states).transpose(1, 2),
        }


def test_a_scorer_learns_from_a_cache_of_queries_and_keys(tmp_path: Path) -> None:
    """Padded samples and grouped keys; dense at first, then on the scorer's own top-3."""
    teacher = make_teacher("llama", layers=2).float()
    data = make_data("llama", samples=SAMPLES, length=LENGTH)
    trace(teacher, {name: tensor[:2] for name, tensor in data.items()}, tmp_path / "teacher.onnx")
    arrays = {name: tensor.numpy() for name, tensor in data.items()}
    options = PrecomputeOptions(num_student_heads=1, form="factored", factored_codec="float16", hidden=(0, 1))
    precompute(tmp_path / "teacher.onnx", arrays, tmp_path / "cache", options)
    samples = [{name: array[row] for name, array in arrays.items()} for row in range(SAMPLES)]
    joined = SupervisedDataset(samples, tmp_path / "cache")
    torch.manual_seed(0)
    scorers = nn.ModuleList([Scorer(), Scorer()])

    def loss_of(batch: Any, teachers: list[Any], states: dict[int, Tensor], top_k: int | None) -> Tensor:
        mask = batch["attention_mask"].bool()
        terms = [
            indexer_kl(
                **scorer(states[n]), teacher=teachers[n], scale=0.5, top_k=top_k, reduction="rows", loss_mask=mask
            )
            for n, scorer in enumerate(scorers)
        ]
        return torch.stack(terms).sum()

    batch, taught = joined.collate([joined[row] for row in range(6)])
    with torch.no_grad(), capture_attention(teacher) as capture:
        outputs = teacher(**batch, output_hidden_states=True, use_cache=False)
        live = [Factored.teacher(call.query, call.key, is_causal=True) for call in capture.calls]
    live_states = dict(enumerate(outputs.hidden_states))
    for top_k in (None, 3):
        cached = loss_of(batch, taught.supervise(LENGTH), taught.hidden_states(LENGTH), top_k)
        assert cached.item() == pytest.approx(loss_of(batch, live, live_states, top_k).item(), rel=0.02)
    optimizer = torch.optim.Adam(scorers.parameters(), lr=2e-2)
    losses: list[float] = []
    for step in range(30):
        rows = np.random.default_rng(step).choice(SAMPLES, 8, replace=False)
        batch, taught = joined.collate([joined[int(row)] for row in rows])
        loss = loss_of(batch, taught.supervise(LENGTH), taught.hidden_states(LENGTH), None if step < 25 else 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[20:25]) < 0.75 * losses[0]
