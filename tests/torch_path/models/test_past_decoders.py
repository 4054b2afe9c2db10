"""Decoders as the hub has them, exported with past: the graph, its cache, and what other tools make of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from support.past_decoders import DECODERS, VOCABULARY, export_with_past, make_decoder

from shd_ref.cache import CacheReader, sample_key, trim_sample
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import PrecomputeOptions, RunOptions, find_sites, load_teacher
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import OnlineTeacher

SAMPLES, LENGTH, PADDED_IN_FRONT = 12, 9, 2
MASK_AXES = {"gpt2": "past_sequence_length + 1", "llama": "past_sequence_length + sequence_length"}


@dataclass(frozen=True)
class Taught:
    """A teacher in PyTorch, its graph, and what was cached of it."""

    name: str
    model: Any
    graph: Path
    cache: Path


def make_data() -> dict[str, NDArray[np.int64]]:
    """Ids and mask, padded in front and behind."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, LENGTH + 1, SAMPLES)
    places = np.arange(LENGTH)
    mask = (places < lengths[:, None]).astype(np.int64)
    mask[:PADDED_IN_FRONT] = places >= LENGTH - lengths[:PADDED_IN_FRONT, None]
    return {"input_ids": rng.integers(3, VOCABULARY, mask.shape) * mask, "attention_mask": mask}


@pytest.fixture(scope="module", params=DECODERS)
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Taught:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_decoder(request.param)
    axis = MASK_AXES.get(request.param, "total_sequence_length")
    graph = export_with_past(model, folder / "model.onnx", mask_axis=axis, positions=request.param != "opt")
    options = PrecomputeOptions(num_student_heads=2, codec="float32")
    precompute(graph, make_data(), folder / "cache", options, RunOptions(batch_size=5))
    return Taught(request.param, model, graph, folder / "cache")


def test_every_site_is_found_with_its_heads(taught: Taught) -> None:
    sites = find_sites(load_teacher(taught.graph))
    assert [site.supported for site in sites] == [True, True]
    expected = (4, 2 if taught.name == "llama" else 4, 4, 4, 16, False)
    for site in sites:
        actual = (site.num_heads, site.num_kv_heads, site.d_k, site.d_v, site.d_model, site.cross)
        assert actual == expected


def test_cached_maps_are_those_of_the_live_model(taught: Taught) -> None:
    reader = CacheReader(taught.cache)
    assert reader.manifest.inputs.names == ("attention_mask", "input_ids")
    data, limit = make_data(), load_tolerances()["graph"]["probs"]["float32"]
    tensors = {name: torch.from_numpy(array) for name, array in data.items()}
    mask = tensors["attention_mask"]
    if taught.name != "opt":
        tensors["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)  # as generate() does
    live = [each.probs().numpy() for each in OnlineTeacher(taught.model, 2, 2)(**tensors).supervise()]
    spread = 0.0
    for index in range(SAMPLES):
        sample = {name: array[index] for name, array in data.items()}
        record = reader.read(sample_key(trim_sample(sample, "attention_mask")[0]))
        rows = sample["attention_mask"][: record.length].astype(bool)
        for layer, maps in enumerate(live):
            cached = reader.decode(record, layer)[:, rows]
            expected = maps[index, :, : record.length, : record.length][:, rows]
            np.testing.assert_allclose(cached, expected, atol=limit, rtol=0)
            spread = max(spread, float(np.ptp(cached[..., rows].max(axis=-1))))
    assert spread > 0.2, "maps that are all alike would show nothing"


def test_no_output_of_the_past_is_computed(taught: Taught) -> None:
    from shd_ref.teacher import squeeze_graph

    model = load_teacher(taught.graph)
    assert sum(value.name.startswith("present.") for value in model.graph.output) == 4
    layers = tuple(enumerate(find_sites(model)))[:1]
    squeezed: onnx.ModelProto = squeeze_graph(model, layers, PrecomputeOptions(2)).model
    assert not [value.name for value in squeezed.graph.output if "present" in value.name]
    left = [value.name for value in squeezed.graph.input if value.name.startswith("past")]
    assert left == ["past_key_values.0.key", "past_key_values.0.value"], "the second layer is not run"
