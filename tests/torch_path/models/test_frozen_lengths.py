"""Graphs of the legacy exporter that kept the example's length: run at it, and longer samples refused with it."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support.refusals import refusal

from shd_ref.cache import CacheReader, sample_key
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import PrecomputeOptions, RunOptions, find_sites, load_teacher, recheck_records
from shd_ref.teacher.graph.inputs import Probe
from shd_ref.teacher.precompute.engine import precompute

HEADS, WIDTH, FROZEN = 4, 12, 7


class Frozen(torch.nn.Module):
    """Attention whose reshapes take the sizes of the example for numbers."""

    def __init__(self, batch: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(40, WIDTH)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.freezes_batch = batch

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.attend(input_ids, attention_mask)[0]

    def attend(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = (int(size) for size in input_ids.shape)
        rows = batch if self.freezes_batch else -1
        hidden = 3 * self.table(input_ids)
        query, key, value = (
            part(hidden).view(rows, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.parts[:3]
        )
        logits = (query @ key.transpose(2, 3)).masked_fill(attention_mask[:, None, None] == 0, -1e9)
        probs = logits.softmax(-1)
        return self.parts[3]((probs @ value).transpose(1, 2).reshape(rows, length, WIDTH)), probs


def export(model: Frozen, path: Path) -> Path:
    ids = torch.ones(1, FROZEN, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask", "output")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Python numbers are taken for constants is the point
        names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["output"], "dynamic_axes": axes}
        torch.onnx.export(model.eval(), (ids, ids), str(path), opset_version=17, dynamo=False, **names)
    return path


@pytest.mark.parametrize("batch", [False, True], ids=["length", "length and batch"])
def test_a_frozen_length_is_found_and_filled(tmp_path: Path, batch: bool) -> None:
    model = Frozen(batch)
    graph = export(model, tmp_path / "teacher.onnx")
    teacher = load_teacher(graph)
    (site,) = find_sites(teacher)
    assert site.supported, site.reason
    probe = Probe(teacher, [site.probs])
    assert (probe.frozen_length, probe.frozen_batch) == (FROZEN, 1 if batch else None)

    rng = np.random.default_rng(0)
    mask = (np.arange(FROZEN) < np.array([7, 4, 5, 4, 6])[:, None]).astype(np.int64)
    data = {"input_ids": rng.integers(1, 40, mask.shape) * mask, "attention_mask": mask}
    options = PrecomputeOptions(num_student_heads=HEADS, codec="float32")
    # The longest sample is shorter than the graph in one of the parts that run alone.
    precompute(graph, data, tmp_path / "cache", options, RunOptions(batch_size=2))
    reader = CacheReader(tmp_path / "cache")
    limit = load_tolerances()["graph"]["probs"]["float32"]
    for index, length in enumerate(mask.sum(axis=1)):
        sample = {name: array[index, :length] for name, array in data.items()}
        record = reader.read(sample_key(sample))
        with torch.no_grad():
            probs = model.attend(*(torch.from_numpy(array[None]) for array in sample.values()))[1]
        np.testing.assert_allclose(reader.decode(record, 0), probs[0].numpy(), atol=limit)
    assert recheck_records(tmp_path / "cache", graph, data).records == len(mask)


def test_longer_samples_are_refused_with_the_length(tmp_path: Path) -> None:
    graph = export(Frozen(False), tmp_path / "teacher.onnx")
    longer = np.ones((3, FROZEN + 2), np.int64)
    with refusal("inputs-invalid", f"the graph fixes its length at {FROZEN}; got {FROZEN + 2}"):
        precompute(graph, {"input_ids": longer, "attention_mask": longer}, tmp_path / "cache", PrecomputeOptions(2))
    # Padding alone may be longer.
    mask = (np.arange(FROZEN + 2) < 5).astype(np.int64) * longer
    precompute(graph, {"input_ids": longer * mask, "attention_mask": mask}, tmp_path / "cache", PrecomputeOptions(2))
